"""How a writer opens in the background.

A process that starts while a server is away must not fail: the platform would restart it again and again, and take down what
needs no server. Its blocks must not wait for the server either: they would occupy every thread of the process. So a thread
claims, and tries again until it succeeds. A block that comes earlier waits for a moment, since a normal start takes one, and is
then refused with the reason.

An error that waiting cannot fix ends the attempts, and is kept for blocks and for ``health()``. A loss that an attempt finds
belongs to a former owner's transaction, whose rows are committed. No block of this process may raise it, because the block's
own rows are not. It is reported like every loss that is found in the background, and the next attempt succeeds.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dualwrite import waiting
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.process import Health, OpeningStep, after_failed_opening
from dualwrite.waiting import Condition

if TYPE_CHECKING:
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.writing.lane import FoundLoss

logger = logging.getLogger(__name__)


def ask_first(config: KafkaConfig, name: str) -> None:
    """Ask Kafka something before anything is claimed. Raises `Unavailable`, with its address, if it does not answer."""
    with KafkaCoordinator(config) as coordinator:
        try:
            coordinator.cluster_id(Deadline(_PATIENCE_S))
        except Unavailable as error:
            raise Unavailable(
                f"Kafka at {config.listener[0]} does not answer ({error.what})", transactional_id=name
            ) from error


T = TypeVar("T")
_PATIENCE_S: Final = 2.0
"""How long a block waits for an opening while no server is known to hold it up. An opening takes less than a second, and within
this time the first look at Kafka shows whether it answers."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_JOIN_S: Final = 5.0
"""How long closing waits for a running attempt. One that is still waiting for a server then discards what it makes."""


class Opening(Generic[T]):
    """Opens one writer. Its callers are threads and tasks.

    ``attempt`` asks the servers, and returns what it has made. ``publish`` gives that to the writer, without waiting;
    ``discard`` throws it away. ``report`` takes a loss.
    """

    def __init__(
        self,
        name: str,
        attempt: Callable[[], T],
        *,
        publish: Callable[[T], object],
        discard: Callable[[T], object],
        report: Callable[[FoundLoss], object],
    ) -> None:
        self._name = name
        self._attempt = attempt
        self._publish = publish
        self._discard = discard
        self._report = report
        self._changed = Condition()
        self._stopping = threading.Event()
        self._began_s = now_s()
        self._missing: Exception | None = None
        self._missing_since = datetime.now(timezone.utc)
        self._missing_since_s = self._began_s
        self.refused: DualWriteError | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, name=f"dualwrite {name} opens", daemon=True)

    def start(self) -> None:
        """Begin. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Make no further attempt, and discard what a running one makes. May be called more than once."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @property
    def stopped(self) -> bool:
        """Whether no further attempt is made."""
        return self._stopping.is_set()

    @property
    def waits_for(self) -> str | None:
        """What is missing, and since when; None if it has opened, or never will."""
        if self.done or self.refused is not None:
            return None
        missing = self._missing
        if missing is None:
            return f"its opening began {now_s() - self._began_s:.0f} s ago"
        what = missing.what if isinstance(missing, DualWriteError) else repr(missing)
        return f"{what}, since {self._missing_since:%H:%M:%S} UTC ({now_s() - self._missing_since_s:.0f} s)"

    def wait(self, seconds: float) -> None:
        """Wait for the opening while no server is known to hold it up, then raise as :meth:`check`."""
        deadline = Deadline(0.0 if waiting.blocks_a_loop() else min(seconds, _PATIENCE_S))
        with self._changed:
            while self._is_open_question and not deadline.expired:
                self._changed.wait(deadline.remaining_s())
        self.check()

    def check(self, *, patient: bool = False) -> None:
        """Raise unless it has opened or was stopped.

        With ``patient`` it does not raise while no attempt has failed: the caller's own block will wait.
        """
        if self.done or self.stopped or (patient and self._is_open_question):
            return
        if self.refused is not None:
            raise copy(self.refused) from self.refused  # a copy for each caller: an error that is raised grows
        raise Unavailable(
            f"the writer is not open yet: {self.waits_for}; nothing was begun",
            transactional_id=self._name,
            next_step="try again later: it opens by itself when the servers answer",
        )

    @property
    def _is_open_question(self) -> bool:
        return not self.done and self._missing is None and self.refused is None and not self._stopping.is_set()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s, began = now_s(), datetime.now(timezone.utc)
            try:
                made = self._attempt()
            except Exception as error:  # noqa: BLE001 - an unexpected error may be temporary, too
                step = after_failed_opening(error)
                self._note(error, step, began_s, began)
                if step is OpeningStep.KEEP:
                    return
                if step is OpeningStep.AGAIN:
                    self._stopping.wait(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with self._changed:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._publish(made)
                    self.done = True
                    self._changed.notify_all()
            if stopped:
                self._discard(made)
            else:
                logger.log(
                    logging.INFO if self._missing is None else logging.WARNING,
                    "%s: open after %.1f s",
                    self._name,
                    now_s() - self._began_s,
                )
            return

    def _note(self, error: Exception, step: OpeningStep, began_s: float, began: datetime) -> None:
        if self._stopping.is_set():
            return
        if step is OpeningStep.REPORT and isinstance(
            error, DatabaseWentBack | DecidedTransactionLost | OutcomeUnverifiable
        ):
            self._report(error)
            return
        if step is OpeningStep.KEEP:
            logger.error("%s: cannot be opened: %s", self._name, error)
        elif self._missing is None:
            shown = None if isinstance(error, DualWriteError) else error
            logger.warning("%s: not open yet; trying again until it is: %s", self._name, error, exc_info=shown)
        else:
            logger.debug("%s: not open yet: %s", self._name, error)
        with self._changed:
            if step is OpeningStep.KEEP and isinstance(error, DualWriteError):
                self.refused = error
            else:
                if self._missing is None:
                    self._missing_since_s, self._missing_since = began_s, began
                self._missing = error
            self._changed.notify_all()

    def shown_in(self, health: Health) -> Health:
        """The health of a writer that is not open, with what its opening waits for, or what keeps it from opening."""
        if self.done or self.stopped:
            return health
        refused = None if self.refused is None else str(self.refused)
        return replace(health, opening=self.waits_for, refused=refused)
