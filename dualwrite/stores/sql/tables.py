"""The library's tables: as they are declared, their rows read and written, the database's clock, column types.

`dualwrite.migrations` brings a database to this form; a test compares both.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Float,
    FromClause,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    event,
    func,
    literal,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from dualwrite.errors import ConfigurationError, Fenced, IllegalStateError
from dualwrite.protocol.prepared_state import PreparedTxnState, stored_text
from dualwrite.protocol.settle import contradiction
from dualwrite.protocol.values import Decision, Outcome, StateRow, gone_back, other_cluster, parse_cluster

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect
    from sqlalchemy.dialects.mysql.base import MySQLDialect
    from sqlalchemy.sql.compiler import SQLCompiler

STATE_TABLE: Final = "kafka_transaction_state"
INCIDENT_TABLE: Final = "dualwrite_incident"
SLOT_TABLE: Final = "dualwrite_slot"
LEDGER_TABLE: Final = "dualwrite_ledger"
RUN_TABLE: Final = "dualwrite_run"
CONSUMED_TABLE: Final = "dualwrite_consumed"
LEASE_TABLE: Final = "dualwrite_lease"
OUTBOX_TABLE: Final = "dualwrite_outbox"
OUTBOX_ASIDE_TABLE: Final = "dualwrite_outbox_aside"
OUTBOX_MODE_TABLE: Final = "dualwrite_outbox_mode"
ACTION_TABLE: Final = "dualwrite_action"
VERSION_TABLE: Final = "dualwrite_version"
BATCH_VIEW: Final = "dualwrite_batch"
OWN_TABLES: Final = frozenset(
    {
        STATE_TABLE,
        INCIDENT_TABLE,
        SLOT_TABLE,
        LEDGER_TABLE,
        RUN_TABLE,
        CONSUMED_TABLE,
        LEASE_TABLE,
        OUTBOX_TABLE,
        OUTBOX_ASIDE_TABLE,
        OUTBOX_MODE_TABLE,
        ACTION_TABLE,
        VERSION_TABLE,
    }
)
SINCE: Final = "since"
"""In a table's or a column's ``info``: the revision that adds it, if that is the newest: it may not be there yet."""
MAX_ID_LENGTH: Final = 255
"""The longest transactional id, sink name and batch id, in characters."""


@dataclass(frozen=True)
class Tables:
    """The library's tables in one database schema.

    Attributes:
        state: One row for each transactional id: the newest decision, and the owner that may make the next one.
        incident: Losses, kept permanently: the next decision overwrites the row in which they were found.
        slot: Leases, in their own table so that a heartbeat never collides with a decision.
        ledger: The partitions and batches that jobs have already written.
        run: The run of each batch that may still write.
        consumed: The offsets of consumer groups that keep them as rows.
        lease: The numbered ids of fleets: which member may try to own which.
        outbox: Messages that wait: they commit with the user's rows, and are sent later, in the order of their numbers.
        aside: Messages that could not be sent, for a person to look at.
        mode: Whether the messages of a writer go direct or wait. A row of its own, as blocks share its lock.
        action: What people, and the service that settles, have done: who, why, and how it ended.
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
    outbox: Table
    aside: Table
    mode: Table
    action: Table
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
        outbox=_outbox(metadata),
        aside=_aside(metadata),
        mode=_mode(metadata),
        action=_action(metadata),
        batch=_batch(schema),
    )


def _add_options(metadata: MetaData, connection: object, *, tables: Sequence[Table], **_: object) -> None:
    """Not before tables are created: for these options SQLAlchemy loads the dialects of the other databases."""
    del metadata, connection
    for table in tables:
        table.dialect_kwargs.update(TABLE_OPTIONS)
        if table.name == OUTBOX_TABLE:
            table.dialect_kwargs["sqlite_autoincrement"] = True  # no number is used twice


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
        Column("outbox_decisions", BigInteger),
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
        Column("reported_at", UtcDateTime()),
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
        Column("byte_count", BigInteger, info={SINCE: "0008"}),
        Column("sources", ExactText(), info={SINCE: "0008"}),
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
    )


def _outbox(metadata: MetaData) -> Table:
    return Table(
        OUTBOX_TABLE,
        metadata,
        # Numbers are drawn while the rows are put, not in the order of commits. None is ever used again, also on SQLite.
        Column("seq", GrowingNumber, Identity(always=True), nullable=False),
        *_message(),
        PrimaryKeyConstraint("seq", name="dualwrite_outbox_pkey"),
        Index("dualwrite_outbox_order", "writer", "seq"),
    )


def _aside(metadata: MetaData) -> Table:
    return Table(
        OUTBOX_ASIDE_TABLE,
        metadata,
        Column("seq", BigInteger, autoincrement=False, nullable=False),
        *_message(),
        Column("reason", ExactText(), nullable=False),
        Column("moved_at", UtcDateTime(), nullable=False, server_default=row_made()),
        PrimaryKeyConstraint("seq", name="dualwrite_outbox_aside_pkey"),
        Index("dualwrite_outbox_aside_order", "writer", "seq"),
    )


def _message() -> Sequence[Column[Any]]:
    return [
        Column("writer", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("transactional_id", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("topic", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("topic_partition", Integer),
        Column("key", ExactBytes()),
        Column("value", ExactBytes()),
        Column("headers", ExactBytes()),
        Column("timestamp_ms", BigInteger),
        Column("put_at", UtcDateTime(), nullable=False, server_default=row_made()),
    ]


def _mode(metadata: MetaData) -> Table:
    return Table(
        OUTBOX_MODE_TABLE,
        metadata,
        Column("writer", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("mode", ExactString(16), nullable=False),
        Column("changed_at", UtcDateTime(), nullable=False, server_default=row_made()),
        PrimaryKeyConstraint("writer", name="dualwrite_outbox_mode_pkey"),
        CheckConstraint("mode IN ('direct', 'later')", name="dualwrite_outbox_mode_known"),
    )


def _action(metadata: MetaData) -> Table:
    return Table(
        ACTION_TABLE,
        metadata,
        Column("action_id", ExactString(32), nullable=False),
        Column("subject", ExactString(MAX_ID_LENGTH), nullable=False),
        Column("deed", ExactString(16), nullable=False),
        Column("detail", ExactText(), nullable=False),
        Column("reason", ExactText(), nullable=False),
        Column("actor", ExactText(), nullable=False),
        Column("program", ExactText(), nullable=False),
        Column("begun_at", UtcDateTime(), nullable=False, server_default=row_made()),
        Column("ended_at", UtcDateTime()),
        Column("outcome", ExactString(16)),
        Column("result", ExactText()),
        PrimaryKeyConstraint("action_id", name="dualwrite_action_pkey"),
        CheckConstraint("outcome IN ('done', 'refused', 'failed')", name="dualwrite_action_outcome"),
        CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="dualwrite_action_ended"),
        Index("dualwrite_action_order", "begun_at"),
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
        Column("byte_count", BigInteger, info={SINCE: "0008"}),
        Column("sources", ExactText(), info={SINCE: "0008"}),
    )


# Rows as they come from the database, checked before use.

Item = TypeVar("Item")

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_RESTORE: Final = "the row was not written by this library, or was edited: restore it before anything is settled"
_CHUNK: Final = 5000
MAX_FENCE: Final = 2**15
"""One more than the greatest producer epoch."""


def check_name(name: str, kind: str = "a transactional id") -> str:
    """Return the name if it can be a key of the tables.

    It is refused if it is no text, is empty, longer than 255 characters, or holds control characters.
    """
    if not isinstance(name, str):
        # 20260101 and "20260101" would be one name in the tables, and two in a program.
        raise ConfigurationError(f"{kind} is text, not {type(name).__name__}", next_step=f"write {str(name)!r}")
    if not 1 <= len(name) <= MAX_ID_LENGTH or _CONTROL.search(name):
        raise ConfigurationError(
            f"{name[:MAX_ID_LENGTH]!r} cannot be {kind}",
            next_step=f"use 1 to {MAX_ID_LENGTH} characters without control characters",
        )
    return name


class NamedValues(Protocol):
    """A row by column name: a ``RowMapping`` or a dictionary."""

    def __getitem__(self, name: str, /) -> object: ...


def parse_state_row(table: str, row: NamedValues) -> StateRow:
    """Parse one row of the table strictly: one that this library cannot have written is refused."""
    transactional_id, incarnation = cast("str", row["transactional_id"]), cast("int", row["incarnation"])
    completed = cast("str | None", row["completed"])
    where = f"bad row in {table}"
    try:
        state = PreparedTxnState.from_string(cast("str | None", row["prepared_transaction_state"]) or "")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{where}: {error.what}", transactional_id=transactional_id, next_step=error.next_step
        ) from error
    cause = _incomplete(state, incarnation)
    if completed is not None and completed not in _OUTCOMES:
        cause = f"completed is {completed[:20]!r}"
    fence = cast("int | None", row["settle_fence"])
    if fence is not None and not (0 < fence <= MAX_FENCE and state.is_native):
        cause = f"settle_fence is {fence}"
    cluster_id, unverified_from = parse_cluster(cast("str", row["cluster_id"]))
    if unverified_from is not None and unverified_from > incarnation:
        cause = f"unverified from incarnation {unverified_from}, the row is only at {incarnation}"
    if cause is not None:
        raise ConfigurationError(f"{where}: {cause}", transactional_id=transactional_id, next_step=_RESTORE)
    return StateRow(
        transactional_id=transactional_id,
        prepared=state,
        namespace=cast("str", row["namespace"]),
        incarnation=incarnation,
        settled_incarnation=cast("int", row["settled_incarnation"]),
        completed=None if completed is None else _OUTCOMES[completed],
        cluster_id=cluster_id,
        owner=cast("str", row["owner"]),
        updated_at=cast("datetime", row["updated_at"]),
        settle_fence=fence,
        unverified_from=unverified_from,
    )


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def _incomplete(state: PreparedTxnState, incarnation: int) -> str | None:
    if not state.has_transaction:
        return None
    if state.incarnation is None:
        return "the state names no incarnation"
    if not state.first_offsets and not state.further:
        return "the state holds no partitions" if state.is_native else "the state holds no first offsets"
    if state.incarnation > incarnation:
        return f"the state names incarnation {state.incarnation}, the row is only at {incarnation}"
    return None


def check_decidable(decision: Decision) -> str:
    """The text to store for a decision; refused if a later claim would refuse the row."""
    state, incarnation = decision.state, decision.incarnation
    cause: str | None = "it names no transaction"
    if state is not None and state.has_transaction:
        cause = _incomplete(state, incarnation)
        if cause is None and state.incarnation != incarnation:
            cause = f"it names incarnation {state.incarnation}, not {incarnation}"
        if cause is None:
            return stored_text(state)
    raise IllegalStateError(
        f"the prepared state cannot be recorded: {cause}", transactional_id=decision.transactional_id
    )


def check_not_gone_back(known: StateRow, incarnation: int, prepared: str | None) -> None:
    """Refuse an incarnation or decision older than ours: only we change the row, so the database has lost commits."""
    if incarnation == known.incarnation and (prepared or "") == str(known.prepared):
        return  # the usual case
    shown = PreparedTxnState.from_string(prepared or "") if incarnation <= known.incarnation else known.prepared
    seen = contradiction(known.incarnation, known.prepared, incarnation, shown)
    if seen is not None:
        # If the claim was lost too, the next claim finds its Kafka id in use.
        raise gone_back(
            seen,
            known.transactional_id,
            str(known.prepared) if shown != known.prepared else None,
            recorded=incarnation == known.incarnation,
        )


def check_claimed(row: StateRow, cluster_id: str | None, table: str) -> None:
    """Refuse, before the claim commits, a row of another cluster, or with a state of an incarnation not yet reached.

    The cluster is not compared if it is None, as Kafka is away, and if the row has never seen one.
    """
    if row.prepared.incarnation == row.incarnation:
        raise ConfigurationError(
            f"bad row in {table}: the state names an incarnation that the row had not reached",
            transactional_id=row.transactional_id,
            next_step="the row was edited: restore it before anything is settled",
        )
    _check_cluster(row.cluster_id, cluster_id, row.transactional_id)


def _check_cluster(named: str, cluster_id: str | None, transactional_id: str) -> None:
    if cluster_id is not None and named not in {cluster_id, ""}:
        raise other_cluster(named, cluster_id, transactional_id)


def check_guard(
    found: tuple[int, str, str] | None, transactional_id: str, owner: str, incarnation: int, cluster_id: str | None
) -> None:
    """Check that the guard of a claim, as found with its incarnation, owner and cluster, is still ours, and of this cluster.

    ``incarnation`` is that of our newest known claim.

    A higher incarnation alone does not show another owner: if the answer to a COMMIT was lost, it may be a claim of our own
    that we do not know of. Every claim writes its owner, so the name shows which owner claimed last.
    """
    if found is None:
        raise Fenced("the row is gone", transactional_id=transactional_id)
    shown, holder, cluster = found
    if holder != owner:
        raise Fenced(
            f"the row names incarnation {shown} of {holder!r}, our newest is {incarnation}",
            transactional_id=transactional_id,
        )
    if shown < incarnation:
        raise gone_back(f"the row names our incarnation {shown}, although {incarnation} was claimed", transactional_id)
    # A lane that is new has no row to tell: the address may lead elsewhere since the writer was opened.
    _check_cluster(cluster, cluster_id, transactional_id)


def digest(state: PreparedTxnState) -> str:
    """The transaction's key: equal for equal states. It leaves out what is not part of a state's identity."""
    exact = replace(state, incarnation=None, first_offsets=(), further=()) if state.is_native else state
    return hashlib.sha256(str(replace(exact, started_ms=None)).encode()).hexdigest()


def in_chunks(items: Iterable[Item]) -> Iterator[Sequence[Item]]:
    """Split the items into chunks whose bound values fit into one statement of any database."""
    rest = list(items)
    for start in range(0, len(rest), _CHUNK):
        yield rest[start : start + _CHUNK]


def columns_at(table: FromClause, revision: str) -> Sequence[ColumnElement[Any]]:
    """The columns that the table, or the view, has in tables of that revision."""
    return [column for column in table.c if column.info.get(SINCE, "") <= revision]


def parse_rows(table: str, rows: Sequence[NamedValues]) -> Sequence[StateRow]:
    """Parse the rows, fetched before: a cursor that a bad row leaves half read would keep SQLite's lock."""
    # Sorted here: databases order texts by their collation.
    return sorted((parse_state_row(table, row) for row in rows), key=lambda row: row.transactional_id)


def row_columns(tables: Tables) -> Sequence[Column[Any]]:
    """The columns of a row that :func:`parse_state_row` takes, all of which tables of the version before have, too."""
    return [column for column in tables.state.c if column.name != "outbox_decisions" and SINCE not in column.info]


def read_rows(
    tables: Tables, ids: Sequence[str], connection: Connection, *, locked: bool = False
) -> Sequence[StateRow]:
    """The rows of these sorted ids, in order of id, optionally locked one after the other. Missing ones are left out."""
    statement = _reading(tables, locked=locked)
    return [
        row
        for chunk in in_chunks(ids)
        for row in parse_rows(tables.state.fullname, connection.execute(statement, {"ids_": chunk}).mappings().all())
    ]


@lru_cache(maxsize=64)
def _reading(tables: Tables, *, locked: bool) -> Select[Any]:
    name = tables.state.c.transactional_id
    statement = select(*row_columns(tables)).where(name.in_(bindparam("ids_", expanding=True))).order_by(name)
    return statement.with_for_update() if locked else statement


# Types of columns that mean the same in every database: texts that are compared byte by byte.
#
# MariaDB and MySQL compare texts by a collation that ignores case, accents and spaces at the end, unless the column
# says otherwise; and what PostgreSQL calls `text` holds 64 KiB there.

MYSQL: Final = frozenset({"mysql", "mariadb"})
"""SQLAlchemy's names for MariaDB and MySQL: which of the two a ``mysql`` URL leads to shows when it connects."""
TABLE_OPTIONS: Final[Mapping[str, Any]] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}


def exact_collation(dialect: Dialect) -> str:
    """The collation that compares code points and pads nothing: its name differs between MariaDB and MySQL."""
    return "utf8mb4_nopad_bin" if cast("MySQLDialect", dialect).is_mariadb else "utf8mb4_0900_bin"


class ExactString(TypeDecorator[str]):
    """A text of that many characters at most."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """With its collation, where the database would choose one that takes different texts for equal."""
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import VARCHAR  # noqa: PLC0415 - large, and only for those that use it

        length = cast("String", self.impl_instance).length
        return dialect.type_descriptor(VARCHAR(length, charset="utf8mb4", collation=exact_collation(dialect)))


class ExactText(TypeDecorator[str]):
    """A text of any length."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import LONGTEXT  # noqa: PLC0415 - as above

        return dialect.type_descriptor(LONGTEXT(charset="utf8mb4", collation=exact_collation(dialect)))


class ExactBytes(TypeDecorator[bytes]):
    """Bytes, of any length."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import LONGBLOB  # noqa: PLC0415 - as above

        return dialect.type_descriptor(LONGBLOB())


GrowingNumber: Final = BigInteger().with_variant(Integer(), "sqlite")
"""A number that the database counts up: 64 bits. SQLite does so for a column of this type alone."""


# The database's clock: leases and timestamps never depend on the clocks of client machines.


class UtcDateTime(TypeDecorator[datetime]):
    """A timestamp with a time zone, always UTC in Python, even if the database stores no zone (SQLite, MariaDB)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """With microseconds, which MariaDB and MySQL cut off unless the column says otherwise."""
        if dialect.name not in MYSQL:
            return dialect.type_descriptor(self.impl_instance)
        from sqlalchemy.dialects.mysql import DATETIME  # noqa: PLC0415 - large, and only for those that use it

        return dialect.type_descriptor(DATETIME(fsp=6))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class row_made(FunctionElement[datetime]):  # noqa: N801 - used as a function
    """The default of a column: the database's time when the row is made, in UTC where the column holds no zone."""

    type = UtcDateTime()
    inherit_cache = True
    name = "row_made"


@compiles(row_made)
def _made(element: row_made, compiler: SQLCompiler, **options: object) -> str:
    del element
    return compiler.process(func.now(), **options)


@compiles(row_made, "mysql")
@compiles(row_made, "mariadb")
def _made_on_mysql(element: row_made, compiler: SQLCompiler, **options: object) -> str:
    del element, compiler, options
    return "(utc_timestamp(6))"


class _Moment(FunctionElement[datetime]):
    """The database's time when the statement runs, not when its transaction began, plus some seconds."""

    type = UtcDateTime()
    inherit_cache = True
    name = "database_moment"


def database_now() -> ColumnElement[datetime]:
    """The database's time when the statement runs."""
    return _Moment()


def database_now_plus(seconds: ColumnElement[float] | float) -> ColumnElement[datetime]:
    """The database's time when the statement runs, plus ``seconds``."""
    return _Moment(literal(seconds) if isinstance(seconds, (int, float)) else seconds)


@compiles(_Moment, "postgresql")
def _on_postgresql(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # CAST: the driver may send the bare placeholder without a type.
    return f"(clock_timestamp() + make_interval(secs => CAST({offset} AS float8)))" if offset else "clock_timestamp()"


@compiles(_Moment, "sqlite")
def _on_sqlite(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # Six fractional digits, as SQLAlchemy writes and reads them: texts in one format compare as times.
    modifier = f", {offset} || ' seconds'" if offset else ""
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now'{modifier})"


@compiles(_Moment, "mysql")
@compiles(_Moment, "mariadb")
def _on_mysql(element: _Moment, compiler: SQLCompiler, **options: object) -> str:
    offset = compiler.process(element.clauses, **options)
    # The time zone of the session does not matter to it, unlike to now().
    now = "utc_timestamp(6)"
    return f"timestampadd(MICROSECOND, CAST(({offset}) * 1000000 AS SIGNED), {now})" if offset else now
