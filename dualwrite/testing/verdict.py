"""What is wrong, if anything: the journal, the rows and the messages compared. Pure: nothing is asked of anybody."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dualwrite.testing.journal import History


class Kind(Enum):
    """What can be wrong."""

    LOST = "lost"
    """Acknowledged, but missing on a side; or decided, and known to be lost."""
    TORN = "torn"
    """On one side only, or not in all its messages or rows."""
    TWICE = "twice"
    """A row or a message more than there should be."""
    REORDERED = "reordered"
    """A partition shows the operations of a stream in another order than they were begun."""
    UNDONE = "undone"
    """Told to be aborted, and there all the same."""
    FOREIGN = "foreign"
    """On a side, though the journal knows of no such operation."""
    DISAGREEING = "disagreeing"
    """Two consumers saw different messages."""
    UNSTABLE = "unstable"
    """Settling a second time changed something."""
    HANGING = "hanging"
    """A transaction stays open, or something did not end in its time."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: What.
        subject: The operation, or the topic.
        detail: What was seen, for people.
    """

    kind: Kind
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.subject}: {self.detail}"


class Place(NamedTuple):
    """Where a consumer saw the message of an operation."""

    topic: str
    partition: int
    offset: int
    operation: str


@dataclass(frozen=True)
class Verdict:
    """What a checker found.

    Attributes:
        findings: What is wrong; empty if nothing is.
        operations: How many operations were begun.
        acknowledged: How many were acknowledged.
        aborted: How many were told to be aborted.
        present: How many are on both sides.
    """

    findings: list[Finding] = field(default_factory=list)
    operations: int = 0
    acknowledged: int = 0
    aborted: int = 0
    present: int = 0

    def raise_findings(self) -> None:
        """Fail, with every finding in the message, if there is one.

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
    """Hold the two sides against each other and against the journal.

    Args:
        history: What the writers were told.
        rows: The operation of every row.
        messages: Every committed message, in the order of offsets within a partition.
        rows_per_operation: How many rows each operation inserts.
        messages_per_operation: How many messages each operation publishes.
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
    """Hold what one consumer saw against what another saw.

    Args:
        before: By topic, what the first saw.
        after: By topic, what the second saw.
        which: Who they are, for people.
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
