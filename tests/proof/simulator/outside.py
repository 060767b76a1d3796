"""The coordinator's port over the simulated broker: observes and ends transactions from outside their producers.

As ``dualwrite.kafka.coordinator`` does over the wire, it retries unanswered requests with growing waits, until the
deadline. That package's own code reads the proof of an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import Unavailable
from dualwrite.kafka.cluster import Place
from dualwrite.kafka.log import Scan, combined, joined, scans_of
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Later
from dualwrite.protocol.values import (
    EndAnswer,
    LogProof,
    OpenTransaction,
    ShownProducer,
    TransactionStatus,
    TransactionView,
)
from simulator.process import Unanswered
from simulator.requests import (
    COMMIT,
    AddPartitionsToTxn,
    AddPartitionsToTxnResponse,
    Batch,
    DescribeProducers,
    DescribeProducersResponse,
    DescribeTransactions,
    DescribeTransactionsResponse,
    EndTxn,
    ErrorCode,
    ErrorResponse,
    Fetch,
    FetchResponse,
    InitProducerId,
    InitProducerIdResponse,
    ListTransactions,
    ListTransactionsResponse,
    Request,
    Response,
)
from simulator.scheduler import Simulation
from simulator.state import topic_id

_RETIRED_TIMEOUT_MS: Final = 1000
_STATUS: Final = {status.value: status for status in TransactionStatus}
_OPEN: Final = frozenset({TransactionStatus.ONGOING, TransactionStatus.PREPARE_COMMIT, TransactionStatus.PREPARE_ABORT})
_END_ANSWERS: Final = {
    ErrorCode.NONE: EndAnswer.ENDED,
    ErrorCode.CONCURRENT_TRANSACTIONS: EndAnswer.IN_PROGRESS,
    ErrorCode.INVALID_PRODUCER_EPOCH: EndAnswer.FENCED,
    ErrorCode.PRODUCER_FENCED: EndAnswer.FENCED,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING: EndAnswer.NO_SUCH_ID,
    ErrorCode.INVALID_TXN_STATE: EndAnswer.INVALID_STATE,
}
Answer = TypeVar("Answer")


class SimulatedCoordinator:
    """Implements :class:`~dualwrite.interfaces.NativeCoordinator` over the simulated broker."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def cluster_id(self, deadline: Deadline) -> str:
        """See the port. It does not change, so nothing is sent."""
        del deadline
        return self._simulation.broker.cluster_id

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """See the port. It does not change, so nothing is sent."""
        del deadline
        return self._simulation.broker.max_timeout_ms

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """See the port. Every client has this metadata already, so nothing is sent."""
        del deadline
        found = {name: topic_id(self._simulation.broker, name) for name in topics}
        return {name: known for name, known in found.items() if known is not None}

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """See the port."""
        ids = list(kafka_ids)
        answers = self._all([DescribeTransactions(kafka_id) for kafka_id in ids], deadline)
        return {
            kafka_id: _view(cast("DescribeTransactionsResponse", answer))
            for kafka_id, answer in zip(ids, answers, strict=True)
        }

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """See the port."""
        [answer] = self._all([ListTransactions()], deadline)
        listed = cast("ListTransactionsResponse", answer).transactions
        return [known.transactional_id for known in listed if known.transactional_id.startswith(prefix)]

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int | None]]:
        """See the port."""
        places = list(
            dict.fromkeys((first.topic, first.partition) for state in states for first in state.first_offsets)
        )
        shown = dict(zip(places, self._producers(places, deadline), strict=True))
        return [
            {
                (first.topic, first.partition): (
                    shown[first.topic, first.partition].get((state.producer_id, state.epoch))
                    if self._is_same_topic(first)
                    else None
                )
                for first in state.first_offsets
            }
            for state in states
        ]

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int | None]:
        """See the port."""
        places = list(partitions)
        shown = self._producers(places, deadline)
        return {place: found.get((producer_id, epoch)) for place, found in zip(places, shown, strict=True)}

    def sequences(
        self, producer_id: int, epoch: int, firsts: Mapping[tuple[str, int], int], deadline: Deadline
    ) -> Mapping[tuple[str, int], tuple[int, int] | None]:
        """See the port."""
        producers = self._all([DescribeProducers(place) for place in firsts], deadline)
        logs = self._all([Fetch(place, first) for place, first in firsts.items()], deadline)
        return {
            place: _span(
                (producer_id, epoch), first, cast("DescribeProducersResponse", shown), cast("FetchResponse", log)
            )
            for (place, first), shown, log in zip(firsts.items(), producers, logs, strict=True)
        }

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int]]:
        """See the port."""
        places = sorted({place for _, partitions in suspects for place in partitions})
        shown = dict(zip(places, self._producers(places, deadline), strict=True))
        return [
            {place: start for place in partitions for (known, _), start in shown[place].items() if known == producer_id}
            for producer_id, partitions in suspects
        ]

    def _producers(
        self, places: Sequence[tuple[str, int]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[int, int], int]]:
        answers = self._all([DescribeProducers(place) for place in places], deadline)
        return [
            {
                (view.producer_id, view.producer_epoch): view.current_txn_start_offset
                for view in cast("DescribeProducersResponse", answer).active_producers
                if view.current_txn_start_offset >= 0
            }
            for answer in answers
        ]

    def _is_same_topic(self, first: FirstOffset) -> bool:
        return first.topic_id is None or topic_id(self._simulation.broker, first.topic) == first.topic_id

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """See the port."""
        requests = {
            kafka_id: EndTxn(kafka_id, state.producer_id, state.epoch, committed)
            for kafka_id, state in transactions.items()
        }
        return self._ended(requests, deadline, once=once)

    def end_exactly(
        self, transactions: Mapping[str, tuple[int, int]], *, committed: bool, deadline: Deadline
    ) -> Mapping[str, EndAnswer]:
        """See the port."""
        requests = {kafka_id: EndTxn(kafka_id, *ids, committed, 2) for kafka_id, ids in transactions.items()}
        return self._ended(requests, deadline)

    def _ended(self, requests: Mapping[str, EndTxn], deadline: Deadline, *, once: bool = False) -> dict[str, EndAnswer]:
        answers = {}
        for kafka_id, request in requests.items():
            try:
                answer = self._simulation.ask(request) if once else self._one(request, deadline, _is_answer)
            except Unanswered:
                continue
            if _is_answer(answer):
                answers[kafka_id] = _END_ANSWERS[cast("ErrorResponse", answer).error_code]
        return answers

    def transaction_version(self, deadline: Deadline, *, fresh: bool = False) -> int:
        """See the port. Clients look it up when they connect, so nothing is sent."""
        del deadline, fresh
        return self._simulation.broker.transaction_version

    def open_transactions(
        self, asked: Sequence[tuple[PreparedTxnState, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Sequence[OpenTransaction]]:
        """See the port."""
        every = [one.topic_partition for one in self._simulation.broker.partitions]
        suspected = [
            sorted({*partitions, *(place for place in every if place[0] in state.topic_ids)})
            for state, partitions in asked
        ]
        places = sorted({place for of_state in suspected for place in of_state})
        shown = dict(zip(places, self._producers(places, deadline), strict=True))
        return [
            [
                OpenTransaction(place, epoch, start)
                for place in of_state
                if self._has_topic(state, place[0])
                for (producer_id, epoch), start in shown[place].items()
                if producer_id == state.producer_id
            ]
            for (state, _), of_state in zip(asked, suspected, strict=True)
        ]

    def producer_epochs(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], ShownProducer | None]]:
        """See the port. All partitions are asked in one step."""
        del deadline
        places = sorted({place for state in states for place in state.partitions})
        requests: list[Request] = [DescribeProducers(place) for place in places]
        try:
            answers = self._simulation.ask_all(requests) if requests else []
        except Unanswered:
            return [{} for _ in states]
        shown = {
            place: cast("DescribeProducersResponse", answer) for place, answer in zip(places, answers, strict=True)
        }
        return [
            {
                place: _shown(shown[place], state.producer_id) if self._has_topic(state, place[0]) else None
                for place in sorted(state.partitions)
            }
            for state in states
        ]

    def _has_topic(self, state: PreparedTxnState, topic: str) -> bool:
        known = state.topic_ids.get(topic)
        return known is None or topic_id(self._simulation.broker, topic) == known

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """See the port."""
        ids = {}
        for kafka_id in kafka_ids:
            timeout_ms = (timeouts_ms or {}).get(kafka_id, _RETIRED_TIMEOUT_MS)
            answer = cast(
                "InitProducerIdResponse", self._one(InitProducerId(kafka_id, timeout_ms), deadline, _is_success)
            )
            ids[kafka_id] = (answer.producer_id, answer.producer_epoch)
        return ids

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """See the port."""
        added = {}
        for kafka_id, (producer_id, epoch, partitions) in transactions.items():
            request = AddPartitionsToTxn(kafka_id, producer_id, epoch, tuple(sorted(partitions)))
            answer = cast("AddPartitionsToTxnResponse", self._one(request, deadline, _is_not_busy))
            added[kafka_id] = set(answer.error_codes) == {ErrorCode.NONE}
        return added

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """See the port. Runs the code that reads real logs."""
        return [self._prove(state, deadline) for state in states]

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[tuple[str, int], LogProof | None]]:
        """See the port. All partitions are asked in one step."""
        del deadline, read_on
        scans = [[Scan(first, state.producer_id, state.epoch) for first in state.first_offsets] for state in states]
        requests: list[Request] = [Fetch(scan.place.key, scan.position) for of_state in scans for scan in of_state]
        try:
            answers = iter(self._simulation.ask_all(requests) if requests else [])
        except Unanswered:
            return [{} for _ in states]
        return [{scan.place.key: self._judged(scan, next(answers)) for scan in of_state} for of_state in scans]

    def _prove(self, state: PreparedTxnState, deadline: Deadline) -> LogProof:
        proofs: dict[Place, LogProof] = {}
        for first in state.first_offsets:
            scan = Scan(first, state.producer_id, state.epoch)
            proofs[scan.place] = self._scan(scan, deadline)
        return combined(state, proofs)

    def _scan(self, scan: Scan, deadline: Deadline) -> LogProof:
        [answer] = self._all([Fetch(scan.place.key, scan.position)], deadline)
        return self._judged(scan, answer)

    def _judged(self, scan: Scan, answer: Response) -> LogProof:
        fetched = cast("FetchResponse", answer)
        if fetched.error_code is not ErrorCode.NONE or not self._is_same_topic(scan.first):
            return LogProof.UNKNOWABLE
        proof = scan.read([SeenBatch(batch) for batch in fetched.batches])
        if proof is not None:
            return proof
        return LogProof.OPEN if scan.begun else LogProof.UNKNOWABLE

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """See the port. Runs the code that reads real logs, up to their ends."""
        scans = [scans_of(state) for state in states]
        for scan in [scan for of_state in scans for scan in of_state if self._is_same_topic(scan.first)]:
            place = (scan.first.topic, scan.first.partition)
            [answer] = self._all([Fetch(place, scan.first.offset)], deadline)
            batches = cast("FetchResponse", answer).batches
            scan.read([SeenBatch(batch) for batch in batches])
            last = [batch for batch in batches if batch.producer_id == scan.producer_id][-2:]
            if last:
                scan.idle_since_ms = self._simulation.written_ms.get((place, last[-1].base_offset))
            # Of a marker by a tool no time is known; but one without records was written for the newest transaction.
            if scan.idle_since_ms is None and all(batch.control for batch in last):
                scan.idle_since_ms = self._simulation.broker.clock_ms
        return [joined(state, of_state) for state, of_state in zip(states, scans, strict=True)]

    def close(self) -> None:
        """See the port. There is nothing to close."""

    def _all(self, requests: list[Request], deadline: Deadline) -> list[Response]:
        if not requests:
            return []
        return self._until_answered(lambda: self._simulation.ask_all(requests), deadline, lambda _: True)

    def _one(self, request: Request, deadline: Deadline, is_final: Callable[[Response], bool]) -> Response:
        return self._until_answered(lambda: self._simulation.ask(request), deadline, is_final)

    @staticmethod
    def _until_answered(ask: Callable[[], Answer], deadline: Deadline, is_final: Callable[[Answer], bool]) -> Answer:
        between = GrowingPause()
        while True:
            try:
                answer = ask()
            except Unanswered:
                pass
            else:
                if is_final(answer):
                    return answer
            if deadline.expired:
                raise Unavailable("Kafka did not answer in time")
            between.wait(deadline)


def _is_answer(answer: Response) -> bool:
    return cast("ErrorResponse", answer).error_code in _END_ANSWERS


def _is_not_busy(answer: Response) -> bool:
    return ErrorCode.CONCURRENT_TRANSACTIONS not in cast("AddPartitionsToTxnResponse", answer).error_codes


def _is_success(answer: Response) -> bool:
    return cast("InitProducerIdResponse", answer).error_code is ErrorCode.NONE


def _view(answer: DescribeTransactionsResponse) -> TransactionView:
    if answer.error_code is not ErrorCode.NONE:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    status = _STATUS[answer.transaction_state]
    return TransactionView(
        status=status,
        producer_id=answer.producer_id,
        epoch=answer.producer_epoch,
        started_ms=answer.transaction_start_time_ms if status in _OPEN else None,
        timeout_ms=answer.transaction_timeout_ms,
        partitions=answer.partitions,
        newest_started_ms=answer.transaction_start_time_ms if answer.transaction_start_time_ms >= 0 else None,
    )


def _shown(answer: DescribeProducersResponse, producer_id: int) -> ShownProducer:
    for found in answer.active_producers:
        if found.producer_id == producer_id:
            start = found.current_txn_start_offset
            return ShownProducer(found.producer_epoch, start if start >= 0 else None)
    return ShownProducer()


class _Marker(NamedTuple):
    """A control record, as the reader of real logs sees it."""

    commit: bool
    abort: bool


class SeenBatch:
    """A simulated batch, as the reader of real logs sees it."""

    magic = 2

    def __init__(self, batch: Batch) -> None:
        self.base_offset = batch.base_offset
        self.next_offset = batch.next_offset
        self.producer_id = batch.producer_id
        self.producer_epoch = batch.producer_epoch
        self.last_sequence = batch.base_sequence + len(batch.values) - 1
        self.is_control_batch = bool(batch.control)
        self._committed = batch.control == COMMIT

    def __iter__(self) -> Iterator[_Marker]:
        yield _Marker(self._committed, not self._committed)


def _span(
    ids: tuple[int, int], first: int, producers: DescribeProducersResponse, log: FetchResponse
) -> tuple[int, int] | None:
    newest = {(view.producer_id, view.producer_epoch): view.last_sequence for view in producers.active_producers}
    batch = next((one for one in log.batches if one.base_offset == first), None)
    if batch is None or ids not in newest or (batch.producer_id, batch.producer_epoch) != ids:
        return None
    return batch.base_sequence, newest[ids]
