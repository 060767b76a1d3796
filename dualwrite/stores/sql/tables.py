"""The declared tables, which the migrations together must produce (``tests/migrations`` compares them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    event,
)

from dualwrite.stores.sql.tables__stores_sql_tables_clock import UtcDateTime, row_made
from dualwrite.stores.sql.tables__stores_sql_tables_column_types import TABLE_OPTIONS, ExactString, ExactText

STATE_TABLE: Final = "kafka_transaction_state"
INCIDENT_TABLE: Final = "dualwrite_incident"
SLOT_TABLE: Final = "dualwrite_slot"
LEDGER_TABLE: Final = "dualwrite_ledger"
RUN_TABLE: Final = "dualwrite_run"
CONSUMED_TABLE: Final = "dualwrite_consumed"
LEASE_TABLE: Final = "dualwrite_lease"
VERSION_TABLE: Final = "dualwrite_version"
BATCH_VIEW: Final = "dualwrite_batch"
OWN_TABLES: Final = frozenset(
    {STATE_TABLE, INCIDENT_TABLE, SLOT_TABLE, LEDGER_TABLE, RUN_TABLE, CONSUMED_TABLE, LEASE_TABLE, VERSION_TABLE}
)
SINCE: Final = "since"
"""In a table's or a column's ``info``: the revision that adds it, if that is the newest: it may not be there yet."""
MAX_ID_LENGTH: Final = 255
"""The longest transactional id, sink name and batch id, in characters."""


@dataclass(frozen=True)
class Tables:
    """The library's tables in one database schema.

    Attributes:
        schema: The database schema; None for the connection's default one.
        metadata: The declaration that Alembic compares with.
        state: One row for each transactional id: the newest decision, and the owner that may make the next one.
        incident: Losses, kept permanently: the next decision overwrites the row in which they were found.
        slot: Leases, in their own table so that a heartbeat never collides with a decision.
        ledger: The partitions and batches that jobs have already written.
        run: The run of each batch that may still write.
        consumed: The offsets of consumer groups that keep them as rows.
        lease: The numbered ids of fleets: which member may try to own which.
        batch: The ledger batch by batch: a view, which the migrations make.
    """

    schema: str | None
    metadata: MetaData
    state: Table
    incident: Table
    slot: Table
    ledger: Table
    run: Table
    consumed: Table
    lease: Table
    batch: Table


@lru_cache(maxsize=64)
def declare_tables(schema: str | None = None) -> Tables:
    """The tables in that schema. Cached by schema, so that compiled statements are shared."""
    metadata = MetaData(schema=schema)
    event.listen(metadata, "before_create", _add_options)
    return Tables(
        schema=schema,
        metadata=metadata,
        state=_state(metadata),
        incident=_incident(metadata),
        slot=_slot(metadata),
        ledger=_ledger(metadata),
        run=_run(metadata),
        consumed=_consumed(metadata),
        lease=_lease(metadata),
        batch=_batch(schema),
    )


def _add_options(metadata: MetaData, connection: object, *, tables: Sequence[Table], **_: object) -> None:
    """Not before tables are created: for these options SQLAlchemy loads the dialects of MariaDB and MySQL."""
    del metadata, connection
    for table in tables:
        table.dialect_kwargs.update(TABLE_OPTIONS)


def _state(metadata: MetaData) -> Table:
    return Table(
        STATE_TABLE,
        metadata,
        Column("transactional_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("prepared_transaction_state", ExactText()),
        Column("namespace", ExactString(32), nullable=False),
        Column("incarnation", BigInteger, nullable=False),
        Column("settled_incarnation", BigInteger, nullable=False),
        Column("completed", ExactString(16)),
        Column("cluster_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("owner", ExactText(), nullable=False),
        Column("updated_at", UtcDateTime(), nullable=False, server_default=row_made()),
        Column("settle_fence", Integer),
        PrimaryKeyConstraint("transactional_id", name="kafka_transaction_state_pkey"),
        CheckConstraint("incarnation >= 0", name="kafka_transaction_state_incarnation"),
        CheckConstraint(
            "settled_incarnation >= 0 AND settled_incarnation <= incarnation", name="kafka_transaction_state_settled"
        ),
        CheckConstraint("completed IN ('committed', 'lost', 'unverifiable')", name="kafka_transaction_state_completed"),
        # The primary key's index follows the database's collation, so it cannot serve searches by prefix.
        Index(
            "kafka_transaction_state_names",
            "transactional_id",
            postgresql_ops={"transactional_id": "varchar_pattern_ops"},
        ),
    )


def _incident(metadata: MetaData) -> Table:
    return Table(
        INCIDENT_TABLE,
        metadata,
        Column("transactional_id", ExactString(MAX_ID_LENGTH), nullable=False),
        # The state may exceed the maximum size of an index entry; its digest is the key.
        Column("state_sha256", ExactString(64), nullable=False),
        Column("prepared_transaction_state", ExactText(), nullable=False),
        Column("outcome", ExactString(16), nullable=False),
        Column("detail", ExactText(), nullable=False),
        Column("detected_at", UtcDateTime(), nullable=False, server_default=row_made()),
        Column("acknowledged_at", UtcDateTime()),
        Column("told_at", UtcDateTime()),
        PrimaryKeyConstraint("transactional_id", "state_sha256", name="dualwrite_incident_pkey"),
        CheckConstraint("outcome IN ('lost', 'unverifiable')", name="dualwrite_incident_outcome"),
    )


def _slot(metadata: MetaData) -> Table:
    return Table(
        SLOT_TABLE,
        metadata,
        Column("transactional_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("pool", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("number", Integer, nullable=False),
        Column("lease_owner", ExactText()),
        Column("lease_until", UtcDateTime()),
        Column("kept_until", UtcDateTime()),
        PrimaryKeyConstraint("transactional_id", name="dualwrite_slot_pkey"),
        UniqueConstraint("pool", "number", name="dualwrite_slot_number"),
        CheckConstraint("number >= 1", name="dualwrite_slot_number_positive"),
        CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name="dualwrite_slot_lease"),
    )


def _ledger(metadata: MetaData) -> Table:
    return Table(
        LEDGER_TABLE,
        metadata,
        Column("sink", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("batch_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("partition_id", Integer, nullable=False),
        Column("row_count", BigInteger, nullable=False),
        Column("message_count", BigInteger, nullable=False),
        Column("partition_count", Integer, nullable=False),
        Column("written_at", UtcDateTime(), nullable=False, server_default=row_made()),
        Column("started_at", UtcDateTime()),
        Column("completed_at", UtcDateTime()),
        Column("destination", ExactText()),
        Column("rows_digest", BigInteger),
        Column("failed_at", UtcDateTime()),
        PrimaryKeyConstraint("sink", "batch_id", "partition_id", name="dualwrite_ledger_pkey"),
        CheckConstraint(
            "row_count >= 0 AND message_count >= 0 AND partition_count >= 1", name="dualwrite_ledger_counts"
        ),
    )


def _run(metadata: MetaData) -> Table:
    return Table(
        RUN_TABLE,
        metadata,
        Column("sink", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("name", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("token", ExactString(32), nullable=False),
        Column("begun_at", UtcDateTime(), nullable=False),
        PrimaryKeyConstraint("sink", "name", name="dualwrite_run_pkey"),
    )


def _consumed(metadata: MetaData) -> Table:
    return Table(
        CONSUMED_TABLE,
        metadata,
        Column("group_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("topic", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("partition_id", Integer, nullable=False),
        Column("topic_id", ExactString(32)),
        Column("next_offset", BigInteger, nullable=False),
        Column("epoch", BigInteger, nullable=False),
        Column("owner", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("updated_at", UtcDateTime(), nullable=False, server_default=row_made()),
        PrimaryKeyConstraint("group_id", "topic", "partition_id", name="dualwrite_consumed_pkey"),
        CheckConstraint("next_offset >= -1 AND epoch >= 0", name="dualwrite_consumed_numbers"),
    )


def _lease(metadata: MetaData) -> Table:
    return Table(
        LEASE_TABLE,
        metadata,
        Column("transactional_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("fleet", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("number", Integer, nullable=False),
        Column("owner", ExactText()),
        Column("lease_until", UtcDateTime()),
        PrimaryKeyConstraint("transactional_id", name="dualwrite_lease_pkey"),
        UniqueConstraint("fleet", "number", name="dualwrite_lease_number"),
        CheckConstraint("number >= 0", name="dualwrite_lease_number_not_negative"),
        CheckConstraint("(owner IS NULL) = (lease_until IS NULL)", name="dualwrite_lease_owned"),
        info={SINCE: "0005"},
    )


def _batch(schema: str | None) -> Table:
    """The view, declared like a table but in its own metadata, since it is not one."""
    return Table(
        BATCH_VIEW,
        MetaData(schema=schema),
        Column("sink", ExactString(MAX_ID_LENGTH)),
        Column("batch_id", ExactString(MAX_ID_LENGTH)),
        Column("phase", ExactText()),
        Column("partition_count", Integer),
        Column("written_partitions", Integer),
        Column("row_count", BigInteger),
        Column("message_count", BigInteger),
        Column("started_at", UtcDateTime()),
        Column("decided_at", UtcDateTime()),
        Column("completed_at", UtcDateTime()),
        Column("decided_after_s", Float),
        Column("completed_after_s", Float),
        Column("failed_at", UtcDateTime()),
    )
