"""A simulated Kafka broker: pure, immutable, deterministic. The rules are those measured on a real one.

Usage::

    broker = new_broker({"orders": 2})
    broker, answer = handle(broker, InitProducerId("orders.x.1"))
    broker, answer = handle(broker, AddPartitionsToTxn("orders.x.1", answer.producer_id, 0, (("orders", 0),)))
    broker, answer = handle(broker, EndTxn("orders.x.1", 0, 0, committed=True))
    broker = write_marker(broker, "orders.x.1")          # a real broker does this by itself, some milliseconds later

A `Broker` is a value: hashable and comparable, so that you can keep it and go back to it. `handle` maps a broker and
one request (`simulator.requests`) to the next broker and the answer; it is the moment at which the
broker *processes* the request. To lose an answer, discard it; to delay or repeat a request, call `handle` later, or
twice. Nothing else happens by itself. Events of the environment are functions from broker to broker, in
`simulator.environment` (`create_topic` and `new_broker` in `simulator.state`):

=================================  ====================================================================================
`write_marker`, `write_markers`    write prepared transactions' markers, one partition at a time or all
`advance_clock`                    time passes; only start times show it
`time_out`                         an open transaction has reached its timeout: aborted under a raised epoch
`overdue`                          the open transactions that have, by the clock
`expire_transactional_id`          the coordinator forgets an id that is at rest (7 days unused)
`expire_producer`                  a partition forgets a producer that has nothing open there (1 day unused)
`restart`                          stopped and started: nothing acknowledged is lost
`suspend`, `lose_leader`           a partition's leader is suspended: it does not answer, and its markers wait; once its
                                   session ends, the partition has no leader, and its markers are skipped (KAFKA-20734)
`resume`                           the leader continues, unaware of the skipped markers
`expel`                            a group has not heard of a member for too long (`simulator.groups`)
`delete_topic`, `create_topic`     a topic of the same name gets another id
`delete_records`                   retention: the log begins later
`truncate`                         an unclean leader election: the end of the log is lost (never in a healthy cluster)
=================================  ====================================================================================

A broker answers clients of both versions of transactions, by what each request says. ::

    broker = new_broker({"orders": 2}, transaction_version=2)
    broker, producer = handle(broker, InitProducerId("orders.x.1"))
    identity = (producer.producer_id, producer.producer_epoch)
    broker, _ = handle(broker, Produce("orders.x.1", *identity, ("orders", 0), 0, ("a",), transaction_version=2))
    broker, following = handle(broker, EndTxn("orders.x.1", *identity, committed=True, transaction_version=2))

``following`` has the identity of the next transaction.

Force-terminating a transaction (``kafka-transactions.sh --force-terminate``, ``fenceProducers``) is `InitProducerId` with
another timeout; aborting one past its coordinator is `WriteTxnMarkers`.

Not simulated: authorisation, replication, compaction, message formats, quotas. Simulate
answers that only say "not yet" (coordinator moved, loading) in the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from simulator import coordinator as rules
from simulator import groups
from simulator import partition as log
from simulator.coordinator import TransactionMetadata
from simulator.partition import Partition
from simulator.requests import (
    LATEST,
    READ_COMMITTED,
    AddOffsetsToTxn,
    AddPartitionsToTxn,
    AddPartitionsToTxnResponse,
    DescribeGroup,
    DescribeProducers,
    DescribeProducersResponse,
    DescribeTransactions,
    DescribeTransactionsResponse,
    EndTxn,
    EndTxnResponse,
    ErrorCode,
    ErrorResponse,
    Fetch,
    FetchResponse,
    GroupHeartbeat,
    InitProducerId,
    InitProducerIdResponse,
    JoinGroup,
    LeaveGroup,
    ListedTransaction,
    ListOffsets,
    ListOffsetsResponse,
    ListTransactions,
    ListTransactionsResponse,
    OffsetFetch,
    OffsetFetchResponse,
    Produce,
    ProduceResponse,
    Request,
    Response,
    TopicPartition,
    TxnOffsetCommit,
    WriteTxnMarkers,
    WriteTxnMarkersResponse,
)
from simulator.state import (
    Broker,
    offsets_partition,
    partition,
    transaction,
    with_partition,
    with_transaction,
)


class NotAnswered(Exception):
    """The partition's leader is suspended."""


def answers(broker: Broker, request: Request) -> bool:
    """Whether every leader that the request needs can answer. The coordinator always can."""
    return not broker.suspended or not any(place in broker.suspended for place in _leaders(broker, request))


def _leaders(broker: Broker, request: Request) -> tuple[TopicPartition, ...]:
    match request:
        case Produce() | DescribeProducers() | ListOffsets() | Fetch():
            return (request.partition,)
        case WriteTxnMarkers():
            return request.partitions
        case TxnOffsetCommit() | OffsetFetch():
            return (offsets_partition(broker, request.group_id),)
    return ()


def handle(broker: Broker, request: Request) -> tuple[Broker, Response]:
    """Process one request: returns the next broker and the answer.

    Raises:
        NotAnswered: A leader that the request needs is suspended.
    """
    if not answers(broker, request):
        raise NotAnswered
    return _HANDLERS[type(request)](broker, request)


def _init_producer_id(broker: Broker, request: InitProducerId) -> tuple[Broker, InitProducerIdResponse]:
    if request.enable_2pc:
        if broker.two_phase_commit is None:
            raise ValueError("this broker does not offer version 6 of InitProducerId")
        if not broker.two_phase_commit:
            return broker, InitProducerIdResponse(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    elif not 0 < request.transaction_timeout_ms <= broker.max_timeout_ms:
        return broker, InitProducerIdResponse(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    known = transaction(broker, request.transactional_id)
    fresh = broker.next_producer_id
    if known is None:
        broker = broker._replace(next_producer_id=fresh + 1)
        known = TransactionMetadata(
            request.transactional_id, fresh, timeout_ms=request.transaction_timeout_ms
        )  # fmt: skip
    renewed, answer = rules.init_producer_id(known, request, fresh, broker.transaction_version)
    if fresh in {renewed.producer_id, renewed.next_producer_id}:
        broker = broker._replace(next_producer_id=fresh + 1)
    return with_transaction(broker, renewed), answer


def _add(
    broker: Broker, transactional_id: str, producer_id: int, producer_epoch: int, added: tuple[TopicPartition, ...]
) -> tuple[Broker, ErrorCode]:
    known = transaction(broker, transactional_id)
    renewed, error = rules.add_partitions(known, producer_id, producer_epoch, added, broker.clock_ms)
    return (broker if renewed is None else with_transaction(broker, renewed)), error


def _add_partitions(broker: Broker, request: AddPartitionsToTxn) -> tuple[Broker, AddPartitionsToTxnResponse]:
    unknown = [wanted for wanted in request.partitions if partition(broker, wanted) is None]
    if unknown:
        return broker, AddPartitionsToTxnResponse(
            tuple(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if wanted in unknown else ErrorCode.OPERATION_NOT_ATTEMPTED
                for wanted in request.partitions
            )
        )
    broker, error = _add(
        broker, request.transactional_id, request.producer_id, request.producer_epoch, request.partitions
    )
    return broker, AddPartitionsToTxnResponse((error,) * len(request.partitions))


def _add_offsets(broker: Broker, request: AddOffsetsToTxn) -> tuple[Broker, ErrorResponse]:
    added = (offsets_partition(broker, request.group_id),)
    broker, error = _add(broker, request.transactional_id, request.producer_id, request.producer_epoch, added)
    return broker, ErrorResponse(error)


def _verified(
    broker: Broker, found: Partition, request: Produce | TxnOffsetCommit, base_sequence: int
) -> tuple[Broker, Partition, ErrorCode]:
    """Ask the coordinator, unless the partition knows already, whether the transaction includes the partition.

    A version 2 transaction includes it from then on.
    """
    entry = log.producer(found, request.producer_id)
    if entry is not None and request.producer_epoch < entry.producer_epoch:
        return broker, found, ErrorCode.INVALID_PRODUCER_EPOCH
    if entry is not None and entry.txn_start >= 0 and entry.producer_epoch == request.producer_epoch:
        return broker, found, ErrorCode.NONE
    found = log.begin_verification(
        found, request.producer_id, request.producer_epoch, base_sequence, request.transaction_version
    )
    if request.transaction_version > 1:
        broker, error = _add(
            with_partition(broker, found),
            request.transactional_id or "",
            request.producer_id,
            request.producer_epoch,
            (found.topic_partition,),
        )
        return broker, found, ErrorCode.INVALID_PRODUCER_EPOCH if error is ErrorCode.PRODUCER_FENCED else error
    known = transaction(broker, request.transactional_id) if request.transactional_id else None
    error = rules.verify_partition(known, request.producer_id, request.producer_epoch, found.topic_partition)
    return with_partition(broker, found), found, error


def _produce(broker: Broker, request: Produce) -> tuple[Broker, ProduceResponse]:
    found = partition(broker, request.partition)
    if found is None:
        return broker, ProduceResponse(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if request.transactional_id is None:
        written, answer = log.append_plain(found, request.values)
        return with_partition(broker, written), answer
    broker, found, error = _verified(broker, found, request, request.base_sequence)
    if error is ErrorCode.CONCURRENT_TRANSACTIONS and request.transaction_version < 2:
        error = ErrorCode.NOT_ENOUGH_REPLICAS  # an error that old clients retry
    if error is not ErrorCode.NONE:
        return broker, ProduceResponse(error)
    written, answer = log.append(
        found, request.producer_id, request.producer_epoch, request.base_sequence, request.values
    )
    return with_partition(broker, written), answer


def _txn_offset_commit(broker: Broker, request: TxnOffsetCommit) -> tuple[Broker, ErrorResponse]:
    found = partition(broker, offsets_partition(broker, request.group_id))
    assert found is not None
    broker, found, error = _verified(broker, found, request, -1)
    if error is ErrorCode.NONE:
        error = groups.offsets_refused(broker, request)
    if error is not ErrorCode.NONE:
        return broker, ErrorResponse(error)
    values = tuple((request.group_id, of_partition, offset) for of_partition, offset in request.offsets)
    written, answer = log.append(found, request.producer_id, request.producer_epoch, -1, values, checks_sequence=False)
    return with_partition(broker, written), ErrorResponse(answer.error_code)


def _end_txn(broker: Broker, request: EndTxn) -> tuple[Broker, ErrorResponse | EndTxnResponse]:
    known = transaction(broker, request.transactional_id)
    if request.transaction_version > 1:
        fresh = broker.next_producer_id
        renewed, answer = rules.end_txn_v2(known, request, fresh, broker.clock_ms)
        if renewed is None or renewed is known:
            return broker, answer
        if renewed.next_producer_id == fresh:
            broker = broker._replace(next_producer_id=fresh + 1)
        return with_transaction(broker, renewed), answer
    renewed, error = rules.end_txn(known, request)
    return (broker if renewed is None else with_transaction(broker, renewed)), ErrorResponse(error)


def _describe_transactions(
    broker: Broker, request: DescribeTransactions
) -> tuple[Broker, DescribeTransactionsResponse]:
    known = transaction(broker, request.transactional_id)
    if known is None:
        return broker, DescribeTransactionsResponse(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
    return broker, DescribeTransactionsResponse(
        ErrorCode.NONE,
        known.state,
        known.producer_id,
        known.producer_epoch,
        known.timeout_ms,
        known.start_ms,
        known.unmarked,
    )


def _list_transactions(broker: Broker, request: ListTransactions) -> tuple[Broker, ListTransactionsResponse]:
    listed = tuple(
        ListedTransaction(known.transactional_id, known.producer_id, known.state)
        for known in broker.transactions
        if (not request.state_filters or known.state in request.state_filters)
        and (not request.producer_id_filters or known.producer_id in request.producer_id_filters)
    )
    return broker, ListTransactionsResponse(listed)


def _describe_producers(broker: Broker, request: DescribeProducers) -> tuple[Broker, DescribeProducersResponse]:
    found = partition(broker, request.partition)
    if found is None:
        return broker, DescribeProducersResponse(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return broker, log.describe_producers(found)


def _list_offsets(broker: Broker, request: ListOffsets) -> tuple[Broker, ListOffsetsResponse]:
    found = partition(broker, request.partition)
    if found is None:
        return broker, ListOffsetsResponse(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if request.timestamp != LATEST:
        return broker, ListOffsetsResponse(ErrorCode.NONE, found.log_start)
    committed = request.isolation_level == READ_COMMITTED
    return broker, ListOffsetsResponse(ErrorCode.NONE, log.last_stable_offset(found) if committed else found.log_end)


def _fetch(broker: Broker, request: Fetch) -> tuple[Broker, FetchResponse]:
    found = partition(broker, request.partition)
    if found is None:
        return broker, FetchResponse(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return broker, log.fetch(found, request.fetch_offset, request.isolation_level)


def _write_txn_markers(broker: Broker, request: WriteTxnMarkers) -> tuple[Broker, WriteTxnMarkersResponse]:
    errors = []
    for wanted in request.partitions:
        found = partition(broker, wanted)
        if found is None:
            errors.append(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            continue
        written, error = log.append_marker(
            found,
            request.producer_id,
            request.producer_epoch,
            committed=request.committed,
            coordinator_epoch=request.coordinator_epoch,
            transaction_version=request.transaction_version,
        )
        broker = with_partition(broker, written)
        errors.append(error)
    return broker, WriteTxnMarkersResponse(tuple(errors))


def _offset_fetch(broker: Broker, request: OffsetFetch) -> tuple[Broker, OffsetFetchResponse]:
    found = partition(broker, offsets_partition(broker, request.group_id))
    assert found is not None
    offset = -1
    for group_id, of_partition, committed in cast("list[tuple[str, TopicPartition, int]]", log.ended_values(found)):
        if (group_id, of_partition) == request[:2]:
            offset = committed
    if request.require_stable and _is_pending(found, *request[:2]):
        return broker, OffsetFetchResponse(ErrorCode.UNSTABLE_OFFSET_COMMIT)
    return broker, OffsetFetchResponse(ErrorCode.NONE, offset)


def _is_pending(found: Partition, group_id: str, of_partition: TopicPartition) -> bool:
    """Whether an open transaction holds an offset of the group for this partition."""
    starts = {entry.producer_id: entry.txn_start for entry in found.producers if entry.txn_start >= 0}
    return any(
        value[:2] == (group_id, of_partition)
        for batch in found.batches
        if batch.base_offset >= starts.get(batch.producer_id, found.log_end)
        for value in cast("tuple[tuple[str, TopicPartition, int], ...]", batch.values)
    )


_HANDLERS: Final[dict[type, Callable[[Broker, Any], tuple[Broker, Any]]]] = {
    InitProducerId: _init_producer_id,
    AddPartitionsToTxn: _add_partitions,
    AddOffsetsToTxn: _add_offsets,
    TxnOffsetCommit: _txn_offset_commit,
    Produce: _produce,
    EndTxn: _end_txn,
    DescribeTransactions: _describe_transactions,
    ListTransactions: _list_transactions,
    DescribeProducers: _describe_producers,
    ListOffsets: _list_offsets,
    Fetch: _fetch,
    WriteTxnMarkers: _write_txn_markers,
    OffsetFetch: _offset_fetch,
    JoinGroup: groups.join_group,
    GroupHeartbeat: groups.heartbeat,
    LeaveGroup: groups.leave_group,
    DescribeGroup: groups.describe_group,
}
