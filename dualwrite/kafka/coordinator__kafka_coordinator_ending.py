"""Requests that end transactions from outside, and the meaning of their answers. Each may be sent more than once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import kafka.errors as kafka_errors
from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.brokers import verdict
from dualwrite.kafka.network import Message, NotYet
from dualwrite.protocol.values import EndAnswer

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.kafka.cluster import Coordinators, Partition
    from dualwrite.protocol.prepared_state import PreparedTxnState

# Version 5 raises the producer's epoch, so it names one transaction. For a producer of librdkafka's engine the broker would
# refuse every repetition of it, and fence the owner.
_SHARED_EPOCH: Final = {"max_version": 4}
_EXACT: Final = {"min_version": 5, "max_version": 5}
# Version 6 is KIP-939's, which brokers mark as unstable.
_NEWEST_INIT_VERSION: Final = 5
# The timeout of a retired id: nothing is ever written under it, and every broker allows this value.
_RETIRED_TIMEOUT_MS: Final = 1000
# Later versions are for brokers only.
_NEWEST_ADD_VERSION: Final = 3

_END_ANSWERS: Final = {
    kafka_errors.NoError: EndAnswer.ENDED,
    kafka_errors.ConcurrentTransactionsError: EndAnswer.IN_PROGRESS,
    kafka_errors.InvalidProducerEpochError: EndAnswer.FENCED,
    kafka_errors.ProducerFencedError: EndAnswer.FENCED,
    kafka_errors.InvalidProducerIdMappingError: EndAnswer.NO_SUCH_ID,
    kafka_errors.TransactionalIdNotFoundError: EndAnswer.NO_SUCH_ID,
    kafka_errors.InvalidTxnStateError: EndAnswer.INVALID_STATE,
}
_OVERTAKEN: Final = frozenset({kafka_errors.InvalidProducerEpochError, kafka_errors.ProducerFencedError})
_NOT_ADDED: Final = frozenset(
    {
        *_OVERTAKEN,
        kafka_errors.InvalidProducerIdMappingError,
        kafka_errors.UnknownTopicOrPartitionError,
        kafka_errors.OperationNotAttemptedError,
    }
)


def end(
    coordinators: Coordinators,
    transactions: Mapping[str, PreparedTxnState],
    deadline: Deadline,
    *,
    committed: bool,
    once: bool = False,
    exactly: bool = False,
) -> Mapping[str, EndAnswer]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.end`, and with ``exactly``, ``end_exactly`` there."""

    def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
        for kafka_id in ids:
            state = transactions[kafka_id]
            request = EndTxnRequest(
                transactional_id=kafka_id,
                producer_id=state.producer_id,
                producer_epoch=state.epoch,
                committed=committed,
                **(_EXACT if exactly else _SHARED_EPOCH),
            )
            yield request, [kafka_id]

    def read(ids: list[str], response: Message) -> Iterator[tuple[str, EndAnswer | NotYet]]:
        [kafka_id] = ids
        answer = _END_ANSWERS.get(kafka_errors.for_code(response.error_code))
        yield (
            kafka_id,
            answer or _retriable(response.error_code, f"the end of {kafka_id!r}", _write_right(kafka_id)),
        )

    return coordinators.ask(transactions, requests, read, deadline, "end the transactions", once=once)


def retire(
    coordinators: Coordinators, kafka_ids: Collection[str], timeouts_ms: Mapping[str, int], deadline: Deadline
) -> Mapping[str, tuple[int, int]]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.retire`."""
    timeouts = dict.fromkeys(kafka_ids, _RETIRED_TIMEOUT_MS) | dict(timeouts_ms)

    def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
        for kafka_id in ids:
            request = InitProducerIdRequest(
                transactional_id=kafka_id,
                transaction_timeout_ms=timeouts[kafka_id],
                producer_id=-1,
                producer_epoch=-1,
                max_version=_NEWEST_INIT_VERSION,
            )
            yield request, [kafka_id]

    def read(ids: list[str], response: Message) -> Iterator[tuple[str, tuple[int, int] | NotYet]]:
        [kafka_id] = ids
        kind = kafka_errors.for_code(response.error_code)
        if kind is kafka_errors.InvalidTransactionTimeoutError:
            raise ConfigurationError(f"the broker's transaction.max.timeout.ms is below {timeouts[kafka_id]} ms")
        if kind is kafka_errors.NoError:
            yield kafka_id, (response.producer_id, response.producer_epoch)
        elif kind in _OVERTAKEN:  # another process is retiring it at the same time
            yield kafka_id, NotYet(f"{kafka_id!r}: {kind.__name__}", moved=False)
        else:
            yield kafka_id, _retriable(response.error_code, f"retiring {kafka_id!r}", _write_right(kafka_id))

    return coordinators.ask(kafka_ids, requests, read, deadline, "retire the transactional ids")


def add_partitions(
    coordinators: Coordinators,
    transactions: Mapping[str, tuple[int, int, Collection[Partition]]],
    deadline: Deadline,
) -> Mapping[str, bool]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.add_partitions`."""

    def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
        for kafka_id in ids:
            producer_id, epoch, partitions = transactions[kafka_id]
            yield _add_partitions(kafka_id, producer_id, epoch, partitions), [kafka_id]

    def read(ids: list[str], response: Message) -> Iterator[tuple[str, bool | NotYet]]:
        [kafka_id] = ids
        errors = [
            (topic.name, partition.partition_error_code)
            for topic in response.results_by_topic_v3_and_below
            for partition in topic.results_by_partition
        ]
        kinds = [kafka_errors.for_code(code) for _, code in errors]
        # "Operation not attempted" only echoes another partition's error; that error may be worth a retry.
        others = [
            error for error, kind in zip(errors, kinds, strict=True) if kind not in {kafka_errors.NoError, *_NOT_ADDED}
        ]
        if others:
            topic, code = others[0]
            right = f"{_write_right(kafka_id)}; and Write on the topic {topic!r}"
            yield kafka_id, _retriable(code, f"ending {kafka_id!r} in partitions of {topic!r}", right)
        else:
            yield kafka_id, all(kind is kafka_errors.NoError for kind in kinds)

    return coordinators.ask(transactions, requests, read, deadline, "add partitions to the transactions")


def _retriable(error_code: int, subject: str, right: str) -> NotYet:
    why = verdict(error_code, subject, right)
    assert why is not None, "answers without an error are handled by the caller"
    return why


def _write_right(kafka_id: str) -> str:
    return f"Write on the transactional id {kafka_id!r}, or on a prefix of it"


def _add_partitions(kafka_id: str, producer_id: int, epoch: int, partitions: Collection[Partition]) -> Message:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)
    topic_type = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=kafka_id,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[topic_type(name=name, partitions=numbers) for name, numbers in by_topic.items()],
        max_version=_NEWEST_ADD_VERSION,
    )
