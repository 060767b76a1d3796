"""The database's rows as values: the state of one id, a prepared database transaction, and a loss."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_naming import kafka_id


@dataclass(frozen=True)
class StateRow:
    """One row of ``kafka_transaction_state``.

    Attributes:
        transactional_id: The user's name of the sequence of dual writes.
        prepared: The newest decided transaction; the empty state if there was none.
        namespace: Random text made with the row; part of every Kafka id.
        incarnation: Raised by every claim. The last claimant is the owner.
        settled_incarnation: This incarnation and all below it are complete.
        completed: The outcome of ``prepared`` in Kafka, once recorded.
        cluster_id: The Kafka cluster that the row belongs to.
        owner: The name of the last claimant.
        updated_at: When the row last changed, by the database's clock.
        settle_fence: While the newest decision is a native transaction that is being settled: the producer epoch from which on
            only settlers act under its Kafka id. None before that.
    """

    transactional_id: str
    prepared: PreparedTxnState
    namespace: str
    incarnation: int
    settled_incarnation: int
    completed: Outcome | None
    cluster_id: str
    owner: str
    updated_at: datetime
    settle_fence: int | None = None

    def kafka_id(self, incarnation: int) -> str:
        """The Kafka ``transactional.id`` of an incarnation: it has exactly one writer, ever."""
        return kafka_id(self.transactional_id, self.namespace, incarnation)


@dataclass(frozen=True)
class Participant:
    """A database transaction that was prepared (``PREPARE TRANSACTION``), and waits for the decision on its row.

    Attributes:
        row: The row.
        incarnation: The incarnation of the row that prepared it.
        name: The database's name for it.
        decided: Whether the row names the Kafka transaction that it was prepared with.
        prepared_at: When it was prepared, by the database's clock.
    """

    row: StateRow
    incarnation: int
    name: str
    decided: bool
    prepared_at: datetime


@dataclass(frozen=True)
class Incident:
    """One decided transaction that Kafka does not have, or whose outcome is unknown. It stays until a person has looked.

    Attributes:
        transactional_id: The id that the transaction ran under.
        prepared_transaction_state: The transaction's text form: it names the partitions and the first offsets.
        outcome: ``LOST`` or ``UNVERIFIABLE``.
        detail: The evidence, for people to read.
        detected_at: When it was recorded, by the database's clock.
        acknowledged_at: When a person acknowledged it; None until then.
        told_at: When it was reported to a caller, by an error or a report; None until then.
    """

    transactional_id: str
    prepared_transaction_state: str
    outcome: Outcome
    detail: str
    detected_at: datetime
    acknowledged_at: datetime | None
    told_at: datetime | None = None

    @property
    def state(self) -> PreparedTxnState:
        """The transaction."""
        return PreparedTxnState.from_string(self.prepared_transaction_state)
