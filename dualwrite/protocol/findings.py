"""Findings: what a check has seen, why it matters, and how to fix it; and the rules that every writer applies.

A rule takes what was seen, and says whether that is good enough, why it matters, and how to fix it. Start-up and ``dualwrite
doctor`` apply the same rules. Here are those of start-up, and of clocks, clients and the process; those that only the doctor
applies are in the chapters on Kafka and on databases:

=========  =======================================================================================================
status     meaning
=========  =======================================================================================================
error      a writer refuses to open, or its dual writes fail
warning    dual writes work; the guarantee, or how long they are available, is weaker than it could be
unknown    the fact could not be asked for, mostly for want of a right
ok         nothing is to be done
=========  =======================================================================================================

Whoever gathers facts gives :class:`Unasked` in the place of one that it could not ask for: silence is never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.protocol.values import NEVER_MS, TableFit, table_fit


class Status(Enum):
    """How a check has ended."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        area: What was looked at: ``Kafka``, ``database``, ``clocks``, ``clients`` or ``process``.
        check: The name of the check.
        status: How it has ended.
        found: What was seen; for a check that could not be made, the reason.
        why: Why it matters, in one sentence.
        remedy: What to do; empty if nothing is to be done.
    """

    area: str
    check: str
    status: Status
    found: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}: {self.why}"

    def as_error(self) -> ConfigurationError:
        """The error with which start-up refuses the same."""
        error = ConfigurationError(str(self), next_step=self.remedy)
        error.may_pass = (self.area, self.check) in _MAY_PASS
        return error


@dataclass(frozen=True)
class Unasked:
    """In the place of a fact that could not be asked for: the reason, and what would let it be asked for.

    ``is_forbidden`` if the reason is a missing right.
    """

    reason: str
    remedy: str = ""
    is_forbidden: bool = False


class Check:
    """Makes the findings of one check."""

    def __init__(self, area: str, name: str, why: str) -> None:
        self._area, self._name, self._why = area, name, why

    def ok(self, found: str) -> CheckResult:
        """Nothing is to be done."""
        return CheckResult(self._area, self._name, Status.OK, found, self._why)

    def warning(self, found: str, remedy: str) -> CheckResult:
        """It works, with a weaker guarantee."""
        return CheckResult(self._area, self._name, Status.WARNING, found, self._why, remedy)

    def error(self, found: str, remedy: str) -> CheckResult:
        """It does not work, or a writer refuses it."""
        return CheckResult(self._area, self._name, Status.ERROR, found, self._why, remedy)

    def refused(self, error: DualWriteError) -> CheckResult:
        """An error of this library's says what is wrong."""
        return self.error(error.what, error.next_step)

    def unknown(self, fact: Unasked) -> CheckResult:
        """It could not be asked for."""
        return CheckResult(self._area, self._name, Status.UNKNOWN, fact.reason, self._why, fact.remedy)


def listed(names: Collection[object], most: int = 5) -> str:
    """Names for people: the first few, and how many more there are."""
    shown = [str(name) for name in names]
    more = f", and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


# Clocks, clients, and the process itself.

CLOCKS: Final = "clocks"
CLIENTS: Final = "clients"
PROCESS: Final = "process"
_APART_S: Final = 5.0
_REFUSED_AHEAD_S: Final = 3600.0
"""By default brokers refuse messages whose timestamps are further ahead (``message.timestamp.after.max.ms``)."""
_DELETED_BEHIND_S: Final = 86_400.0
"""Few topics keep messages for less."""
_BOUND: Final = re.compile(r"(>=|<)\s*([0-9.]+)")
_FEW_FREE: Final = 0.2


def clock(whose: str, ahead_s: float | Unasked, within_s: float = 0.0, *, of_brokers: bool = False) -> CheckResult:
    """Whether this machine's clock agrees with a server's.

    Args:
        whose: The server, in words.
        ahead_s: How far this machine's clock is ahead of it; negative if it is behind.
        within_s: How exactly that is known.
        of_brokers: Whether it is Kafka's.
    """
    check = Check(
        CLOCKS,
        whose,
        "messages carry the time of this machine, by which Kafka keeps or deletes them; people who read logs compare clocks",
    )
    if isinstance(ahead_s, Unasked):
        return check.unknown(ahead_s)
    apart_s = max(0.0, abs(ahead_s) - within_s)
    found = f"this machine is {abs(ahead_s):.1f} s {'ahead of' if ahead_s >= 0 else 'behind'} {whose}"
    remedy = "synchronise the clocks of all machines (chrony, NTP)"
    if of_brokers and ahead_s - within_s > _REFUSED_AHEAD_S:
        return check.error(f"{found}: brokers refuse messages from so far in the future", remedy)
    if of_brokers and -ahead_s - within_s > _DELETED_BEHIND_S:
        return check.error(
            f"{found}: the retention of topics deletes committed messages that look so old at once", remedy
        )
    if apart_s > _APART_S:
        return check.warning(found, remedy)
    return check.ok(found)


def client(name: str, version: str | None, required: str) -> CheckResult:
    """Whether an installed client is in the range that this library is tested with, such as ``>=2.16,<2.17``."""
    check = Check(CLIENTS, name, "the library relies on how these releases behave, and is tested with them")
    if version is None:
        return check.error("not installed", f"pip install '{name}{required}'")
    found = f"{version} ({required})" if required else version
    for operator, bound in _BOUND.findall(required):
        if operator == ">=" and numbers_of(version) < numbers_of(bound):
            return check.error(f"{version} is too old: {required}", f"pip install '{name}{required}'")
        if operator == "<" and numbers_of(version) >= numbers_of(bound):
            return check.warning(
                f"{version} is newer than what is tested: {required}", f"pip install '{name}{required}'"
            )
    return check.ok(found)


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, without zeros at the end: 2.16 and 2.16.0 are the same."""
    found = [int(number) for number in re.match(r"[0-9.]*", version)[0].split(".") if number]  # type: ignore[index]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def librdkafka(version: str, confluent: str) -> CheckResult:
    """confluent-kafka should run on the librdkafka that it was released with."""
    check = Check(
        CLIENTS, "librdkafka", "one rule rests on the words of librdkafka's log, which may change between releases"
    )
    if numbers_of(version)[:2] != numbers_of(confluent)[:2]:
        return check.warning(
            f"{version}, under confluent-kafka {confluent}",
            "install confluent-kafka's own wheel, which brings the librdkafka that it is tested with",
        )
    return check.ok(version)


def forked(*, was_forked: bool, inherited: int) -> CheckResult:
    """Writers and connections that were opened before a fork belong to the parent.

    Args:
        was_forked: Whether this process was forked after it had loaded the library.
        inherited: How many open connections to Kafka came through the fork.
    """
    check = Check(
        PROCESS,
        "fork",
        "a writer that was opened before a fork (gunicorn's --preload, multiprocessing) fails in the child",
    )
    if inherited:
        return check.error(
            f"writers or coordinators were opened before this process was forked ({inherited} sets of connections to Kafka)",
            "open writers after the fork: in gunicorn's post_fork, in uWSGI's postfork, or on first use",
        )
    if was_forked:
        return check.ok("this process was forked after it had loaded the library, and before it opened a writer")
    return check.ok("this process has loaded the library itself")


def descriptors(used: int | Unasked, limit: int | None) -> CheckResult:
    """Whether enough file descriptors are left: each lane holds a connection to several brokers and one to the database."""
    check = Check(PROCESS, "file descriptors", "each lane of a writer holds connections to brokers and to the database")
    if isinstance(used, Unasked):
        return check.unknown(used)
    if limit is None:
        return check.ok(f"{used} used, no limit")
    if limit - used < limit * _FEW_FREE:
        return check.warning(
            f"{used} of {limit} used", "raise the limit (ulimit -n, LimitNOFILE=), or find what is not closed"
        )
    return check.ok(f"{used} of {limit} used")


def worst(findings: Collection[CheckResult]) -> Status:
    """The worst status among findings; ``OK`` of none."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


# The rules that start-up and dual writes apply: of the database, and of the brokers' time limit.

DATABASE: Final = "database"
_MAY_PASS: Final = frozenset({(DATABASE, "primary"), (DATABASE, "read-only")})
"""What is found during a failover, until the standby is promoted."""
_OLDEST_POSTGRESQL: Final = (13,)
KAFKA: Final = "Kafka"
TIME_LIMIT: Final = "transaction.max.timeout.ms"
TRANSACTION_STATE: Final = "__transaction_state"
"""Kafka's own topic of transactional ids."""
PROBES: Final = "dualwrite-probe."
"""How the ids begin that are described as evidence that a list of ids is complete. No transaction uses them."""


def refuse(*findings: CheckResult) -> None:
    """Raise the first that is an error, as start-up and each dual write do."""
    for finding in findings:
        if finding.status is Status.ERROR:
            raise finding.as_error()


def tables_fit(found: str | None, own: str, *, where: str, migrate: str, go_back: str) -> CheckResult:
    """Whether this library may work with the tables.

    Args:
        found: Their version; None if they are not there.
        own: The version that this library was made for.
        where: The database or schema, in words.
        migrate: How to make or upgrade them.
        go_back: The command with which a newer library brings them back.
    """
    if found is None:
        why = "every dual write records its decision in them"
        return Check(DATABASE, "tables", why).error(f"dualwrite's tables are not in {where}", migrate)
    check = Check(
        DATABASE,
        "tables",
        "a writer works with tables of its own version, of the one before, and of the one after if that only adds",
    )
    fit = table_fit(found, own)
    shown = f"dualwrite's tables in {where} are of version {found}"
    if fit is TableFit.SAME:
        return check.ok(f"version {found}")
    if fit is TableFit.NEWER:
        return check.ok(f"version {found}; this library was made for {own}, and works with them")
    if fit is TableFit.OLDER:
        return check.warning(f"{shown}; this library, of version {own}, works without what that adds", migrate)
    if fit is TableFit.TOO_OLD:
        return check.error(
            f"{shown}; they are older than this library, which needs {own}, or the version before", migrate
        )
    lacks = "they lack what it uses" if fit is TableFit.CONTRACTED else "it takes those of the next version at most"
    return check.error(
        f"{shown}; this library is older, it knows only {own}: {lacks}",
        f"install the library's newer version; or go back with the newer one: {go_back}",
    )


def postgresql_version(version: Sequence[int]) -> CheckResult:
    """The oldest server that has what the library's statements use."""
    shown = ".".join(map(str, version))
    check = Check(DATABASE, "version", "the statements that decide use what came with PostgreSQL 13")
    if tuple(version) < _OLDEST_POSTGRESQL:
        return check.error(f"PostgreSQL {shown} is too old", "use PostgreSQL 13 or newer")
    return check.ok(f"PostgreSQL {shown}")


def standby(*, is_standby: bool) -> CheckResult:
    """Only a primary can decide."""
    check = Check(DATABASE, "primary", "a standby cannot decide, and may show old data")
    if is_standby:
        return check.error("the database is a standby", "connect to the primary (target_session_attrs=read-write)")
    return check.ok("the database is a primary")


def read_only(value: str) -> CheckResult:
    """Whether transactions are read-only unless they say otherwise. ``value`` is ``on`` or ``off``."""
    check = Check(DATABASE, "read-only", "a decision is a write")
    if value == "on":
        return check.error(
            "the transaction is read-only",
            "connect to the primary, with a role whose default_transaction_read_only is off",
        )
    return check.ok("transactions may write")


def date_style(value: str) -> CheckResult:
    """Whether the session shows times in the style that psycopg can read. ``value`` is such as ``ISO, MDY``."""
    check = Check(DATABASE, "DateStyle", "psycopg reads times with a zone, such as those of leases, in ISO style alone")
    if not value.startswith("ISO"):
        return check.error(
            f"the session's DateStyle is {value!r}",
            "set DateStyle to ISO where it was changed: for the role, the database, the server, or in the connection's options",
        )
    return check.ok(value)


def fsync(value: str) -> CheckResult:
    """Whether the server forces its log to disk."""
    check = Check(
        DATABASE, "fsync", "committed data may be lost when its machine crashes, and then the messages have no rows"
    )
    if value == "off":
        return check.warning("PostgreSQL runs with fsync=off", "set fsync=on in postgresql.conf, and reload it")
    return check.ok(f"fsync={value}")


def unlogged(table: str) -> CheckResult:
    """A table that the server does not log."""
    check = Check(DATABASE, f"logging of {table}", "the server empties it after a crash, with what was committed in it")
    return check.error(f"the table {table} is unlogged", f"ALTER TABLE {table} SET LOGGED")


def time_limit(requested_ms: int | None, maximum_ms: int | None, chosen_ms: int, *, greatest_ms: int) -> CheckResult:
    """Whether the brokers, and not the user, limit how long a decided transaction may wait for its completion.

    ``maximum_ms`` is the brokers' setting, None if it cannot be read; ``greatest_ms`` the most that the client can ask for.
    """
    check = Check(
        KAFKA,
        TIME_LIMIT,
        f"if a decided transaction is not completed within {chosen_ms / 1000:.0f} s (owner dead, no recovery run), the "
        "broker aborts it and it is LOST",
    )
    if requested_ms is not None:
        return check.ok(f"the settings ask for {requested_ms} ms themselves")
    if chosen_ms >= greatest_ms:
        return check.ok(str(maximum_ms))
    remedy = f"set {TIME_LIMIT}={NEVER_MS} on the brokers"
    if maximum_ms is None:
        return check.warning(
            f"The brokers' {TIME_LIMIT} cannot be read, so their default of {chosen_ms} is assumed",
            f"{remedy}, and grant DescribeConfigs on the cluster",
        )
    return check.warning(f"The brokers' {TIME_LIMIT} is {maximum_ms}", remedy)
