"""Mistakes of a consumer: in whose offsets it moves, and in what it leaves to its peers."""

import struct

import pytest
from confluent_kafka import TopicPartition
from sqlalchemy import select, update

from dualwrite.apps.consumer import offsets
from dualwrite.apps.consumer.offsets import KafkaOffsets
from dualwrite.apps.consumer.peers import Peers
from dualwrite.stores.consumed import ConsumedOffsets
from harness.mistakes.registry import Check, mistake

_GROUP = "integration/test_exactly_once_consumer.py::"
_PAUSED = f"{_GROUP}test_a_member_paused_through_a_rebalance_writes_nothing_when_it_wakes"


@mistake(
    Check(
        "conformance/test_consumed.py::test_a_member_that_lost_its_partition_moves_nothing[sqlite]", "assert not True"
    )
)
def offsets_moved_by_an_upsert(patch: pytest.MonkeyPatch) -> None:
    """A member moves the offset in the database of a partition that another one has claimed."""

    def move(self, connection, at, claimed, to):
        given = {"topic_": at[0], "partition_": at[1]}
        connection.execute(update(self._table).where(*self._is_row()).values(next_offset=to), given)
        return connection.execute(select(self._table.c.next_offset).where(*self._is_row()), given).one()

    patch.setattr(ConsumedOffsets, "move", lambda *given: bool(move(*given)))


@mistake(
    Check(
        f"{_GROUP}test_a_member_that_dies_is_settled_by_its_successor[threads-eager-kafka-postgresql]",
        "assert 0 == -|waited in vain",
    )
)
def dead_members_left_alone(patch: pytest.MonkeyPatch) -> None:
    """A member does not settle what dead peers have left, but waits for the broker's transaction timeout."""
    patch.setattr(Peers, "settle", lambda _: [])


@mistake(
    Check(
        "unit/apps/test_consumer_offsets.py::test_an_offset_outside_the_log_stops_the_member_with_what_to_do",
        "DID NOT RAISE",
    )
)
def offsets_outside_the_log_reset(patch: pytest.MonkeyPatch) -> None:
    """A member whose offset in the database is outside the log reads from elsewhere, and says nothing."""
    patch.setattr(offsets, "_require_in_log", lambda *_: None)


@mistake(Check(f"{_PAUSED}[eager-kafka-consume.handled:2:stop-postgresql]", "assert Counter"))
def offsets_sent_without_a_membership(patch: pytest.MonkeyPatch) -> None:
    """A member sends offsets that name no member and no generation, and peers do not fence it either."""
    patch.setattr(Peers, "settle", lambda _: [])

    def move(self, tx, unit, to):
        group = self._metadata[len(b"CGMDv2:") + 4 :].split(b"\0")[0]
        nobody = b"CGMDv2:" + struct.pack("=i", -1) + group + b"\0\0\1"
        tx.send_offsets_to_transaction([TopicPartition(*name, offset) for name, offset in to.items()], nobody)

    patch.setattr(KafkaOffsets, "move", move)
