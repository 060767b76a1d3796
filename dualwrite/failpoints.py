"""Named points in the code where a test can stop, kill or fail the process. They cost a dictionary look-up.

``DUALWRITE_FAILPOINT=name[:nth[:action]]`` in the environment arms one point for this process and the workers it starts:
the nth pass (by default the first) triggers the action: ``kill`` (SIGKILL to this process, the default), ``stop`` (SIGSTOP)
or ``raise`` (:class:`FailpointError`). Commas separate several points.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

FAILPOINTS: Final[dict[str, str]] = {
    "claim.before": "nothing of the claim has happened",
    "claim.row_raised": "the row's incarnation is raised, nothing is settled",
    "claim.settled": "older incarnations are settled, the new Kafka id is not made",
    "claim.initialized": "the new Kafka id is initialised",
    "settle.looked": "the coordinator has answered",
    "settle.before_commit": "about to end a decided transaction",
    "settle.committed": "a decided transaction was ended with commit",
    "settle.recorded": "an outcome was recorded in the row",
    "settle.before_retire": "about to retire an incarnation",
    "settle.retired": "the incarnation is retired, the row not yet marked",
    "settle.marked": "the row says settled",
    "repair.before": "about to end what the broker has forgotten to end",
    "repair.added": "its partitions are in a transaction of the retired id",
    "repair.ended": "that transaction is ended",
    "participant.found": "the database has something prepared, not ended",
    "participant.ended": "what was prepared in the database is committed or rolled back",
    "action.intended": "what a person does by hand is stored with its reason, nothing is done",
    "action.done": "it is done, the history does not say so",
    "terminate.aborted": "a decided transaction was aborted because an operator gave it up, nothing is recorded",
    "complete.before": "about to complete what was handed over and decided",
    "complete.ended": "Kafka has committed it, the row does not say so",
    "complete.recorded": "the row says that it is completed, its owner may continue",
    "write.begun": "the database transaction has begun",
    "write.checked": "the row's incarnation was read",
    "write.produced": "a message was handed to the producer",
    "write.body_done": "the user's code is done",
    "write.prepared": "the Kafka transaction is flushed",
    "write.recorded": "the row is updated, not committed",
    "write.decided": "the database has committed",
    "write.completed": "Kafka has committed",
    "write.falls_back": "Kafka is silent, the messages are to wait, nothing is decided",
    "write.turns": "the writer's mode is locked alone, and set to later, not committed",
    "write.waits": "the database has committed messages that wait, nobody was woken",
    "write.before_abort": "about to abort both sides",
    "write.rolled_back": "the database has rolled back, Kafka has not yet aborted",
    "outbox.locked": "the last send has locked the mode, nothing is read",
    "outbox.read": "messages that wait are read, nothing is sent",
    "outbox.sent": "messages that waited were handed to the producer, they are not deleted",
    "outbox.deleted": "their rows are deleted in the transaction, nothing is decided",
    "outbox.moved_aside": "a message that Kafka refuses is moved aside",
    "group.unit_begun": "the savepoint of a unit is open, its work has not begun",
    "group.rows_executed": "the rows of one or several units of rows are written, their savepoint is open",
    "group.unit_kept": "a unit of a group is done, its messages wait for the others",
    "group.unit_dropped": "a unit of a group has failed and is rolled back to its savepoint",
    "group.units_done": "all units of a group are done, nothing is decided",
    "group.committed": "a group is committed on both sides, its callers do not know",
    "lease.taken": "a member of a fleet has its lease, nothing is claimed",
    "lease.heartbeat": "a heartbeat has renewed the lease, not committed",
    "lease.settled": "the member's writer is closed and settled, its lease is not given back",
    "lease.given_back": "the lease is given back",
    "slot.leased": "a slot is leased",
    "slot.released": "a slot is given back",
    "ledger.checked": "the ledger has no row for this partition",
    "ledger.begun": "the row that says what a batch is for is inserted, not committed",
    "ledger.inserted": "the ledger row is inserted, not committed",
    "spark.task_started": "a Spark task begins",
    "spark.rows_copied": "a Spark task has sent all rows to the database",
    "spark.task_done": "a Spark task has written its partition",
    "batch.handed_over": "a task's Kafka transaction is prepared and its rows stand in the database, undecided",
    "batch.prepared": "all tasks of a batch have prepared, nothing is decided",
    "batch.recorded": "the decision on a batch is written, not committed",
    "batch.decided": "the database has committed a batch, Kafka has not",
    "batch.completed": "Kafka has all of a batch",
    "consume.begun": "a consumer's transaction has begun, its handler has not",
    "consume.handled": "the handler is done, the offsets are not moved",
    "consume.moved": "the offsets are moved in the transaction, nothing is decided",
    "consume.committed": "a consumer's transaction is committed on both sides",
    "unit.found": "a former writer has left a unit unfinished, it is not aborted",
    "unit.part": "a part of a unit is written, not its end",
    "unit.ending": "all parts of a unit but the last are written",
    "unit.ended": "the end of a unit is written",
    "unit.before_abort": "about to abort a unit",
    "unit.aborted": "the abort of a unit is written",
    "unit.batch": "a batch is complete in Kafka, its unit is not written",
    "state.spilled": "uncommitted writes of a state store were moved to disk",
    "state.decided": "a commit of spilled writes is decided, nothing is copied into the state store",
    "state.copied": "a part of a decided commit is copied into the state store",
    "state.finished": "a decided commit is copied, the spilled writes are still there",
    "state.committed": "a state store has committed",
    "state.logged": "the changes of a state store are produced to its changelog, nothing is decided",
    "state.before_commit": "the transaction with a state store's changes is committed, the store is not",
    "state.restored": "a part of the changelog is applied to a state store",
    "spark.driver_started": "the driver has settled and starts the job",
    "spark.driver_done": "the job is done, the driver has not settled again",
}
"""Every name, with what is true when the point is reached."""

ENVIRONMENT: Final = "DUALWRITE_FAILPOINT"


class FailpointError(Exception):
    """Raised by a fail point that was armed with ``raise``."""


class _Armed:
    def __init__(self, nth: int, action: str) -> None:
        self._left = nth
        self._action = action
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if not due:
            return
        if self._action == "raise":
            raise FailpointError(name)
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            # To this thread, which stops the whole process: a signal to the process goes to the main thread, which may have to
            # wait for a processor, while this thread goes on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _parse(text: str) -> Mapping[str, Callable[[str], None]]:
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, rest = item.partition(":")
        nth, _, action = rest.partition(":")
        if name not in FAILPOINTS or action not in {"", "kill", "stop", "raise"} or (nth and not nth.isdecimal()):
            raise ValueError(f"{ENVIRONMENT}: {item!r} is not a known name:nth:action")
        armed[name] = _Armed(int(nth or 1), action or "kill")
    return armed


_armed: Mapping[str, Callable[[str], None]] = {}
_NOTHING: Final[dict[str, object]] = {}
_NONE_ARMED: Final[Callable[[str], object]] = _NOTHING.get
"""Stands for :func:`hit` while nothing is armed: the look-up alone, without a frame of Python's."""


def pass_armed(name: str) -> None:
    """Pass the point as it is armed now. For what a test puts in the place of :func:`hit`, which itself changes."""
    if name in _armed:
        _armed[name](name)


hit: Callable[[str], object] = _NONE_ARMED
"""Pass the point. Does nothing unless it is armed and this is the pass it waits for. Call it as ``failpoints.hit``."""


def may_stop_at(name: str) -> bool:
    """Whether passing the point may have an effect: it is armed, or a test has put its own in the place of :func:`hit`."""
    return hit is not _NONE_ARMED and (hit is not pass_armed or name in _armed)


def _set_armed(armed: Mapping[str, Callable[[str], None]]) -> None:
    global _armed, hit  # noqa: PLW0603 - the armed points belong to the process, as its environment does
    _armed = armed
    if hit is pass_armed or hit is _NONE_ARMED:  # else a test has put its own in its place
        hit = pass_armed if armed else _NONE_ARMED


def arm(text: str) -> None:
    """Arm points in this process, replacing those that were armed. Refuses unknown names and actions, with `ValueError`."""
    _set_armed(_parse(text))


arm(os.environ.get(ENVIRONMENT, ""))


@contextmanager
def watched(observer: Callable[[str], None]) -> Generator[None, None, None]:
    """While the block runs, report every point that this process passes to the observer, and do nothing else."""
    former = _armed
    _set_armed(dict.fromkeys(FAILPOINTS, observer))
    try:
        yield
    finally:
        _set_armed(former)
