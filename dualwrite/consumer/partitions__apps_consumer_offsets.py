"""Where the consumed offsets stand: in the Kafka transaction, or as rows in the database. Each is moved with the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException, TopicPartition

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka.native.coordination__kafka_producer_native_coordinating_offsets import group_of
from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset, ConsumedOffsets

if TYPE_CHECKING:
    from dualwrite.consumer.partitions import Name, Partition, Unit
    from dualwrite.kafka.coordinator import KafkaCoordinator
    from dualwrite.writing.transaction import Transaction

_ANSWER_S: Final = 60.0


class PartitionLost(Exception):
    """A partition of the unit is no longer ours: the block must abort, and another member writes its messages."""


class Offsets(Protocol):
    """Where offsets stand."""

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """Take over newly assigned partitions.

        Returns:
            The offset to read from, by partition, as librdkafka takes it; None leaves it to the consumer.
        """
        ...

    def membership(self, consumer: Consumer) -> None:
        """Note this member's identity in the group. Called between polls, in the thread that polls."""
        ...

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        """Move the offsets in the transaction.

        Raises:
            PartitionLost: A partition is no longer ours.
            DualWriteError: As the transaction's methods.
        """
        ...

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        """Note that the transaction has committed."""
        ...

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        """Where to resume reading after an abort; partitions without an answer are left out."""
        ...


class KafkaOffsets:
    """Offsets in the Kafka transaction: the group coordinator refuses those of a member that was expelled (KIP-447).

    It compares the member's id and generation, and accepts offsets without either from any client. A consumer that was expelled
    loses its id at once and joins again under a later generation, so the membership is noted while the partitions are ours.
    """

    def __init__(self) -> None:
        self._metadata: object = None

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """See :class:`Offsets`. The consumer asks for the committed offsets, and waits until none of them is pending."""
        del consumer, partitions
        return None

    def membership(self, consumer: Consumer) -> None:
        """See :class:`Offsets`."""
        metadata = consumer.consumer_group_metadata()
        if metadata is not None:
            group = group_of(metadata)
            if group.member_id and group.generation >= 0:
                self._metadata = metadata

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        """See :class:`Offsets`."""
        # In this order. A consumer joins again only after its callback has marked the partitions as lost: if the membership
        # is a later one than that of our messages, the mark is seen.
        metadata = self._metadata
        if unit.is_lost or metadata is None:
            raise PartitionLost
        tx.send_offsets_to_transaction([TopicPartition(*name, offset) for name, offset in to.items()], metadata)

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        """See :class:`Offsets`."""

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        """See :class:`Offsets`."""
        asked = [TopicPartition(*one.name) for one in partitions]
        first = {one.name: one.next_offset for one in partitions}
        found = {}
        for answer in consumer.committed(asked, _ANSWER_S):
            name = (answer.topic, answer.partition)
            # Nothing committed: where we began to read.
            offset = answer.offset if answer.offset >= 0 else first[name]
            if answer.error is None and offset is not None:
                found[name] = offset
        return found


def _log_of(consumer: Consumer, name: Name) -> tuple[int, int]:
    """The offsets that the log begins and ends with."""
    try:
        found = consumer.get_watermark_offsets(TopicPartition(*name), timeout=_ANSWER_S)
    except KafkaException as error:
        raise Unavailable(f"the offsets of {name[0]}[{name[1]}] are not known: {error}") from error
    if found is None:
        raise Unavailable(f"the offsets of {name[0]}[{name[1]}] are not known: no answer in {_ANSWER_S:g} s")
    return found


def _require_in_log(name: Name, offset: int, log: tuple[int, int]) -> None:
    """Refuse to start elsewhere, as ``auto.offset.reset`` would: messages would be skipped, or written again."""
    first, end = log
    if first <= offset <= end:
        return
    why = "messages were deleted before they were consumed" if offset < first else "it has lost messages at its end"
    raise ConfigurationError(
        f"the group has consumed {name[0]}[{name[1]}] up to offset {offset}, but its log holds {first} to {end}: {why}",
        next_step="set next_offset in dualwrite_consumed to the offset to resume from; -1 leaves it to auto.offset.reset",
    )


class RowOffsets:
    """Offsets as rows: each move is conditional, and only the last member to claim the partition meets the condition."""

    def __init__(self, rows: ConsumedOffsets, coordinator: KafkaCoordinator) -> None:
        self._rows = rows
        self._coordinator = coordinator

    def start(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int] | None:
        """See :class:`Offsets`.

        Raises:
            ConfigurationError: A row names an offset that the log does not hold.
            Unavailable: The brokers or the database do not answer.
        """
        claimed = self._claim(partitions)
        for name, row in claimed.items():
            if row.next_offset != NOTHING_YET:
                _require_in_log(name, row.next_offset, _log_of(consumer, name))
        # Without a row yet, offsets that the group has committed in Kafka count, then auto.offset.reset.
        return {
            name: OFFSET_INVALID if row.next_offset == NOTHING_YET else row.next_offset for name, row in claimed.items()
        }

    def _claim(self, partitions: Sequence[Partition]) -> dict[Name, ClaimedOffset]:
        ids = self._coordinator.topic_ids({one.name[0] for one in partitions}, Deadline(_ANSWER_S))
        claimed = self._rows.claim({one.name: ids.get(one.name[0]) for one in partitions})
        for one in partitions:
            one.claimed = claimed[one.name]
        return claimed

    def membership(self, consumer: Consumer) -> None:
        """See :class:`Offsets`. The row's epoch is the membership."""

    def move(self, tx: Transaction, unit: Unit, to: Mapping[Name, int]) -> None:
        """See :class:`Offsets`."""
        if unit.is_lost:
            raise PartitionLost
        claimed = {one.name: one.claimed for one in unit.partitions}
        for name in sorted(to):
            row = claimed[name]
            if row is None or not self._rows.move(tx.connection, name, row, to[name]):
                raise PartitionLost

    def moved(self, unit: Unit, to: Mapping[Name, int]) -> None:
        """See :class:`Offsets`."""
        for one in unit.partitions:
            if one.name in to and one.claimed is not None:
                one.claimed = ClaimedOffset(one.claimed.epoch, to[one.name])

    def committed(self, consumer: Consumer, partitions: Sequence[Partition]) -> Mapping[Name, int]:
        """See :class:`Offsets`. Claims again: what an earlier transaction of ours may still commit is then refused."""
        del consumer
        claimed = self._claim(partitions)
        found = {one.name: claimed[one.name].next_offset for one in partitions}
        for one in partitions:
            if found[one.name] == NOTHING_YET and one.next_offset is not None:
                found[one.name] = one.next_offset
        return {name: offset for name, offset in found.items() if offset != NOTHING_YET}
