"""What this library requires of a database: tables, grants, and the settings of PostgreSQL, MariaDB and MySQL.

Each rule judges facts; :mod:`dualwrite.stores.sql.operators` gathers them. Some are judged at start-up and in dual writes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from dualwrite.errors import DualWriteError
from dualwrite.protocol.findings import (
    DATABASE,
    Check,
    CheckResult,
    Unasked,
    date_style,
    fsync,
    listed,
    postgresql_version,
    read_only,
    standby,
    unlogged,
)


@dataclass(frozen=True)
class GrantFacts:
    """Rights on tables for one purpose.

    Attributes:
        purpose: What they are for.
        is_required: Whether every writer needs them.
        missing: By table, those that the role lacks.
        has_some: Whether the role has any of them.
        remedy: The statements that grant all of them.
    """

    purpose: str
    is_required: bool
    missing: Mapping[str, Sequence[str]]
    has_some: bool
    remedy: str


def database_is_away(error: DualWriteError) -> CheckResult:
    """The database does not answer, or refuses us."""
    return Check(DATABASE, "connection", "the database's commit is the decision of each dual write").refused(error)


def grants(facts: GrantFacts) -> CheckResult:
    """Whether the role may do what one purpose needs. Having none of its rights is fine, unless all writers need them."""
    check = Check(
        DATABASE, f"grants for {facts.purpose}", "a statement without its right fails, and its dual write aborts"
    )
    lacking = [f"{', '.join(rights)} on {table}" for table, rights in facts.missing.items()]
    if not lacking:
        return check.ok("all granted")
    if facts.is_required:
        return check.error(f"missing: {listed(lacking)}", facts.remedy)
    if facts.has_some:
        return check.warning(f"in part; missing: {listed(lacking)}", facts.remedy)
    return check.ok("not granted, and not needed otherwise")


# PostgreSQL.

_OLD_S: Final = 300.0
"""From this age on, what is open in the database is taken for forgotten."""
_MANY_VERSIONS: Final = 1000
"""A look-up that reads past a thousand takes about thirty pages. Without an old snapshot there are never more than a few."""


_MANY_DEAD: Final = 100_000
_DEAD_TO_LIVING: Final = 5


@dataclass(frozen=True)
class PoolerFacts:
    """What shows of a pooler between us and the database.

    Attributes:
        is_between: Whether the server's process is another one than that which the connection was told.
        shares: Whether two connections were served by one process of the server, in turns.
        prepares: Whether the engine's driver prepares statements under names.
    """

    is_between: bool
    shares: bool
    prepares: bool


@dataclass(frozen=True)
class PostgresFacts:
    """What was seen of a PostgreSQL server.

    Attributes:
        version: Its version.
        is_standby: Whether it is in recovery.
        settings: The values of settings, as the session has them.
        pooler: What shows of a pooler.
        prepared: Prepared transactions of this database: their names and ages in seconds.
        idle: Sessions of this database that are idle in a transaction: who, and for how many seconds.
        unlogged: Tables of this library that the server empties after a crash.
        outbox: The dead and the living rows of the table of waiting messages, as the statistics count them, and its bytes;
            None if it is not there.
    """

    version: Sequence[int]
    is_standby: bool
    settings: Mapping[str, str]
    pooler: PoolerFacts | Unasked
    prepared: Sequence[tuple[str, float]] = ()
    idle: Sequence[tuple[str, float]] = ()
    unlogged: Sequence[str] = ()
    outbox: tuple[int, int, int] | None = None


def judge_postgresql(facts: PostgresFacts) -> Iterator[CheckResult]:
    """All findings about a PostgreSQL server that answers."""
    settings = facts.settings
    yield postgresql_version(facts.version)
    yield standby(is_standby=facts.is_standby)
    if not facts.is_standby:
        yield read_only(settings.get("default_transaction_read_only", "off"))
    yield date_style(settings.get("DateStyle", "ISO"))
    yield fsync(settings.get("fsync", "on"))
    yield full_page_writes(settings.get("full_page_writes", "on"))
    yield synchronous_commit(
        settings.get("synchronous_commit", "on"),
        settings.get("synchronous_standby_names", ""),
        is_standby=facts.is_standby,
    )
    yield prepared_transactions(facts.prepared, settings.get("max_prepared_transactions", "0"))
    yield idle_in_transaction(facts.idle)
    yield pooler(facts.pooler)
    for table in facts.unlogged:
        yield unlogged(table)
    if facts.outbox is not None:
        yield bloat(*facts.outbox)


def full_page_writes(value: str) -> CheckResult:
    """Whether the server can repair a page of which a crash has written a part."""
    check = Check(
        DATABASE,
        "full_page_writes",
        "a page that a crash has torn cannot be repaired, unless the file system writes whole ones",
    )
    if value == "off":
        return check.warning("full_page_writes=off", "set full_page_writes=on in postgresql.conf, and reload it")
    return check.ok(f"full_page_writes={value}")


def synchronous_commit(value: str, standby_names: str, *, is_standby: bool = False) -> CheckResult:
    """Whether COMMIT waits for the standbys that a failover may take; for the disk the library makes it wait itself."""
    check = Check(
        DATABASE,
        "synchronous_commit",
        "a failover to a standby that has not got a commit loses it, and its messages stay",
    )
    if standby_names and value == "local" and not is_standby:
        return check.warning(
            "synchronous_commit=local, although there are synchronous standbys",
            "set synchronous_commit=on for the role, or remote_apply",
        )
    if value == "off":
        return check.ok("synchronous_commit=off: the library switches it on in each transaction that decides")
    replicas = "synchronous standbys: " + standby_names if standby_names else "no synchronous standbys"
    return check.ok(f"synchronous_commit={value}, {replicas}")


def prepared_transactions(prepared: Sequence[tuple[str, float]], most: str) -> CheckResult:
    """Prepared transactions that nobody ends hold their locks, and keep old versions of rows, across restarts."""
    check = Check(
        DATABASE,
        "prepared transactions",
        "one that nobody ends holds its locks, and keeps old rows, even after a restart",
    )
    old = [f"{name!r} for {age_s:.0f} s" for name, age_s in prepared if age_s >= _OLD_S]
    if old:
        return check.warning(
            f"{len(old)} are left: {listed(old)}",
            "run `dualwrite recover` if a Spark sink with prepared transactions has made them; else find out what their "
            "program has decided, and execute COMMIT PREPARED or ROLLBACK PREPARED",
        )
    if int(most) == 0:
        return check.ok(
            "max_prepared_transactions=0: the server takes none, and Spark's prepared mode is not to be had"
        )
    if len(prepared) >= int(most):
        return check.warning(
            f"{len(prepared)} of at most {most}: the server refuses the next one, and Spark's task that needs it fails",
            "set max_prepared_transactions above the tasks of all sinks that write at a time, then restart the server",
        )
    return check.ok(f"{len(prepared)} of at most {most}; only Spark's prepared mode makes any here")


def idle_in_transaction(idle: Sequence[tuple[str, float]]) -> CheckResult:
    """Sessions that keep a transaction open and do nothing keep old versions of rows, which each dual write reads past."""
    check = Check(
        DATABASE,
        "idle in transaction",
        "each dual write reads past the old versions of its row that an open transaction keeps",
    )
    old = [f"{who} for {age_s:.0f} s" for who, age_s in idle if age_s >= _OLD_S]
    if old:
        return check.warning(
            f"{len(old)} sessions: {listed(old)}",
            "end them with pg_terminate_backend, and set idle_in_transaction_session_timeout for their role",
        )
    return check.ok(f"no session that this role may see for longer than {_OLD_S:.0f} s")


def pooler(facts: PoolerFacts | Unasked) -> CheckResult:
    """A pooler by transaction takes the connection between transactions; a named statement stays with the one it leaves."""
    check = Check(
        DATABASE,
        "pooler",
        "a pooler may change the server's session between two transactions, and named statements stay behind",
    )
    if isinstance(facts, Unasked):
        return check.unknown(facts)
    if not facts.is_between:
        return check.ok("none is seen")
    if not facts.shares:
        return check.ok("one that keeps the session, as far as it shows (pool_mode=session)")
    if facts.prepares:
        return check.warning(
            "one that shares sessions by transaction, and the driver prepares statements under names",
            "give the engine connect_args={'prepare_threshold': None}, or let PgBouncer (1.21 or newer) follow them with "
            "max_prepared_statements",
        )
    return check.ok("one that shares sessions by transaction; the driver prepares no statements under names")


def old_versions(table: str, kept: int, oldest: Callable[[], str]) -> CheckResult:
    """Old versions of rows that cannot be removed: each look-up reads past all of them.

    ``oldest`` says whose snapshot is the oldest. It is asked only if there are many.
    """
    check = Check(DATABASE, f"old versions in {table}", "each dual write reads past those of its row")
    if kept < _MANY_VERSIONS:
        return check.ok(f"{kept}")
    return check.warning(
        f"{kept:,} old versions of rows in {table} are kept for a long transaction, a replication slot or a prepared "
        "transaction",
        f"{oldest()}; end it, and vacuum the table if they stay",
    )


def bloat(dead: int, living: int, size: int) -> CheckResult:
    """Whether the table of waiting messages is vacuumed as fast as its rows are sent and deleted."""
    check = Check(
        DATABASE, "dead rows of the outbox", "whoever sends waiting messages reads past the dead rows before them"
    )
    found = f"{dead:,} dead and {living:,} living rows, {size / 1e6:,.1f} MB"
    if dead >= _MANY_DEAD and dead > _DEAD_TO_LIVING * living:
        return check.warning(
            found,
            "VACUUM dualwrite_outbox; if they stay, find the old transaction; if they come back, ALTER TABLE dualwrite_outbox "
            "SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)",
        )
    return check.ok(found)


# MariaDB and MySQL.

_OLDEST_MARIADB: Final = {True: ("MariaDB", (10, 6)), False: ("MySQL", (8, 0, 17))}  # SKIP LOCKED; utf8mb4_0900_bin
_OFF: Final = frozenset({"0", "OFF", "off"})
_STRICT: Final = frozenset({"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"})


@dataclass(frozen=True)
class MariadbFacts:
    """What was seen of a server of MariaDB or MySQL: its version, and the values of its variables as it shows them.

    ``durability`` holds ``read_only``, ``innodb_flush_log_at_trx_commit``, ``log_bin`` and ``sync_binlog``, in this order;
    ``open_ones`` the open transactions of others, by their sessions, and for how many seconds.
    """

    is_mariadb: bool
    version: Sequence[int]
    durability: tuple[str, str, str, str]
    doublewrite: str
    charset: str
    sql_mode: str
    other_engines: Mapping[str, str] = field(default_factory=dict)
    is_replica: bool = False
    prepared: Sequence[str] | Unasked = ()
    open_ones: Sequence[tuple[str, float]] | Unasked = ()


def judge_mariadb(facts: MariadbFacts) -> Iterator[CheckResult]:
    """All findings about a server of MariaDB or MySQL that answers."""
    yield mariadb_version(facts.version, is_mariadb=facts.is_mariadb)
    yield from mariadb_durability(*facts.durability)
    yield replica(is_replica=facts.is_replica)
    yield charset(facts.charset)
    yield strict_mode(facts.sql_mode, is_mariadb=facts.is_mariadb)
    yield doublewrite(facts.doublewrite, is_mariadb=facts.is_mariadb)
    for table, engine in facts.other_engines.items():
        yield other_engine(table, engine)
    yield prepared_xa(facts.prepared)
    yield open_transactions(facts.open_ones)


def _product(*, is_mariadb: bool) -> str:
    return _OLDEST_MARIADB[is_mariadb][0]


def mariadb_version(version: Sequence[int], *, is_mariadb: bool) -> CheckResult:
    """The oldest server that has what the library's statements use."""
    product, oldest = _OLDEST_MARIADB[is_mariadb]
    shown, needed = ".".join(map(str, version)), ".".join(map(str, oldest))
    check = Check(DATABASE, "version", f"leases and exact names use what came with {product} {needed}")
    if tuple(version) < oldest:
        return check.error(f"{product} {shown} is too old", f"use {product} {needed} or newer")
    return check.ok(f"{product} {shown}")


@lru_cache(maxsize=64)
def mariadb_durability(writes: str, flush: str, logs: str, sync: str) -> tuple[CheckResult, ...]:
    """Whether the server takes writes, and keeps in a crash what it has committed. Cached: each dual write asks it."""
    check = Check(DATABASE, "read-only", "it is a replica, or is being maintained")
    found = [
        check.ok("the server may be written to")
        if writes in _OFF
        else check.error("the server is read-only", "connect to the primary")
    ]
    name = "innodb_flush_log_at_trx_commit"
    check = Check(DATABASE, name, "committed data may be lost when the server's machine crashes")
    found.append(
        check.ok(f"{name} is {flush}")
        if flush in {"1", "3"}
        else check.error(f"{name} is {flush}", f"SET GLOBAL {name} = 1, and the same in the server's configuration")
    )
    check = Check(DATABASE, "sync_binlog", "after a crash the server rolls back what the log has lost")
    if logs in _OFF:
        found.append(check.ok("the binary log is off"))
    elif sync == "1":
        found.append(check.ok("the binary log is on, and sync_binlog is 1"))
    else:
        found.append(
            check.error(
                f"the binary log is on, and sync_binlog is {sync}",
                "SET GLOBAL sync_binlog = 1, and the same in the server's configuration",
            )
        )
    return tuple(found)


def replica(*, is_replica: bool) -> CheckResult:
    """A replica that may be written to."""
    check = Check(DATABASE, "primary", "its primary knows nothing of what is decided here")
    if is_replica:
        return check.error("the server is a replica, although it may be written to", "connect to the primary")
    return check.ok("the server is no replica, as far as this user may see")


def charset(value: str) -> CheckResult:
    """The connection's character set."""
    check = Check(DATABASE, "character set", "only utf8mb4 can carry every transactional id")
    if value != "utf8mb4":
        return check.error(
            f"the connection's character set is {value}", "remove charset= from the URL, or write charset=utf8mb4"
        )
    return check.ok(value)


def strict_mode(sql_mode: str, *, is_mariadb: bool) -> CheckResult:
    """Whether the server refuses values that do not fit."""
    check = Check(
        DATABASE,
        "sql_mode",
        f"{_product(is_mariadb=is_mariadb)} shortens or changes values that do not fit your columns, and commits such rows "
        "with their messages",
    )
    if _STRICT.isdisjoint(sql_mode.split(",")):
        return check.warning("sql_mode is not strict", "add STRICT_TRANS_TABLES to it")
    return check.ok("strict")


def doublewrite(value: str, *, is_mariadb: bool) -> CheckResult:
    """Whether the server can repair a page of which a crash has written a part."""
    check = Check(
        DATABASE,
        "innodb_doublewrite",
        "unless its file system writes pages atomically, committed data may be lost when its machine crashes",
    )
    if value in _OFF:
        return check.warning(
            f"{_product(is_mariadb=is_mariadb)} runs with innodb_doublewrite=OFF",
            "set innodb_doublewrite=ON, and restart it",
        )
    return check.ok(f"innodb_doublewrite={value}")


def other_engine(table: str, engine: str) -> CheckResult:
    """A table of this library that is not InnoDB's."""
    check = Check(DATABASE, f"engine of {table}", "which has no transactions")
    return check.error(f"the table {table} is in the engine {engine}", f"ALTER TABLE {table} ENGINE=InnoDB")


def prepared_xa(names: Sequence[str] | Unasked) -> CheckResult:
    """Prepared XA transactions. The server does not tell their age."""
    check = Check(
        DATABASE,
        "prepared transactions",
        "one that nobody ends holds its locks, and keeps old rows, even after a restart",
    )
    if isinstance(names, Unasked):
        return check.unknown(names)
    if names:
        return check.warning(
            f"{len(names)} are prepared: {listed(names)}",
            "this library makes none: find out what their program has decided, and execute XA COMMIT or XA ROLLBACK",
        )
    return check.ok("none")


def open_transactions(open_ones: Sequence[tuple[str, float]] | Unasked) -> CheckResult:
    """Transactions that stay open keep the undo log from being purged."""
    check = Check(
        DATABASE, "open transactions", "one that stays open keeps the old versions of all rows, and may hold locks"
    )
    if isinstance(open_ones, Unasked):
        return check.unknown(open_ones)
    old = [f"{who} for {age_s:.0f} s" for who, age_s in open_ones if age_s >= _OLD_S]
    if old:
        return check.warning(
            f"{len(old)} sessions: {listed(old)}", "end them with KILL, and find what leaves them open"
        )
    return check.ok(f"none is older than {_OLD_S:.0f} s")
