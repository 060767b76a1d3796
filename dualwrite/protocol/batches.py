"""Decisions about batches of many participants: whether a run may continue, is being worked on, or is complete in part.

The participants are the tasks of an engine such as Spark. Each hands over a prepared transaction, one database commit
decides on all of them, and a run that dies is continued by the next one.

The owner keeps its producer afterwards, so its next transaction has the same producer id and epoch: a late request of the
decider would end that one. Two rules prevent this.

The decider records "completed" in the row only if :func:`next_completion_step` says so: it sent its ``EndTxn`` once, and got
an answer. It leaves everything else to a claim; after a claim, no owner can use that producer any more:

=============================  ============================  =======  ==============================================
the one ``EndTxn(commit)``     coordinator                   proof    step
=============================  ============================  =======  ==============================================
not answered, or refused       any                           any      leave it
answered                       not asked                     any      look
answered                       PrepareCommit, its id, epoch  any      wait, look again
answered                       CompleteCommit, its id, epoch not read prove
answered                       CompleteCommit, its id, epoch commit   record it as completed
answered                       anything else                 any      leave it
=============================  ============================  =======  ==============================================

A native transaction has an epoch of its own, so a late request ends no other one, and ``EndTxn`` may be repeated.
:func:`next_native_completion_step` leaves less to a claim:

======================  =======================================  =======  ========================
``EndTxn(commit)``      end in the partitions                    proof    step
======================  =======================================  =======  ========================
not sent                any                                      any      end it
in progress             any                                      any      wait, end it again
refused                 any                                      any      leave it
success                 not asked                                any      ask the partitions
success                 not known yet                            any      wait, ask again
success                 cannot be known                          any      leave it
success                 known                                    not read prove
success                 known                                    commit   record it as completed
success                 known                                    other    leave it
======================  =======================================  =======  ========================

The owner continues only if :func:`may_go_on` allows it: the row still has its incarnation, and names its transaction as
completed. A decided transaction is not enough: the decider's ``EndTxn`` may still be on its way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dualwrite.protocol.settle import EndStep
from dualwrite.protocol.values import EndAnswer, LogProof, Outcome, TransactionStatus, TransactionView

if TYPE_CHECKING:
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import StateRow


class CompletionStep(Enum):
    """The decider's next step for one transaction."""

    END = "end it with commit, by its own name"
    LOOK = "ask the coordinator, or for a native transaction the partitions"
    WAIT = "wait, then forget what was seen and look again"
    PROVE = "read the log for the markers"
    RECORD = "record it as completed: its owner may continue"
    LEAVE = "leave it to a claim"


@dataclass(frozen=True)
class HandedOver:
    """The decider's knowledge of one transaction that it completes. None is an answer that it does not have.

    ``answer`` is the answer to the one ``EndTxn(commit)``, and ``view`` the coordinator's view after that.
    """

    state: PreparedTxnState
    answer: EndAnswer | None
    view: TransactionView | None = None
    proof: LogProof | None = None


def next_completion_step(known: HandedOver) -> CompletionStep:
    """The decider's next step. Pure; see the table above."""
    if known.answer is not EndAnswer.ENDED:
        return CompletionStep.LEAVE
    view = known.view
    if view is None:
        return CompletionStep.LOOK
    if (view.producer_id, view.epoch) != (known.state.producer_id, known.state.epoch):
        return CompletionStep.LEAVE
    if view.status is TransactionStatus.PREPARE_COMMIT:
        return CompletionStep.WAIT
    if view.status is not TransactionStatus.COMPLETE_COMMIT:
        return CompletionStep.LEAVE
    if known.proof is None:
        return CompletionStep.PROVE
    return CompletionStep.RECORD if known.proof is LogProof.COMMITTED else CompletionStep.LEAVE


@dataclass(frozen=True)
class NativeHandedOver:
    """The decider's knowledge of one native transaction that it completes.

    ``answer`` is None if ``EndTxn(commit)`` has to be sent, first or again. ``end`` is the step of
    :func:`dualwrite.protocol.settle.next_native_end_step` about it; None if the partitions have to be asked, first or
    again.
    """

    answer: EndAnswer | None = None
    end: EndStep | None = None
    proof: LogProof | None = None


def next_native_completion_step(known: NativeHandedOver) -> CompletionStep:
    """The decider's next step for a native transaction. Pure; see the second table above."""
    if known.answer is None:
        return CompletionStep.END
    if known.answer is EndAnswer.IN_PROGRESS:
        return CompletionStep.WAIT
    if known.answer is not EndAnswer.ENDED:
        return CompletionStep.LEAVE
    if known.end is not EndStep.KNOWN:
        asking = {None: CompletionStep.LOOK, EndStep.WAIT: CompletionStep.WAIT}
        return asking.get(known.end, CompletionStep.LEAVE)
    if known.proof is None:
        return CompletionStep.PROVE
    return CompletionStep.RECORD if known.proof is LogProof.COMMITTED else CompletionStep.LEAVE


def waited(known: NativeHandedOver) -> NativeHandedOver:
    """The knowledge after :attr:`CompletionStep.WAIT`."""
    return NativeHandedOver(None if known.answer is EndAnswer.IN_PROGRESS else known.answer)


def may_go_on(known: StateRow, found: StateRow, handed_over: PreparedTxnState | None) -> bool:
    """Whether an owner that knows its row as ``known`` may reuse its producer after idling, now that the row is ``found``."""
    if (found.namespace, found.incarnation) != (known.namespace, known.incarnation):
        return False
    return handed_over is None or (found.prepared == handed_over and found.completed is Outcome.COMMITTED)


# Decides whether a run of a batch may continue from the records of earlier runs, or would mistake another batch's rows for its
# own.
#
# The ledger names a batch by its sink and its id. Without this rule, a run that uses the same two names for another
# table, topic or way could find the batch written, and lose rows that it reports as written; or find no record of it,
# and write rows twice.

_OF_COLUMN: Final = "column:"
"""No topic's name contains a colon."""


class Way(Enum):
    """Whether a batch's partitions are decided one by one or all at once. Each way has its own rows in the ledger."""

    PARTITIONS = "partition by partition"
    WHOLE = "as one"


@dataclass(frozen=True)
class Destination:
    """The destination of a batch. Pickles. ``table`` is quoted, with its schema; ``topic``: see :meth:`topics_of_column`."""

    way: Way
    table: str
    topic: str
    cluster_id: str

    @staticmethod
    def topics_of_column(name: str) -> str:
        """The value of :attr:`topic` for rows that name their topics in a column."""
        return f"{_OF_COLUMN}{name}"

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Parse the text form."""
        parts = json.loads(text)
        return cls(Way[parts["way"]], parts["table"], parts["topic"], parts["cluster_id"])

    @staticmethod
    def text_of(topic: str) -> str:
        """The part of the text form that shows the topic. No other value contains it: quotes inside values are escaped."""
        return f'"topic": {json.dumps(topic)}'

    def text(self) -> str:
        """The text form, as the ledger keeps it."""
        return json.dumps({**asdict(self), "way": self.way.name})

    def shown(self, *, cluster: bool) -> str:
        """The destination in words, with the cluster if asked for."""
        column = self.topic.removeprefix(_OF_COLUMN)
        topic = f"topic {self.topic!r}" if column == self.topic else f"the topics in column {column!r}"
        where = f" of cluster {self.cluster_id!r}" if cluster else ""
        return f"table {self.table} and {topic}{where}, {self.way.value}"


@dataclass(frozen=True)
class Recorded:
    """The ledger's record of a batch.

    ``begun`` says whether a row says so; ``destination`` is None if an older version wrote that row. ``whole_written`` says
    that the batch is already written, as one.
    """

    begun: bool
    destination: Destination | None
    whole_written: bool


class Entry(Enum):
    """The first step of a run, given the record."""

    FIRST = "record the destination"
    GO_ON = "continue: skip what is written"
    INSTEAD = "replace the destination: nothing was written to the former one"
    REFUSED = "end before anything is written"


def next_entry(recorded: Recorded, present: Destination) -> Entry:
    """The first step of a run that writes to ``present``.

    A batch that is written as one, but not yet, has left nothing that counts: it may go elsewhere. A batch that is written
    partition by partition may still have tasks running unseen: it never goes elsewhere. Older versions recorded no
    destination, but they did record different rows for each way.
    """
    if not recorded.begun:
        if not recorded.whole_written:
            return Entry.FIRST
        return Entry.GO_ON if present.way is Way.WHOLE else Entry.REFUSED
    former = recorded.destination
    if former is None:
        return Entry.GO_ON if present.way is Way.PARTITIONS else Entry.REFUSED
    if former == present:
        return Entry.GO_ON
    return Entry.INSTEAD if former.way is Way.WHOLE and not recorded.whole_written else Entry.REFUSED


def mismatch_of(recorded: Recorded, present: Destination) -> str:
    """Both destinations in words, for the error of a refused run."""
    former = recorded.destination
    if former is None:
        way = Way.WHOLE if recorded.whole_written else Way.PARTITIONS
        return f"was written {way.value} and is now for {present.shown(cluster=False)}"
    cluster = former.cluster_id != present.cluster_id
    return f"was begun for {former.shown(cluster=cluster)}; and is now for {present.shown(cluster=cluster)}"


def outlook(phase: str, *, deserted: bool, unsettled: int) -> str | None:
    """What becomes of a batch that is not completed, in words; None if nothing does.

    Nobody but its job can write what is missing of it, and nobody else has its rows. What its tasks have left open in Kafka is
    settled as any writer's: committed where the database has decided, else aborted once their leases are over.

    Args:
        phase: ``writing``, ``failed`` or ``decided``, as the ledger's view has it.
        deserted: Whether no process is known to work on it.
        unsettled: How many transactional ids of its sink's tasks are unsettled.
    """
    if phase == "decided":
        return f"all of it is written; {unsettled} transactions of its tasks are being completed" if unsettled else None
    left = f"; {unsettled} transactions of its tasks are unsettled" if unsettled else ""
    if phase == "failed":
        return f"its last run failed: run the job again, which writes what is missing{left}"
    if deserted:
        gone = "its driver is gone, or computes for long before it writes"
        return f"{gone}: run the job again, which writes what is missing{left}"
    return f"its job may be at work{left}"


# Detects batches that were begun but that no process works on: drivers give no sign of life, their tasks' leases do.

QUIET_S: Final = 300.0
"""Seconds without any event before a batch counts as deserted: its tasks start only after the plan, and get rows only after a
shuffle."""


def nobody_since(changes: Collection[datetime], lease_ends: Collection[datetime], now: datetime) -> datetime | None:
    """Since when no process is known to work on a batch, by the database's clock; None while one does, or did just now.

    ``changes`` are when the batch was begun, and when each of its partitions was written. ``lease_ends`` also has the leases
    that expired without being given back.
    """
    if any(end > now for end in lease_ends):
        return None
    last = max((*changes, *lease_ends), default=None)
    return None if last is None or now - last < timedelta(seconds=QUIET_S) else last


# The life of one batch that is decided at once: many participants have prepared, and one database commit decides on
# all.
#
# A failure before the commit leaves the batch undecided, and nothing of it is visible on either side. After it, Kafka
# must follow for every participant. If the answer to the commit is missing, the batch is *in doubt* until a claim of
# the participants' ids has ended the old session and the batch's own row has been read.


class BatchState(Enum):
    """The states of one batch."""

    PREPARED = "prepared"
    IN_DOUBT = "in doubt"
    DECIDED = "decided"
    FOLLOWING = "following"
    WRITTEN = "written"
    UNDECIDED = "undecided"


class BatchEvent(Enum):
    """The events of one batch.

    ``COMMIT``: the database has committed the decision on every participant. ``FIND``: the batch's own row is there, so a
    decision was committed. ``LOSE_ANSWER``: the answer to COMMIT is missing. ``ABORT``: the database has certainly rolled back.
    ``COMPLETE``: the participants' transactions that need no claim are committed in Kafka and recorded. ``SETTLE``: all others
    were claimed and settled.
    """

    COMMIT = "commit"
    FIND = "find it written"
    LOSE_ANSWER = "lose the answer"
    ABORT = "abort"
    COMPLETE = "complete"
    SETTLE = "settle"


_BATCH, _OF_BATCH = BatchState, BatchEvent

BATCH_LIFE: Mapping[BatchState, Mapping[BatchEvent, BatchState]] = MappingProxyType(
    {
        _BATCH.PREPARED: {
            _OF_BATCH.COMMIT: _BATCH.DECIDED,
            _OF_BATCH.FIND: _BATCH.FOLLOWING,
            _OF_BATCH.LOSE_ANSWER: _BATCH.IN_DOUBT,
            _OF_BATCH.ABORT: _BATCH.UNDECIDED,
        },
        _BATCH.IN_DOUBT: {_OF_BATCH.FIND: _BATCH.WRITTEN, _OF_BATCH.ABORT: _BATCH.UNDECIDED},
        _BATCH.DECIDED: {_OF_BATCH.COMPLETE: _BATCH.FOLLOWING},
        _BATCH.FOLLOWING: {_OF_BATCH.SETTLE: _BATCH.WRITTEN},
        _BATCH.WRITTEN: {},
        _BATCH.UNDECIDED: {},
    }
)
