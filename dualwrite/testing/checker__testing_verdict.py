"""Compares the journal, the rows and the messages, and lists what is wrong. Pure: it queries no server."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dualwrite.testing.checker__testing_journal import History


class Kind(Enum):
    """The kinds of findings."""

    LOST = "lost"
    """Acknowledged, but missing on a side; or decided, and known to be lost."""
    TORN = "torn"
    """On one side only, or with some of its rows or messages missing."""
    TWICE = "twice"
    """Too many rows or messages."""
    REORDERED = "reordered"
    """A partition shows the operations of a stream in another order than they began."""
    UNDONE = "undone"
    """Reported as aborted, but present."""
    FOREIGN = "foreign"
    """Present on a side, but not in the journal."""
    DISAGREEING = "disagreeing"
    """Two consumers saw different messages."""
    UNSTABLE = "unstable"
    """Settling a second time changed something."""
    HANGING = "hanging"
    """A transaction stays open, or a step did not end in time."""


@dataclass(frozen=True)
class Finding:
    """One violation.

    Attributes:
        kind: Its kind.
        subject: The operation, or the topic.
        detail: The observation, for display.
    """

    kind: Kind
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.subject}: {self.detail}"


class Place(NamedTuple):
    """The place where a consumer saw the message of an operation."""

    topic: str
    partition: int
    offset: int
    operation: str


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        findings: The violations; empty if there are none.
        operations: Number of operations begun.
        acknowledged: Number of operations acknowledged.
        aborted: Number of operations reported as aborted.
        present: Number of operations on both sides.
    """

    findings: list[Finding] = field(default_factory=list)
    operations: int = 0
    acknowledged: int = 0
    aborted: int = 0
    present: int = 0

    def raise_findings(self) -> None:
        """Fail if there is a finding, with all of them in the message.

        Raises:
            AssertionError: There is a finding.
        """
        if self.findings:
            raise AssertionError("\n".join(map(str, self.findings)))


def compare(
    history: History,
    rows: Iterable[str],
    messages: Sequence[Place],
    *,
    rows_per_operation: int = 1,
    messages_per_operation: int = 1,
) -> list[Finding]:
    """Compare the two sides with each other and with the journal.

    Args:
        history: The answers that the writers got.
        rows: The operation of every row.
        messages: Every committed message, in order of offset within a partition.
        rows_per_operation: Rows that each operation inserts.
        messages_per_operation: Messages that each operation publishes.
    """
    in_rows, in_messages = Counter(rows), Counter(message.operation for message in messages)
    findings = []
    for operation in sorted({*in_rows, *in_messages, *history.acknowledged, *history.lost}):
        found_rows, found_messages = in_rows[operation], in_messages[operation]
        detail = f"{found_rows} of {rows_per_operation} rows, {found_messages} of {messages_per_operation} messages"
        missing = found_rows < rows_per_operation or found_messages < messages_per_operation
        if operation not in history.begun:
            findings.append(Finding(Kind.FOREIGN, operation, detail))
        if found_rows > rows_per_operation or found_messages > messages_per_operation:
            findings.append(Finding(Kind.TWICE, operation, detail))
        if (operation in history.acknowledged and missing) or operation in history.lost:
            findings.append(Finding(Kind.LOST, operation, detail))
        elif missing:
            findings.append(Finding(Kind.TORN, operation, detail))
        if operation in history.aborted and (found_rows or found_messages):
            findings.append(Finding(Kind.UNDONE, operation, detail))
    return findings + _reordered(history, messages)


def _reordered(history: History, messages: Sequence[Place]) -> list[Finding]:
    position = {operation: number for number, operation in enumerate(history.begun)}
    latest: dict[tuple[str, int, str], str] = {}
    findings = []
    for place in messages:
        if not (stream := history.begun.get(place.operation)):
            continue
        key = (place.topic, place.partition, stream)
        before = latest.get(key)
        if before is not None and position[before] > position[place.operation]:
            where = f"{place.topic}[{place.partition}]@{place.offset}"
            findings.append(Finding(Kind.REORDERED, place.operation, f"at {where}, behind {before} of {stream}"))
        latest[key] = place.operation
    return findings


def compare_readings(
    before: Mapping[str, Sequence[Place]], after: Mapping[str, Sequence[Place]], which: str
) -> list[Finding]:
    """Compare the messages seen by two consumers.

    Args:
        before: By topic, the messages that the first saw.
        after: By topic, the messages that the second saw.
        which: Names the two consumers, for display.
    """
    findings = []
    for topic in sorted({*before, *after}):
        ones, others = _by_partition(before.get(topic, ())), _by_partition(after.get(topic, ()))
        for partition in sorted({*ones, *others}):
            if ones[partition] != others[partition]:
                surplus = [place for place in ones[partition] if place not in set(others[partition])]
                missing = [place for place in others[partition] if place not in set(ones[partition])]
                detail = (
                    f"{which}: {len(ones[partition])} and {len(others[partition])} messages; "
                    f"only the first saw {surplus[:3]}, only the second {missing[:3]}"
                )
                findings.append(Finding(Kind.DISAGREEING, f"{topic}[{partition}]", detail))
    return findings


def _by_partition(places: Sequence[Place]) -> defaultdict[int, list[Place]]:
    found: defaultdict[int, list[Place]] = defaultdict(list)
    for place in places:
        found[place.partition].append(place)
    return found
