"""Mistakes of a consumer: whose offsets it moves, what it leaves to its peers, and what it makes of a message it cannot read."""

import struct
from contextlib import contextmanager

import pytest
from confluent_kafka import TopicPartition
from sqlalchemy import select, update

from dualwrite.asyncio import consumer
from dualwrite.consumer import consumer as threaded
from dualwrite.consumer import partitions
from dualwrite.consumer.consumer import Deserializing
from dualwrite.consumer.partitions import KafkaOffsets, PartitionLost, Partitions, Peers, RowOffsets, Unit
from dualwrite.stores.sql.consumed import ClaimedOffset, ConsumedOffsets
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
        "unit/consumer/test_partitions_offsets.py::test_an_offset_outside_the_log_stops_the_member_with_what_to_do",
        "DID NOT RAISE",
    )
)
def offsets_outside_the_log_reset(patch: pytest.MonkeyPatch) -> None:
    """A member whose offset in the database is outside the log reads from elsewhere, and says nothing."""
    patch.setattr(partitions, "_require_in_log", lambda *_: None)


@mistake(Check(f"{_PAUSED}[eager-kafka-consume.handled:2:stop-postgresql]", "assert Counter"))
def offsets_sent_without_a_membership(patch: pytest.MonkeyPatch) -> None:
    """A member sends offsets that name no member and no generation, and peers do not fence it either."""
    patch.setattr(Peers, "settle", lambda _: [])
    patch.setattr(KafkaOffsets, "move", _move_as_nobody)


def _move_as_nobody(self, tx, unit, to):
    if self._metadata is None:
        raise PartitionLost
    group = self._metadata[len(b"CGMDv2:") + 4 :].split(b"\0")[0]
    nobody = b"CGMDv2:" + struct.pack("=i", -1) + group + b"\0\0\1"
    tx.send_offsets_to_transaction([TopicPartition(*name, offset) for name, offset in to.items()], nobody)


@mistake(
    Check(
        "unit/consumer/test_partitions_offsets.py::test_offsets_in_kafka_name_the_member_and_its_generation",
        "generation: -1 != 7",
    )
)
def generation_not_sent(patch: pytest.MonkeyPatch) -> None:
    """A member sends offsets that name no member and no generation: one that was expelled begins a unit, and moves them."""
    patch.setattr(KafkaOffsets, "move", _move_as_nobody)


@mistake(
    Check(
        "unit/consumer/test_working_deserializing.py::test_a_registry_out_of_reach_is_waited_for",
        r"assert \[\] == \['7'\]",
    )
)
def a_registry_out_of_reach_taken_for_a_bad_message(patch: pytest.MonkeyPatch) -> None:
    """A consumer sets messages aside that it cannot read while the schema registry is out of reach."""
    patch.setattr(threaded, "registry_is_away", lambda _: False)


@mistake(
    Check(
        "unit/consumer/test_working_deserializing.py::test_a_message_that_the_handler_refuses_is_set_aside_as_it_was_read",
        "a value is text, bytes or None, not dict",
    )
)
def dead_letters_of_objects(patch: pytest.MonkeyPatch) -> None:
    """A message that the handler refuses goes to the dead letters as its deserializer has made it."""

    @contextmanager
    def applied(self, messages):
        self._apply(messages)
        yield

    patch.setattr(Deserializing, "applied", applied)


@mistake(
    Check(
        "unit/consumer/test_async_consumer.py::test_a_cancellation_during_the_commit_aborts_or_completes[_decide-True]",
        "assert 0 == 2|assert 2 == 0",
    )
)
def a_cancelled_consumer_forgets_what_it_completed(patch: pytest.MonkeyPatch) -> None:
    """A cancellation interrupts the worker of a consumer between the commit and the note that the offsets have moved."""
    real = consumer.run
    patch.setattr(consumer, "run", lambda pool, function, **_: real(pool, function))


@mistake(
    Check(
        f"{_GROUP}test_members_join_and_leave_and_nothing_is_written_twice[eager-kafka-postgresql]",
        "assert .*Counter",
    )
)
def offsets_left_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """A member writes rows and messages, and does not move the group's offsets with them."""
    patch.setattr(KafkaOffsets, "move", lambda *_: None)


@mistake(
    Check(
        "unit/consumer/test_working.py::test_a_partition_that_is_lost_during_the_work_is_not_written",
        r"assert \[.+\] == \[\]|assert not|assert False",
    )
)
def lost_partitions_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A member moves the offsets of a partition that it has lost, by the membership that it has got since."""
    patch.setattr(Unit, "is_lost", False)


@mistake(
    Check(
        "unit/consumer/test_partitions.py::test_an_aborted_unit_is_read_again_and_nothing_else_meanwhile",
        "assert ",
    )
)
def nothing_read_again_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    """A member goes on with the next messages after a unit that was aborted for good."""
    real = Partitions.give_back
    patch.setattr(Partitions, "give_back", lambda self, unit, *, rewind: real(self, unit, rewind=rewind and False))


@mistake(
    Check(
        "unit/consumer/test_partitions_offsets.py::test_rows_move_in_the_transaction_that_writes_what_was_read",
        r"assert \[\] == ",
    )
)
def offset_rows_moved_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A member moves its rows of offsets in a transaction of their own, once the unit has committed."""

    def moved(self, unit, to):
        for one in unit.partitions:
            if one.name in to and one.claimed is not None:
                self._rows._own.run(
                    lambda connection, one=one: self._rows.move(connection, one.name, one.claimed, to[one.name])
                )
                one.claimed = ClaimedOffset(one.claimed.epoch, to[one.name])

    patch.setattr(RowOffsets, "move", lambda *_: None)
    patch.setattr(RowOffsets, "moved", moved)
