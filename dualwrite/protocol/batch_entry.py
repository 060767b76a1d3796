"""May a run of a batch go on with what former runs have recorded, or would it take another batch's rows for its own?

The ledger names a batch by its sink and its id. Without the rule here, the same two names for another table, another topic or
another way would find the batch written: rows lost and told as written; or find nothing of it: rows twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

_OF_COLUMN: Final = "column:"
"""No topic's name has a colon."""


class Way(Enum):
    """Whether a batch's partitions are decided each on its own, or all at once. Each way has rows of its own in the ledger."""

    PARTITIONS = "partition by partition"
    WHOLE = "as one"


@dataclass(frozen=True)
class Destination:
    """Where a batch is written to. Pickles.

    Attributes:
        way: How it is written.
        table: The table, its schema included, quoted.
        topic: The topic; see :meth:`topics_of_column`.
        cluster_id: The Kafka cluster.
    """

    way: Way
    table: str
    topic: str
    cluster_id: str

    @staticmethod
    def topics_of_column(name: str) -> str:
        """For :attr:`topic`, where the rows name their topics in a column."""
        return f"{_OF_COLUMN}{name}"

    @classmethod
    def parse(cls, text: str) -> Destination:
        """The destination from its text form."""
        parts = json.loads(text)
        return cls(Way[parts["way"]], parts["table"], parts["topic"], parts["cluster_id"])

    def text(self) -> str:
        """The text form, which the ledger keeps."""
        return json.dumps({**asdict(self), "way": self.way.name})

    def shown(self, *, cluster: bool) -> str:
        """For people; with the cluster where it matters."""
        column = self.topic.removeprefix(_OF_COLUMN)
        topic = f"topic {self.topic!r}" if column == self.topic else f"the topics in column {column!r}"
        where = f" of cluster {self.cluster_id!r}" if cluster else ""
        return f"table {self.table} and {topic}{where}, {self.way.value}"


@dataclass(frozen=True)
class Recorded:
    """What the ledger holds of a batch.

    Attributes:
        begun: Whether it has a row that says that the batch was begun.
        destination: As that row has it; None where an older version has written it.
        whole_written: Whether the batch is written as one.
    """

    begun: bool
    destination: Destination | None
    whole_written: bool


class Entry(Enum):
    """What a run does with what is recorded."""

    FIRST = "record the destination"
    GO_ON = "go on: skip what is written"
    INSTEAD = "replace the destination: nothing was written to the former one"
    REFUSED = "end before anything is written"


def next_entry(recorded: Recorded, present: Destination) -> Entry:
    """What a run that writes to ``present`` does first.

    A batch that is written as one, and is not written, has left nothing that counts: it may go elsewhere. Of a batch that is
    written partition by partition, tasks may be under way that nobody hears of: it never goes elsewhere. Older versions have
    recorded no destination, but rows of their own for each way.
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
    """Both destinations, for the error of a run that is refused."""
    former = recorded.destination
    if former is None:
        way = Way.WHOLE if recorded.whole_written else Way.PARTITIONS
        return f"was written {way.value} and is now for {present.shown(cluster=False)}"
    cluster = former.cluster_id != present.cluster_id
    return f"was begun for {former.shown(cluster=cluster)}; and is now for {present.shown(cluster=cluster)}"
