"""Finds out how transactions have ended while their lanes are idle, so that the next dual write need not wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.kafka.transaction_ends import PendingEnd, ask_for_ends
from dualwrite.protocol.known_end import EndStep
from dualwrite.waiting import Event

if TYPE_CHECKING:
    from dualwrite.kafka.coordinator import KafkaCoordinator

logger = logging.getLogger(__name__)

_WAITS_S = 0.001, 0.1
_LONGEST_ASK_S: Final = 2.0
_JOIN_S: Final = 5.0


class _Watched:
    """One transaction whose end the watcher asks for."""

    def __init__(self, pending: PendingEnd, note: Callable[[EndStep], None]) -> None:
        self.pending = pending
        self.note = note
        self.done = Event()


class EndWatcher:
    """Asks for the ends of many lanes' transactions side by side, on one thread.

    It also logs warnings: of other writers' open transactions that hold back readers for seconds, and of compacted topics.

    Args:
        name: The writer's name.
        coordinator: Kafka; only the watcher's thread uses it, and closes it at its end.
        on_unknown: Called where an end is not known, or not as decided: there may be something to settle.
    """

    def __init__(self, name: str, coordinator: KafkaCoordinator, on_unknown: Callable[[], None]) -> None:
        self._name = name
        self._coordinator = coordinator
        self._on_unknown = on_unknown
        self._new: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._watched: dict[PendingEnd, _Watched] = {}
        self._looked_up: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"dualwrite {name} ends", daemon=True)
        self._thread.start()

    def watch(self, pending: PendingEnd, note: Callable[[EndStep], None]) -> None:
        """Ask until there is nothing left to wait for, then pass on the step.

        Args:
            pending: The end to ask for. No other thread asks for it meanwhile; one that needs it calls :meth:`wait`.
            note: Called with the step, on the watcher's thread.
        """
        if not self._closed and pending not in self._watched:
            try:
                self._watched[pending] = watched = _Watched(pending, note)
                self._new.put(watched)
            except BaseException:  # interrupted: no thread may wait for an end that is not asked for
                self._watched.pop(pending, None)
                raise

    def wait(self, pending: PendingEnd, deadline: Deadline) -> bool:
        """Wait until the watcher has stopped asking for this end. Returns at once if it is not asking.

        Returns:
            False if it was still asking at the deadline: it may yet pass on a step.
        """
        if (watched := self._watched.get(pending)) is not None and self._thread.is_alive():
            return watched.done.wait(deadline.remaining_s())
        return True

    def close(self) -> None:
        """Stop asking. May be called more than once."""
        self._closed = True
        self._new.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._coordinator.close()

    def _watch(self) -> None:
        asked: list[_Watched] = []
        between = GrowingPause(*_WAITS_S)
        while not self._closed:
            if not asked:
                asked += self._taken(block=True)
                between = GrowingPause(*_WAITS_S)
            between.wait()  # markers come a moment after the answer
            asked += self._taken(block=False)
            ended, asked = asked, self._asked_once(asked)
            self._warn()
            self._warn_of_compaction({first.topic for one in ended for first in one.pending.ended.state.first_offsets})
        for watched in [*asked, *self._watched.values()]:
            watched.done.set()

    def _taken(self, *, block: bool) -> list[_Watched]:
        taken = []
        with suppress(queue.Empty):
            while (watched := self._new.get(block=block)) is not None:
                taken.append(watched)
                block = False
        return taken

    def _asked_once(self, asked: list[_Watched]) -> list[_Watched]:
        """Ask for all of them once. Returns those to ask for again."""
        try:
            steps = ask_for_ends(self._coordinator, [one.pending for one in asked], Deadline(_LONGEST_ASK_S))
        except Exception as error:  # noqa: BLE001 - a right is missing, or the writer was closed: a block asks, and raises it
            logger.warning("could not ask in the background how transactions have ended: %s", error)
            for one in asked:
                self._let_go(one)
            self._on_unknown()
            return []
        again = []
        for one, step in zip(asked, steps, strict=True):
            if step is EndStep.WAIT:
                again.append(one)
                continue
            try:
                one.note(step)
            except Exception:
                logger.exception("could not record how a transaction has ended")
            self._let_go(one)
            if step is not EndStep.KNOWN:
                self._on_unknown()
        return again

    def _warn(self) -> None:
        """Warn of what holds back readers of the partitions that this writer writes to: Kafka does not tell them."""
        try:
            for one in self._coordinator.newly_held_back(Deadline(_LONGEST_ASK_S)):
                if one.writer != self._name:
                    logger.warning("%s: read_committed consumers are held back in %s", self._name, one)
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out what holds back readers: %s", error)

    def _warn_of_compaction(self, topics: set[str]) -> None:
        """Warn of topics that do not keep transactions whole, once for each."""
        new = {topic for topic in topics - self._looked_up if not topic.startswith("__")}
        if not new:
            return
        self._looked_up |= new
        try:
            for topic in sorted(self._coordinator.compacted(new, Deadline(_LONGEST_ASK_S))):
                logger.warning(
                    "%s: the topic %r is compacted: a consumer that lags behind sees only the newest message of each key, and "
                    "so only a part of some transactions",
                    self._name,
                    topic,
                )
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out whether topics are compacted: %s", error)

    def _let_go(self, watched: _Watched) -> None:
        self._watched.pop(watched.pending, None)
        watched.done.set()
