"""Whether a writer is ready: what it knows of itself, and questions to the servers, asked in the background.

A readiness check must answer at once, so it reads the last answers instead of asking.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from dualwrite.clock import now_s
from dualwrite.errors import CompletionPending, DualWriteError, Fenced, TransactionInDoubt, Unavailable
from dualwrite.protocol.process import Health
from dualwrite.protocol.values import is_of_writer
from dualwrite.writing.lane_pool import Lanes

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 1.0
_MISSING: Final = (Unavailable, TransactionInDoubt, CompletionPending)


class Vitals:
    """Notes whether the servers answer. Used by many threads at once.

    If they did not answer last, the next question starts a probe in the background. A platform sends no work to a process that
    is not ready, so no dual write would find out that the servers answer again.
    """

    def __init__(self, name: str, probe: Callable[[], object]) -> None:
        self._name = name
        self._question = probe
        self._probe = Probe(f"dualwrite {name} probe", self._ask, every_s=_PROBE_EVERY_S)
        self._answered = True
        self._fenced = False

    def note(self, error: DualWriteError | None) -> None:
        """Note the end of a dual write, which shows whether the servers answered it.

        An error of another writer that has passed through the block says nothing about this one.
        """
        if error is None:
            self._answered = True
        elif error.transactional_id is not None and not is_of_writer(self._name, error.transactional_id):
            return
        elif isinstance(error, Fenced):
            self._fenced = True
        elif isinstance(error, _MISSING) or isinstance(error.__cause__, _MISSING):
            self._answered = False

    def health(self, lanes: Lanes, *, is_open: bool, unreported_losses: int) -> Health:
        """The writer's health. Returns at once."""
        answered = self._answered
        if is_open and not answered:
            self._probe.start()
        now, all_lanes = now_s(), lanes.all
        used = [pooled for pooled in all_lanes if pooled.taken_at is not None]
        unsettled = [pooled for pooled in all_lanes if pooled.taken_at is None and pooled.lane.needs_settling]
        left = [left_s for pooled in used if (left_s := pooled.lane.time_left_s) is not None]
        return Health(
            self._name,
            is_open,
            refused=next((str(error) for pooled in all_lanes if (error := pooled.lane.refused) is not None), None),
            fenced=self._fenced or any(pooled.given_up for pooled in unsettled),
            answered=answered,
            unreported_losses=unreported_losses,
            max_lanes=lanes.max_lanes,
            lanes=len(all_lanes),
            used=len(used),
            waiting=lanes.waiting,
            unsettled=len(unsettled),
            stuck=sum(pooled.failures > 0 for pooled in unsettled),
            unsettled_s=max((pooled.lane.unsettled_s for pooled in unsettled), default=0.0),
            open_s=max((now - since for pooled in used if (since := pooled.taken_at) is not None), default=0.0),
            time_left_s=min(left, default=None),
        )

    def _ask(self) -> None:
        try:
            self._question()
            self._answered = True
        except Exception as error:  # noqa: BLE001 - whatever it is, they did not answer, or the writer was closed meanwhile
            logger.info("%s: the servers do not answer yet: %s", self._name, error)


# Asks the servers from a background thread, now and then: a caller gets the last answer and never waits.

EVERY_S: Final = 30.0
_FORGOTTEN_AFTER_S: Final = 180.0


class Probe:
    """Asks in a thread of its own: one question at a time, at most one every ``every_s``. Thread-safe."""

    # The question handles its errors.
    def __init__(self, name: str, ask: Callable[[], None], *, every_s: float) -> None:
        self._name = name
        self._ask = ask
        self._every_s = every_s
        self._lock = threading.Lock()
        self._next_at = 0.0

    def start(self) -> None:
        """Ask, unless it is too soon. Returns at once."""
        with self._lock:
            if now_s() < self._next_at:
                return
            self._next_at = float("inf")  # one at a time
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._ask()
        finally:
            self._next_at = now_s() + self._every_s


class SeldomAsked:
    """A number that a server reports, as of the last time it was asked. Reading it starts another request once that is due."""

    def __init__(self, name: str, ask: Callable[[], float], on_error: Callable[[Exception], None]) -> None:
        self._question = ask
        self._on_error = on_error
        self._probe = Probe(name, self._ask, every_s=EVERY_S)
        self._answer: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        """The last answer. None before the first one, and three minutes after the last."""
        answer = self._answer
        self._probe.start()
        return None if answer is None or now_s() - answer[1] > _FORGOTTEN_AFTER_S else answer[0]

    def _ask(self) -> None:
        try:
            self._answer = self._question(), now_s()
        except Exception as error:  # noqa: BLE001 - the next question may be answered
            self._on_error(error)
