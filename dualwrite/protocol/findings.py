"""Findings: what a check has seen, why it matters, and how to mend it; and the rules for clocks, clients and the process.

A rule takes what was seen, and says whether that is good enough, why it matters, and how to mend it. Start-up and ``dualwrite
doctor`` apply the same rules, here and in the chapters on Kafka and on databases:

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
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualwrite.errors import ConfigurationError, DualWriteError


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
        return ConfigurationError(str(self), next_step=self.remedy)


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
        "the age of open transactions, by which `recover` leaves young ones alone, compares clocks, and so do people who read "
        "logs",
    )
    if isinstance(ahead_s, Unasked):
        return check.unknown(ahead_s)
    apart_s = max(0.0, abs(ahead_s) - within_s)
    found = f"this machine is {abs(ahead_s):.1f} s {'ahead of' if ahead_s >= 0 else 'behind'} {whose}"
    remedy = "synchronise the clocks of all machines (chrony, NTP)"
    if of_brokers and ahead_s - within_s > _REFUSED_AHEAD_S:
        return check.error(f"{found}: brokers refuse messages from so far in the future", remedy)
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
