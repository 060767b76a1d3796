"""Consumed offsets as rows: claimed by the member that a partition is assigned to, moved only by the last one to claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ColumnElement, and_, bindparam, case, select, update

from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import check_name, database_now, declare_tables

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

TopicPartition = tuple[str, int]
NOTHING_YET: Final = -1
"""The next offset of a partition of which the group has consumed nothing."""


@dataclass(frozen=True)
class ClaimedOffset:
    """A partition's row as the member that has claimed it knows it. Every claim raises the epoch."""

    epoch: int
    next_offset: int


class ConsumedOffsets:
    """The rows of one group. Thread-safe. People who read them see the owner's name."""

    def __init__(self, engine: Engine, schema: str | None, group: str, owner: str) -> None:
        self._table = declare_tables(schema).consumed
        self._dialect = dialect_of(engine)
        self._own = ShortTransactions(engine, self._dialect, declare_tables(schema))
        self._group = check_name(group, "a consumer group of which the database keeps the offsets")
        self._owner = owner
        table = self._table
        self._move = (
            update(table)
            .where(*self._is_row(), table.c.epoch == bindparam("epoch_"), table.c.next_offset == bindparam("expected_"))
            .values(next_offset=bindparam("to_"), updated_at=database_now())
        )

    def claim(self, partitions: Mapping[TopicPartition, str | None]) -> dict[TopicPartition, ClaimedOffset]:
        """Take the partitions over: on return no other member can move their offsets by what it has read.

        Waits for a member that is about to commit. The offset of a topic that was deleted and created again starts over.
        """
        # In the same order in all members, against deadlocks.
        ordered = sorted(partitions)
        return self._own.run(lambda connection: self._claim(connection, ordered, partitions)) if ordered else {}

    def _claim(
        self, connection: Connection, ordered: Sequence[TopicPartition], ids: Mapping[TopicPartition, str | None]
    ) -> dict[TopicPartition, ClaimedOffset]:
        table = self._table
        new = [
            {
                "group_id": self._group,
                "topic": topic,
                "partition_id": partition,
                "next_offset": NOTHING_YET,
                "epoch": 0,
                "owner": self._owner,
            }
            for topic, partition in ordered
        ]
        connection.execute(self._dialect.insert_if_missing(table), new)
        claimed = {}
        for topic, partition in ordered:
            where = {"topic_": topic, "partition_": partition}
            topic_id = ids[topic, partition]
            is_other = and_(table.c.topic_id.is_not(None), table.c.topic_id != topic_id)
            values: list[tuple[ColumnElement[Any], object]] = [
                (table.c.epoch, table.c.epoch + 1),
                (table.c.owner, self._owner),
                (table.c.updated_at, database_now()),
            ]
            if topic_id is not None:
                # In this order: MariaDB and MySQL compute each value from those that the statement has already set.
                values.append((table.c.next_offset, case((is_other, NOTHING_YET), else_=table.c.next_offset)))
                values.append((table.c.topic_id, topic_id))
            connection.execute(update(table).where(*self._is_row()).ordered_values(*values), where)
            found = connection.execute(select(table.c.epoch, table.c.next_offset).where(*self._is_row()), where).one()
            claimed[topic, partition] = ClaimedOffset(found.epoch, found.next_offset)
        return claimed

    def move(self, connection: Connection, at: TopicPartition, claimed: ClaimedOffset, to: int) -> bool:
        """Move an offset in the caller's transaction; False if another member has the partition: then it must not commit."""
        given = {
            "topic_": at[0],
            "partition_": at[1],
            "epoch_": claimed.epoch,
            "expected_": claimed.next_offset,
            "to_": to,
        }
        return connection.execute(self._move, given).rowcount == 1

    def _is_row(self) -> Sequence[ColumnElement[bool]]:
        table = self._table
        return (
            table.c.group_id == self._group,
            table.c.topic == bindparam("topic_"),
            table.c.partition_id == bindparam("partition_"),
        )
