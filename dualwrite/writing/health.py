"""Whether a writer is ready, judged by its dual writes and housekeeping: no caller waits for a server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from dualwrite.clock import now_s
from dualwrite.errors import CompletionPending, DualWriteError, Fenced, TransactionInDoubt, Unavailable
from dualwrite.protocol.process__protocol_process_health import Health
from dualwrite.protocol.values__protocol_naming import is_of_writer
from dualwrite.writing.health__writing_probe import Probe
from dualwrite.writing.lane_pool import Lanes

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 1.0
_MISSING: Final = (Unavailable, TransactionInDoubt, CompletionPending)
"""The errors that say that an answer is missing."""


class Vitals:
    """Notes whether the servers answer. Used by many threads at once.

    If they did not answer last, the next question starts a probe in the background: a platform sends no work to a process that
    is not ready, so no dual write would ever find that they answer again.

    Args:
        name: The writer's transactional id.
        probe: Asks the database and Kafka.
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

    def health(self, lanes: Lanes, *, is_open: bool, untold_losses: int) -> Health:
        """The writer's health. Returns at once."""
        answered = self._answered
        if is_open and not answered:
            self._probe.start()
        now, all_lanes = now_s(), lanes.all
        used = [kept for kept in all_lanes if kept.taken_at is not None]
        unsettled = [kept for kept in all_lanes if kept.taken_at is None and kept.lane.needs_settling]
        left = [left_s for kept in used if (left_s := kept.lane.time_left_s) is not None]
        return Health(
            self._name,
            is_open,
            fenced=self._fenced or any(kept.given_up for kept in unsettled),
            answered=answered,
            untold_losses=untold_losses,
            max_lanes=lanes.max_lanes,
            lanes=len(all_lanes),
            used=len(used),
            waiting=lanes.waiting,
            unsettled=len(unsettled),
            stuck=sum(kept.failures > 0 for kept in unsettled),
            unsettled_s=max((kept.lane.unsettled_s for kept in unsettled), default=0.0),
            open_s=max((now - since for kept in used if (since := kept.taken_at) is not None), default=0.0),
            time_left_s=min(left, default=None),
        )

    def _ask(self) -> None:
        try:
            self._question()
            self._answered = True
        except Exception as error:  # noqa: BLE001 - whatever it is, they did not answer, or the writer was closed meanwhile
            logger.info("%s: the servers do not answer yet: %s", self._name, error)
