"""The verdict on the fleets of a round, besides the one on all writers.

Of PostgreSQL the database itself watches: it notes each lease that is taken from a member whose time is not over, and each
decision under an id whose lease is free. Another member has then settled the dead holder of that id, and given it back:
a process that still decides there has not been fenced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from harness.worker import DECISIONS
from sqlalchemy import Column, Engine, MetaData, Table, Text, func, select, text

from dualwrite.stores.sql.tables import declare_tables

_METADATA = MetaData()
_SEEN = Table("seen_by_the_database", _METADATA, Column("kind", Text), Column("subject", Text), Column("detail", Text))
_LEASE = declare_tables(None).lease.name
_WATCHING = (
    # The lease of a process that has died may be taken at once. The owner ends with the process id, and the server runs beside it.
    """
    CREATE OR REPLACE FUNCTION still_runs(owner text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        RETURN owner !~ '/[0-9]+$'
            OR coalesce(pg_read_file('/proc/' || substring(owner FROM '[0-9]+$') || '/stat', 0, 1000, true), ') Z') !~ '[)] [ZX]';
    EXCEPTION WHEN OTHERS THEN
        RETURN false;  -- it ended while it was read
    END $$""",
    f"""
    CREATE OR REPLACE FUNCTION watch_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.owner <> OLD.owner AND OLD.lease_until > clock_timestamp() AND still_runs(OLD.owner) THEN
            INSERT INTO {_SEEN.name} VALUES ('leased twice', OLD.transactional_id,
                NEW.owner || ' has taken it while the lease of ' || OLD.owner || ' went on');
        END IF;
        RETURN NULL;
    END $$""",
    f"CREATE OR REPLACE TRIGGER watched AFTER UPDATE ON {_LEASE} FOR EACH ROW EXECUTE FUNCTION watch_lease()",
    f"""
    CREATE OR REPLACE FUNCTION watch_decision() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NOT EXISTS (SELECT FROM {_LEASE} WHERE transactional_id = NEW.transactional_id AND owner IS NOT NULL) THEN
            INSERT INTO {_SEEN.name} VALUES ('not fenced', NEW.transactional_id,
                NEW.member || ' has decided ' || NEW.operation || ' after the id was given back');
        END IF;
        RETURN NULL;
    END $$""",
    # When the row is inserted, its owner may be about to be fenced; when it is committed, no more.
    f"DROP TRIGGER IF EXISTS watched ON {DECISIONS.name}",
    f"""CREATE CONSTRAINT TRIGGER watched AFTER INSERT ON {DECISIONS.name} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION watch_decision()""",
)


class Decision(NamedTuple):
    """An operation of a member that is in the database."""

    operation: str
    transactional_id: str
    incarnation: int
    member: str


def watch(engine: Engine) -> None:
    """Let the database watch leases and decisions, if it is PostgreSQL. The tables are there."""
    _METADATA.create_all(engine)
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            for statement in _WATCHING:
                connection.execute(text(statement))


def find(engine: Engine) -> list[dict[str, str]]:
    """Find out what is wrong with the fleets of this database."""
    with engine.connect() as connection:
        seen = [dict(row) for row in connection.execute(select(_SEEN)).mappings()]
        return [*seen, *shared(Decision(*row) for row in connection.execute(select(DECISIONS)))]


def decided(engine: Engine) -> int:
    """How many operations of members are in the database: of none, nothing could be wrong."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(DECISIONS))


def shared(decisions: Iterable[Decision]) -> list[dict[str, str]]:
    """The incarnations of an id under which more than one member has decided."""
    members: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for one in decisions:
        members[one.transactional_id, one.incarnation].add(one.member)
    return [
        {"kind": "shared", "subject": name, "detail": f"{sorted(who)} have decided under its incarnation {incarnation}"}
        for (name, incarnation), who in sorted(members.items())
        if len(who) > 1
    ]
