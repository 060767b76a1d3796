"""Decides whether a run of a batch may continue from earlier runs' records, or would take another batch's rows for its own.

The ledger names a batch by its sink and its id. Without this rule, a run that uses the same two names for another table,
topic or way could find the batch written, and lose rows that it reports as written; or find no record of it, and write rows
twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

_OF_COLUMN: Final = "column:"
"""No topic's name contains a colon."""


class Way(Enum):
    """Whether a batch's partitions are decided one by one or all at once. Each way has its own rows in the ledger."""

    PARTITIONS = "partition by partition"
    WHOLE = "as one"


@dataclass(frozen=True)
class Destination:
    """The destination of a batch. Pickles.

    Attributes:
        way: How the batch is written.
        table: The quoted name of the table, with its schema.
        topic: The topic; see :meth:`topics_of_column`.
        cluster_id: The Kafka cluster.
    """

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

    Attributes:
        begun: Whether a row says that the batch was begun.
        destination: The destination in that row; None if an older version wrote the row.
        whole_written: Whether the batch is already written, as one.
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
