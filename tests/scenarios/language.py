"""The language of the scenario files: one statement a line, read aloud as it stands. See README.md beside this file.

A file is parsed into statements. Each names a method of the :class:`Stage` that performs it, and its arguments. So a file
that can be parsed can be performed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from dualwrite.kafka.config import EngineName

_ACTOR: Final = r"(?P<actor>[A-Z])"
_LABELS: Final = r"(?P<labels>nothing|[a-z]\w*(?: [a-z]\w*)*)"
_REQUEST: Final = r"(?P<request>\w+)"
_HOW: Final = (
    r"(?:, up to (?:the (?P<nth>\d+)(?:st|nd|rd|th) )?(?P<point>[a-z_]+\.[a-z_]+)(?:, or fails with (?P<else_told>[A-Z]\w+))?"
    r"|, and (?P<waits>has to wait)"
    r"|: (?P<told>[A-Z]\w+(?: or [A-Z]\w+)*))?"
)

STATEMENTS: Final = {
    "opens": rf"{_ACTOR} opens(?: with (?P<lanes>\d+) lanes)?(?P<outbox> with an outbox)?{_HOW}",
    "writes": rf"{_ACTOR} writes (?P<label>[a-z]\w*)(?P<aborts> and changes its mind)?{_HOW}",
    "writes_badly": rf"{_ACTOR} writes (?P<label>[a-z]\w*) (?P<fault>with a statement that fails|with a message that is too large){_HOW}",
    "opens_units": rf"{_ACTOR} opens a writer of units{_HOW}",
    "writes_unit": rf"{_ACTOR} writes unit (?P<label>[a-z]\w*){_HOW}",
    "units_shown": rf"the reader of units shows: {_LABELS}",
    "unit_aborted": r"the last abort says: (?P<reason>.+)",
    "recovers": rf"{_ACTOR} recovers(?P<after_restore> after a restore)?{_HOW}",
    "closes": rf"{_ACTOR} closes{_HOW}",
    "goes_on": rf"{_ACTOR} goes on{_HOW}",
    "ends": rf"{_ACTOR} comes to an end{_HOW}",
    "others_go_on": rf"{_ACTOR}'s other threads go on",
    "has_to_wait": rf"{_ACTOR} has to wait",
    "asks_in_vain": rf"{_ACTOR} asks the database in vain",
    "is_killed": rf"{_ACTOR} is killed",
    "is_paused": rf"{_ACTOR} is paused",
    "wakes_up": rf"{_ACTOR} wakes up",
    "network": (
        rf"the network (?P<does>holds|loses|repeats|cuts off) (?P<answer>the answer to )?(?P<actor>[A-Z]|the broker)'s next {_REQUEST}"
    ),
    "is_held": rf"the network has the {_REQUEST}",
    "arrives": rf"the (?P<what>held|repeated|held answer to) {_REQUEST} arrives",
    "is_lost": rf"the (?P<what>held|held answer to) {_REQUEST} is lost",
    "connection_breaks": rf"the connection of the {_REQUEST} breaks",
    "falls_silent": r"Kafka falls silent",
    "answers_again": r"Kafka answers again",
    "broker_times_out": rf"the broker times {_ACTOR}'s transaction out",
    "broker_forgets": rf"the broker forgets {_ACTOR}'s id",
    "operator_aborts": rf"an operator aborts {_ACTOR}'s transaction",
    "operator_marks": rf"a tool writes abort markers over {_ACTOR}'s transaction",
    "records_deleted": r"the records in Kafka are deleted",
    "topic_made_anew": r"the topic is deleted and created again",
    "broker_is_killed": r"the broker is killed and started again",
    "database_is_killed": r"the database is killed and started again",
    "database_stops": r"the database is killed",
    "database_starts": r"the database is started again",
    "database_ends_session": rf"the database ends {_ACTOR}'s session",
    "database_backed_up": r"the database is backed up",
    "database_restored": r"the database is restored",
    "row_deleted": r"the row is deleted",
    "database_shows": rf"the database shows: {_LABELS}",
    "kafka_shows": rf"Kafka shows: {_LABELS}",
    "both_show": rf"both sides show: {_LABELS}",
    "kafka_comes_to_show": rf"Kafka comes to show: {_LABELS}",
    "kafka_shows_in_order": rf"Kafka shows in this order: {_LABELS}",
    "waits_in_database": rf"waiting in the database: {_LABELS}",
    "nothing_waits": r"nothing waits any more",
    "recorded": rf"recorded as (?P<outcome>lost|unverifiable): {_LABELS}",
}
_PATTERNS: Final = {verb: re.compile(pattern) for verb, pattern in STATEMENTS.items()}


class Stage(Protocol):
    """Performs scenarios. It has a method for each statement, named as in the language, with its parts as arguments."""

    def perform(self, statement: Statement) -> None:
        """Do it, or check it.

        Raises:
            AssertionError: The statement is not true.
        """
        ...


class ScenarioError(Exception):
    """The file says something that the language does not know."""


@dataclass(frozen=True)
class Statement:
    """One line of a scenario.

    Attributes:
        verb: Which statement it is.
        arguments: Its parts, by name; None where a part is not there.
        text: The line.
        line: Its number in the file.
    """

    verb: str
    arguments: dict[str, Any]
    text: str
    line: int


@dataclass(frozen=True)
class Scenario:
    """One file.

    Attributes:
        name: The file's name without its end.
        title: Its first line: what the scenario shows.
        head: The other lines of its head, by their first word: ``hazard``, ``natively``, ``given``.
        statements: What happens.
    """

    name: str
    title: str
    head: dict[str, str]
    statements: tuple[Statement, ...] = field(repr=False)

    @property
    def engines(self) -> tuple[EngineName, ...]:
        """The producer engines through which it is performed: both, unless the hazard is that of one alone."""
        return tuple(engine for engine in ENGINES if self.head.get("engine", engine) == engine)

    @property
    def given(self) -> frozenset[str]:
        """The things that it needs besides one broker and one database."""
        return frozenset(part.strip() for part in self.head.get("given", "").split(",") if part.strip())

    @property
    def failures(self) -> frozenset[int]:
        """The failures of the README's table that it shows."""
        return _numbers(self.head.get("failures", ""))

    @property
    def facts(self) -> frozenset[int]:
        """The facts of the README's table that it shows."""
        return _numbers(self.head.get("facts", ""))


HEAD: Final = {"hazard", "natively", "engine", "facts", "failures", "given"}
ENGINES: Final[tuple[EngineName, ...]] = ("librdkafka", "native")
GIVEN: Final = frozenset(
    {
        "a hasty broker",
        "a broker of its own",
        "a broker that reaches itself over the network",
        "a database server of its own",
        "a database that commits lazily",
        "eager retries",
        "short deadlines",
        "short sessions",
    }
)


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in re.findall(r"\d+", text))


def parse(name: str, text: str) -> Scenario:
    """Parse a scenario.

    Raises:
        ScenarioError: A line is not understood, or the head is not complete. It names the line.
    """
    title, head, statements = "", {}, []
    last = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#"):
            title, last = _read_head(name, number, line[1:].strip(), title, head, last)
        elif line:
            statements.append(_statement(name, number, line))
    scenario = Scenario(name, title, head, tuple(statements))
    _check(scenario)
    return scenario


def _read_head(name: str, number: int, line: str, title: str, head: dict[str, str], last: str) -> tuple[str, str]:
    if not title:
        return line, ""
    key, colon, rest = line.partition(":")
    if colon and key.lower() in HEAD:
        head[key.lower()] = rest.strip()
        return title, key.lower()
    if line and not last:
        raise ScenarioError(f"{name}.txt:{number}: the head has no {line!r}")
    if line:
        head[last] += f" {line}"
    return title, last


def _statement(name: str, number: int, line: str) -> Statement:
    for verb, pattern in _PATTERNS.items():
        match = pattern.fullmatch(line)
        if match:
            return Statement(verb, match.groupdict(), line, number)
    raise ScenarioError(f"{name}.txt:{number}: not a statement: {line!r}")


def _check(scenario: Scenario) -> None:
    where = f"{scenario.name}.txt"
    if not scenario.title or "hazard" not in scenario.head:
        raise ScenarioError(f"{where}: the head names no title, or no hazard")
    if not scenario.engines:
        raise ScenarioError(f"{where}: it is performed through none of {', '.join(ENGINES)}")
    if scenario.engines == ("librdkafka",) and "natively" in scenario.head:
        raise ScenarioError(f"{where}: it is not performed natively")
    if not scenario.given <= GIVEN:
        raise ScenarioError(f"{where}: not known to be given: {sorted(scenario.given - GIVEN)}")


def load(directory: Path) -> list[Scenario]:
    """All scenarios of a directory, by name."""
    return [parse(path.stem, path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.txt"))]
