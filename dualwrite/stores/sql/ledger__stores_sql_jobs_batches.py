"""The ledger batch by batch, from the view ``dualwrite_batch``: for people and charts. The protocol never reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, and_, exc, or_, select, tuple_

from dualwrite.protocol.batches__protocol_batches_at_work import nobody_since
from dualwrite.protocol.batches__protocol_batches_entry import Destination
from dualwrite.protocol.values__protocol_naming import may_own, pool_of_sink
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error
from dualwrite.stores.sql.ledger import BEGUN
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now
from dualwrite.stores.sql.tables__stores_sql_tables_rows import in_chunks


@dataclass(frozen=True)
class Batch:
    """One batch of one sink. All times are by the database's clock.

    Attributes:
        sink: Name of the sink.
        batch_id: Name of the batch.
        phase: ``writing``; ``decided``: all of it is committed in the database; ``completed``: Kafka has all of it, and
            the driver has recorded that; ``failed``: a part is missing, and the last run that ended failed. A batch
            that another process completed (``dualwrite recover``) stays ``decided``; one whose driver was killed stays
            ``writing``; see :func:`read_nobody_at_work`.
        partition_count: Number of partitions. A batch decided as a whole does not count those without rows, and shows 1
            until it is decided.
        written_partitions: Number of committed partitions.
        row_count: Committed rows.
        message_count: Messages in decided transactions.
        started_at: When its first task, or its driver, began; None if no table shows it.
        decided_at: When its last part was committed; None while a part is missing.
        completed_at: When the driver saw that Kafka has all of it; None if that was not recorded.
        decided_after_s: Seconds from its start until it was decided.
        completed_after_s: Seconds from its start until it was completed.
        failed_at: When its last run failed; None while a run is active, and once all of it is written.
    """

    sink: str
    batch_id: str
    phase: str
    partition_count: int
    written_partitions: int
    row_count: int
    message_count: int
    started_at: datetime | None
    decided_at: datetime | None
    completed_at: datetime | None
    decided_after_s: float | None
    completed_after_s: float | None
    failed_at: datetime | None


def read_batches(
    engine: Engine, *, sink: str | None = None, limit: int | None = None, schema: str | None = None
) -> Sequence[Batch]:
    """The newest batches, in the order in which they began.

    Args:
        engine: The database.
        sink: Only batches of this sink.
        limit: Only this many, the newest.
        schema: The database schema of the library's tables.

    Raises:
        ConfigurationError: The view, or the right to read it, is missing.
        Unavailable: The database does not answer.
    """
    view = declare_tables(schema).batch
    newest_first = [by for at in (view.c.started_at, view.c.decided_at) for by in (at.is_(None), at.desc())]
    statement = select(view).order_by(*newest_first, view.c.sink, view.c.batch_id).limit(limit)
    if sink is not None:
        statement = statement.where(view.c.sink == sink)
    try:
        with engine.connect() as connection:
            found = [Batch(**row) for row in connection.execute(statement).mappings()]
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error
    return found[::-1]


def batch_in_part(engine: Engine, sink: str, but: str, *, schema: str | None = None) -> str | None:
    """A batch of the sink that has some of its partitions written and others not; None if there is none.

    Args:
        engine: The database.
        sink: Name of the sink.
        but: The batch that does not count.
        schema: The database schema of the library's tables.

    Raises:
        ConfigurationError, Unavailable: As :func:`read_batches`.
    """
    view = declare_tables(schema).batch
    statement = select(view.c.batch_id).where(
        view.c.sink == sink,
        view.c.batch_id != but,
        view.c.written_partitions > 0,
        view.c.written_partitions < view.c.partition_count,
    )
    try:
        with engine.connect() as connection:
            return connection.execute(statement.limit(1)).scalar()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error


def newest_batch(engine: Engine, sink: str, topic: str, *, schema: str | None = None) -> str | None:
    """The batch whose messages are the newest that the sink has written to the topic; None if it has written none.

    Args:
        engine: The database.
        sink: Name of the sink.
        topic: The topic.
        schema: The database schema of the library's tables.

    Raises:
        ConfigurationError, Unavailable: As :func:`read_batches`.
    """
    part = declare_tables(schema).ledger
    begun = part.alias()
    of_batch = and_(begun.c.sink == part.c.sink, begun.c.batch_id == part.c.batch_id, begun.c.partition_id == BEGUN)
    # Older versions recorded no destination.
    to_topic = or_(
        begun.c.destination.is_(None), begun.c.destination.contains(Destination.text_of(topic), autoescape=True)
    )
    statement = (
        select(part.c.batch_id)
        .join_from(part, begun, of_batch, isouter=True)
        .where(part.c.sink == sink, part.c.message_count > 0, to_topic)
        .order_by(part.c.written_at.desc())
    )
    try:
        with engine.connect() as connection:
            return connection.execute(statement.limit(1)).scalar()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error


def read_nobody_at_work(
    engine: Engine, batches: Collection[Batch], *, schema: str | None = None
) -> Mapping[tuple[str, str], datetime]:
    """For batches being written that show no active worker: the time since when, by sink and batch id.

    Either their drivers were killed, or their tasks compute for long before they write, which the database cannot see.

    Args:
        engine: The database.
        batches: The result of :func:`read_batches`.
        schema: The database schema of the library's tables.

    Raises:
        ConfigurationError: A table, or the right to read it, is missing.
        Unavailable: The database does not answer.
    """
    tables = declare_tables(schema)
    ledger, run, slot = tables.ledger, tables.run, tables.slot
    names = [(batch.sink, batch.batch_id) for batch in batches if batch.phase == "writing"]
    changes: dict[tuple[str, str], list[datetime]] = defaultdict(list)
    leases: dict[str, list[tuple[str, datetime]]] = defaultdict(list)
    if not names:
        return {}
    try:
        with engine.connect() as connection:
            for some in in_chunks(names):
                for table, name, moment in (
                    (ledger, ledger.c.batch_id, ledger.c.written_at),
                    (run, run.c.name, run.c.begun_at),
                ):
                    statement = select(table.c.sink, name, moment).where(tuple_(table.c.sink, name).in_(some))
                    for sink, batch_id, changed_at in connection.execute(statement):
                        changes[sink, batch_id].append(changed_at)
            for pools in in_chunks({pool_of_sink(sink) for sink, _ in names}):
                held = select(slot.c.pool, slot.c.lease_owner, slot.c.lease_until).where(
                    slot.c.pool.in_(pools), slot.c.lease_owner.is_not(None)
                )
                for pool, owner, until in connection.execute(held):
                    leases[pool].append((owner, until))
            now: datetime = connection.execute(select(database_now())).scalar_one()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error
    found = {}
    for sink, batch_id in names:
        ends = [until for owner, until in leases[pool_of_sink(sink)] if may_own(owner, batch_id)]
        since = nobody_since(changes[sink, batch_id], ends, now)
        if since is not None:
            found[sink, batch_id] = since
    return found
