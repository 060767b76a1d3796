"""The ends of transactions: whether a producer's last one has ended in every partition, as it was decided.

:mod:`dualwrite.protocol.settle` interprets what the servers answer.

A writer asks for the ends of all its lanes at once (:class:`EndQuestions`), and nobody waits for the answer as long as another
lane is free: a caller posts the question while its own commit is under way, and the one that takes the next lane reads the
answer. What that does not show within milliseconds is asked for by itself, until it is known or waiting no longer helps
(:func:`know_end`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from dualwrite.clock import Deadline, GrowingPause, now_s
from dualwrite.errors import DualWriteError, Unavailable
from dualwrite.interfaces import TransactionCoordinator, native_of
from dualwrite.kafka.brokers import NotYet
from dualwrite.kafka.messages import Answer, DescribeProducers, Message, OffsetForLeaderEpoch, Rare
from dualwrite.protocol.prepared_state import Engine, PreparedTxnState
from dualwrite.protocol.settle import (
    Ended,
    EndStep,
    native_step_at_rest,
    next_end_step,
    next_native_end_step,
    rows_of,
)
from dualwrite.protocol.values import IN_TRANSITION, LogProof, Partition, ShownProducer, TransactionView

if TYPE_CHECKING:
    from dualwrite.kafka.brokers import Connections
    from dualwrite.kafka.cluster import Leader, Topics
    from dualwrite.kafka.log import Scan

logger = logging.getLogger(__name__)

EARLY_S: Final = 2.0
"""How long to wait for a missing marker before settling checks whether the broker has forgotten it."""
_ANSWER_S: Final = 2.0
"""Limits one request: a suspended broker never answers, and other requests queue behind it."""
_READ_ON_AFTER_S: Final = 0.02
"""Transactions open before ours have usually ended by then. Reading on costs as much as the log is long from there."""
_TOGETHER_S: Final = 0.5
"""For so long a caller leaves the asking to the questions about all. Markers take a millisecond, longer on a busy broker."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0003, 0.005
_REMEMBERED: Final = 32


class PendingEnd:
    """A transaction whose commit or abort was acknowledged, but whose markers have not been seen in every partition."""

    __slots__ = ("_asked_since", "answered_at", "ended", "known")

    def __init__(self, ended: Ended) -> None:
        self.ended = ended
        self.known = False  # whether the producer may continue: any thread may set it, the owner takes note
        self.answered_at = now_s()  # no question asked before tells anything about the end
        self._asked_since: float | None = None

    @property
    def asked_for_s(self) -> float:
        """Seconds since the first request for its end; 0 if there was none."""
        return 0.0 if self._asked_since is None else now_s() - self._asked_since

    def note_asked(self) -> None:
        """Note the time of the first request for its end."""
        if self._asked_since is None:
            self._asked_since = now_s()


States = Sequence[PreparedTxnState]
_Shown = Mapping[Partition, Any]
"""By partition, what an engine's own rule goes by."""


def _step(pending_end: PendingEnd, shown: _Shown | None, *, early: bool) -> EndStep:
    rule = next_native_end_step if pending_end.ended.state.is_native else next_end_step
    return rule(pending_end.ended, shown, early=early)


class Posted(Protocol):
    """One question to the leaders of several transactions' partitions that was sent, and what has come of it."""

    def has_come(self) -> bool:
        """Take in what has arrived, without a wait. Returns whether nothing more will come."""
        ...

    @property
    def native(self) -> Sequence[_Shown]:
        """For each native transaction, its producer by partition, as far as leaders have shown it."""
        ...

    @property
    def shared(self) -> Sequence[_Shown]:
        """For each of librdkafka's transactions, the proofs by partition, as far as leaders have answered."""
        ...


class AsksAhead(Protocol):
    """A coordinator that can ask without a wait for the answer. Used by one caller at a time."""

    def post_question(self, native: Sequence[PreparedTxnState], shared: Sequence[PreparedTxnState]) -> Posted | None:
        """Ask the leaders of these transactions' partitions; None if none of them is known. Returns at once."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class EndQuestions:
    """The questions about the ends of one writer's transactions: one at a time, about all that are not known. Thread-safe.

    No call waits for another, or for a broker, but :meth:`know`. ``coordinator`` is for these questions alone; without it
    everybody who needs an end asks for it.
    """

    def __init__(self, coordinator: AsksAhead | None, *, late: TransactionCoordinator | None = None) -> None:
        self._coordinator = coordinator
        self.late = late  # for questions about one end; None if callers have a coordinator of their own
        self.wanted = True  # whether no lane with a known end is left: time to ask. The lanes' pool sets it
        self._newest: deque[PreparedTxnState] = deque(maxlen=_REMEMBERED)
        self._unknown: dict[PendingEnd, None] = {}
        self._asked: Sequence[PendingEnd] = ()
        self._posted: Posted | None = None
        self._posted_at = 0.0
        self._lock = threading.RLock()

    def note(self, pending: PendingEnd) -> None:
        """Ask for this end, too, from now on: the commit or abort was acknowledged."""
        self._newest.append(pending.ended.state)
        self._unknown[pending] = None

    def take_newest(self) -> Sequence[PreparedTxnState]:
        """The newest transactions that were noted since the last call, or some of them."""
        taken = list(self._newest)
        self._newest.clear()
        return taken

    def forget(self, pending: PendingEnd) -> None:
        """Ask for this end no more."""
        self._unknown.pop(pending, None)

    def ask(self) -> None:
        """Take in what has come of the last question, and post the next one if there is something to ask. Returns at once."""
        if self._unknown:
            self._alone(self._take_and_post)

    def take_answer(self) -> None:
        """Take in what has come of the last question. Returns at once."""
        if self._posted is not None:
            self._alone(self._take)

    def know(self, pending: PendingEnd, deadline: Deadline) -> bool:
        """Let the questions about all ends find this one, as long as they are likely to; returns whether it is known."""
        if not pending.ended.complete:
            return False
        self._unknown[pending] = None
        until = min(pending.answered_at + _TOGETHER_S, now_s() + deadline.remaining_s())
        between = GrowingPause(_FIRST_LOOK_S, _LONGEST_LOOK_S)
        while not pending.known and now_s() < until:
            self.ask()
            if self._posted is None:
                break  # it is known; or its leader must be looked up, which takes a wait
            self.take_answer()
            if not pending.known:
                between.wait()
        return pending.known

    def close(self) -> None:
        """Ask no more. May be called more than once."""
        self._unknown.clear()
        if self._coordinator is not None:
            self._coordinator.close()

    def _alone(self, do: Callable[[], None]) -> None:
        """Do it, unless another thread is at it: that one does the same."""
        lock = self._lock
        try:
            try:
                if lock.acquire(blocking=False):
                    do()
            except DualWriteError as error:  # a right is missing, or the writer was closed: who needs an end raises it
                logger.debug("could not ask how transactions have ended: %s", error)
                self._posted = None
            finally:
                if lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - as threading.Condition asks it
                    lock.release()
        finally:
            if lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - the first one may have been interrupted
                lock.release()

    def _take_and_post(self) -> None:
        if self._posted is not None:
            self._take()
        if self._posted is not None or self._coordinator is None:
            return
        # A transaction that ends from here on is not asked for: the leaders may answer before that.
        asked: tuple[list[PendingEnd], list[PendingEnd]] = [], []
        states: tuple[list[PreparedTxnState], list[PreparedTxnState]] = [], []
        for pending in list(self._unknown):
            state = pending.ended.state
            is_shared = state.engine is not Engine.NATIVE
            asked[is_shared].append(pending)
            states[is_shared].append(state)
        self._asked, self._posted_at = [*asked[0], *asked[1]], now_s()
        self._posted = self._coordinator.post_question(*states)

    def _take(self) -> None:
        posted, asked = self._posted, self._asked
        if posted is None:
            return
        if not posted.has_come():
            if now_s() - self._posted_at > _ANSWER_S:
                self._posted = None
            return
        self._posted = None
        for pending, shown in zip(asked, [*posted.native, *posted.shared], strict=True):
            rule = next_native_end_step if pending.ended.state.is_native else next_end_step
            if rule(pending.ended, shown, early=True) is EndStep.KNOWN:
                pending.known = True
                self._unknown.pop(pending, None)


def ask_for_ends(
    coordinator: TransactionCoordinator, pending: Sequence[PendingEnd], deadline: Deadline
) -> Sequence[EndStep]:
    """Ask once for all of their ends, whichever engine made the transactions; ``WAIT`` means to ask again."""
    asked = [one for one in pending if _step(one, None, early=True) is EndStep.ASK]
    for one in asked:
        one.note_asked()
    shown = _shared(coordinator, [one for one in asked if not one.ended.state.is_native], deadline)
    shown.update(_native(coordinator, [one for one in asked if one.ended.state.is_native], deadline))
    early = not deadline.expired
    return [_step(one, shown.get(id(one)), early=early and one.asked_for_s < EARLY_S) for one in pending]


def _shared(coordinator: TransactionCoordinator, asked: Sequence[PendingEnd], deadline: Deadline) -> dict[int, _Shown]:
    """The proofs of librdkafka's transactions, which share their producers' epochs."""
    if not asked:
        return {}
    proofs = coordinator.prove_now(
        [one.ended.state for one in asked],
        Deadline(min(_ANSWER_S, deadline.remaining_s())),
        read_on=any(one.asked_for_s > _READ_ON_AFTER_S for one in asked),
    )
    return dict(zip(map(id, asked), proofs, strict=True))


def _native(coordinator: TransactionCoordinator, asked: Sequence[PendingEnd], deadline: Deadline) -> dict[int, _Shown]:
    """The epochs of native transactions' producers, as the partitions show them."""
    if not asked:
        return {}
    shown = native_of(coordinator).producer_epochs(
        [one.ended.state for one in asked], Deadline(min(_ANSWER_S, deadline.remaining_s()))
    )
    return dict(zip(map(id, asked), shown, strict=True))


def know_end(coordinator: TransactionCoordinator, pending_end: PendingEnd, deadline: Deadline) -> EndStep:
    """Ask until the end is known, or waiting no longer helps: ``KNOWN``, ``RECORD`` or ``SETTLE``."""
    between = GrowingPause(first_s=0.001, longest_s=0.1)
    while True:
        try:
            [step] = ask_for_ends(coordinator, [pending_end], deadline)
        except Unavailable as error:  # a broker gave an answer that this library does not know
            logger.warning("the end of %s is not known: %s", pending_end.ended.state, error)
            return EndStep.SETTLE
        if step is not EndStep.WAIT:
            return step
        between.wait(deadline)


def steady_view(coordinator: TransactionCoordinator, kafka_id: str, deadline: Deadline) -> TransactionView:
    """The coordinator's view of an id, once it is out of transition."""
    between = GrowingPause()
    while True:
        view = coordinator.describe([kafka_id], deadline)[kafka_id]
        if view.status not in IN_TRANSITION:
            return view
        if deadline.expired:
            raise Unavailable(f"the coordinator still shows {view.status.value}", transactional_id=kafka_id)
        between.wait(deadline)


def end_at_rest(coordinator: TransactionCoordinator, state: PreparedTxnState, deadline: Deadline) -> EndStep:
    """Check how a committed transaction whose end is known has ended, before the row calls it completed.

    The log has shown it already, except for a native transaction. The step is that of
    :func:`~dualwrite.protocol.settle.native_step_at_rest`.
    """
    if not state.is_native:
        return EndStep.KNOWN
    [proofs] = coordinator.prove_now([state], Deadline(min(_ANSWER_S, deadline.remaining_s())), read_on=True)
    return native_step_at_rest(state, proofs)


def look_again(coordinator: TransactionCoordinator, states: Sequence[PreparedTxnState], deadline: Deadline) -> None:
    """Ask the leaders about transactions whose ends are known: the coordinator notes what else is open in their partitions."""
    if native := [state for state in states if state.is_native]:
        native_of(coordinator).producer_epochs(native, deadline)
    if shared := [state for state in states if not state.is_native]:
        coordinator.prove_now(shared, deadline, read_on=False)


class PostedQuestion:
    """How several transactions have ended: one question to each leader of their partitions, which nobody waits for.

    A leader answers for native transactions with the partition's producers, and for one of librdkafka's with a look into
    its log. It answers in the order of its requests, and the last one only if it leads the partition under the epoch that
    we know: an answer of a follower, or of a former leader, does not count. What does not fit shows nothing, and must be
    asked for by itself: a partition whose leader has moved, a topic that was made again, an answer that says no.

    No broker is asked for topics. ``shared`` are the transactions of librdkafka's engine.
    """

    def __init__(
        self,
        brokers: Connections,
        topics: Topics,
        native: Sequence[PreparedTxnState],
        shared: Sequence[PreparedTxnState],
    ) -> None:
        self._brokers = brokers
        self._topics = topics
        self._outstanding = 0
        self._shown: dict[Partition, dict[int, ShownProducer]] = {}
        self._asked: list[tuple[int, list[Partition]]] = []
        self._producers: set[int] = set()
        self.shared: list[dict[Partition, LogProof | None]] = []
        by_node: dict[int, dict[Partition, int]] = {}
        for state in native:
            asked: list[Partition] = []
            self._asked.append((state.producer_id, asked))
            self._producers.add(state.producer_id)
            for first in state.first_offsets:
                self._ask(by_node, asked, first.topic, first.partition, first.topic_id)
            for more in state.further:
                for number in more.numbers:
                    self._ask(by_node, asked, more.topic, number, more.topic_id)
        for node, epochs in by_node.items():
            # Both go over one connection, so the second answer, or the error in its place, comes after the first one.
            described: list[Answer | Exception] = []
            brokers.post(node, DescribeProducers(epochs), described.append, more=True)
            self._outstanding += 1
            brokers.post(node, OffsetForLeaderEpoch(epochs), partial(self._note_producers, epochs, described))
        if shared:
            from dualwrite.kafka.log import Scan, glance_request  # noqa: PLC0415 - the native engine asks no log here
        for state in shared:
            proofs: dict[Partition, LogProof | None] = {}
            self.shared.append(proofs)
            for first in state.first_offsets:
                scan = Scan(first, state.producer_id, state.epoch)
                if (leader := self._leader(first.topic, first.partition, first.topic_id)) is not None:
                    self._outstanding += 1
                    glance = Rare(glance_request(scan, leader))
                    brokers.post(leader.node, glance, partial(self._note_glance, scan, proofs))
        self.is_sent = bool(self._outstanding or self._shown)

    def has_come(self) -> bool:
        """Take in what has arrived, without a wait. Returns whether nothing more will come."""
        if self._outstanding:
            self._brokers.serve()
        return not self._outstanding

    @property
    def native(self) -> Sequence[Mapping[Partition, ShownProducer]]:
        """For each native transaction, its producer by partition, as far as leaders have shown it."""
        return [rows_of(producer_id, asked, self._shown) for producer_id, asked in self._asked]

    def _ask(
        self,
        by_node: dict[int, dict[Partition, int]],
        asked: list[Partition],
        name: str,
        number: int,
        topic_id: str | None,
    ) -> None:
        """Note that a partition is asked for, of its leader under the epoch that we know."""
        if (leader := self._leader(name, number, topic_id)) is not None:
            asked.append((name, number))
            by_node.setdefault(leader.node, {})[name, number] = leader.epoch

    def _leader(self, name: str, number: int, topic_id: str | None) -> Leader | None:
        topic = self._topics.known(name)
        if topic is None or topic_id not in {None, topic.topic_id}:
            return None
        return topic.leaders.get(number)

    def _note_producers(
        self, led: Mapping[Partition, int], described: Sequence[Answer | Exception], epochs: Answer | Exception
    ) -> None:
        self._outstanding -= 1
        producers: Answer | Exception = described[0] if described else NotYet("no answer")
        for key in led:
            found = None if isinstance(producers, Exception) else producers.get(key)
            leads = None if isinstance(epochs, Exception) else epochs.get(key)
            if found is None or leads is None or found[0] or leads[0]:
                self._topics.forget([key[0]])  # it has another leader, or a caller that needs the end is told why not
                continue
            self._shown[key] = rows = {}
            for row in found[1]:
                if row.producer_id in self._producers:
                    rows[row.producer_id] = ShownProducer(row.epoch, row.open_from if row.open_from >= 0 else None)

    def _note_glance(self, scan: Scan, proofs: dict[Partition, LogProof | None], answer: Message | Exception) -> None:
        from dualwrite.kafka.log import batches_of, fetched  # noqa: PLC0415 - as above

        self._outstanding -= 1
        try:
            partition = fetched(scan.place, NotYet(str(answer)) if isinstance(answer, Exception) else answer)
        except DualWriteError as error:  # a right is missing: a caller that needs the end raises it
            logger.debug("no answer about the ends of transactions: %s", error)
            return
        if isinstance(partition, NotYet):
            self._topics.forget([scan.first.topic])
        elif partition is not None:
            proof = scan.glance(batches_of(partition), partition.aborted_transactions or ())
            if proof in {LogProof.COMMITTED, LogProof.ABORTED}:
                proofs[scan.place.key] = proof
