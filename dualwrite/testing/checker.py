"""After a run: settles, and compares journal, rows and messages. During it: a consumer that follows all the time.

The journal holds the results that writers got, on disk before the next step. The verdict over it is pure.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from sqlalchemy import Engine, create_engine, text

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.interfaces import Closing
from dualwrite.kafka.librdkafka.handle import PASSING, list_offsets
from dualwrite.recovery.recover import RecoveryReport
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.writing.left_behind import recover

if TYPE_CHECKING:
    from collections.abc import Generator

    from dualwrite.protocol.values import Incident, StateRow


_AT_ONCE = 10_000
# The least time for a broker to answer one request, even at the deadline: a shorter wait would prove nothing.
_ANSWER_S = 10.0


class Record(NamedTuple):
    """One message.

    Attributes:
        partition: Its partition.
        offset: Its offset there.
        key: Its key; None if it has none.
        value: Its value; None for a tombstone.
        headers: Its headers, in their order.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def read_committed(config: Mapping[str, str], topic: str, *, timeout_s: float = 120.0) -> list[Record]:
    """All committed messages of a topic, in order of partition and offset.

    Waits first until no transaction is open on the topic (every partition's last stable offset is its high watermark),
    so that the result is final for everything produced before the call.

    Args:
        config: Bootstrap servers and security settings for confluent-kafka, as from `EmbeddedKafka.client_config`.
        topic: The topic.
        timeout_s: Seconds that the whole call may take.

    Raises:
        Unavailable: A transaction stayed open, or the end was not reached in time.
        confluent_kafka.KafkaException: The brokers refused, with their reason.
    """
    deadline = Deadline(timeout_s)
    ends = _wait_for_stable_ends(AdminClient(_for_confluent(config)), topic, deadline)
    consumer = Consumer(
        {
            **_for_confluent(config),
            "group.id": f"dualwrite-reading-{secrets.token_hex(8)}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # The end of a partition shows in an empty answer, with which the broker waits for half a second otherwise.
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
        }
    )
    with closing(consumer):
        # Assign instead of subscribing: this forms no group, which would take time and need an ACL.
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        records = _read_to(ends, consumer, topic, deadline)
    return sorted(records)


def _read_to(ends: Mapping[int, int], consumer: Consumer, topic: str, deadline: Deadline) -> list[Record]:
    missing = {partition for partition, end in ends.items() if end > 0}
    records: list[Record] = []
    while missing:
        if deadline.expired:
            raise Unavailable(f"partitions {sorted(missing)} of {topic} were not read to their end in time")
        first = consumer.poll(min(0.2, deadline.remaining_s()))
        if first is None:
            continue
        for message in [first, *consumer.consume(_AT_ONCE, timeout=0)]:  # with a timeout it would wait for as many
            partition, offset, error = message.partition(), message.offset(), message.error()
            assert partition is not None
            assert offset is not None
            if error is None:
                if offset < ends[partition]:
                    records.append(Record(partition, offset, message.key(), message.value(), _headers(message)))
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the constant's public name
                raise KafkaException(error)
            elif offset >= ends[partition]:
                # Only the end-of-partition event counts: aborted messages and markers, which are never delivered, may
                # follow the last message.
                missing.discard(partition)
    return records


def _headers(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    found = message.headers() or ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((key, value.encode() if isinstance(value, str) else value) for key, value in pairs)


def _for_confluent(config: Mapping[str, str]) -> dict[str, str | int | float | bool]:
    """A writer's Kafka settings without those that are this library's own."""
    return {key: value for key, value in config.items() if not key.startswith("dualwrite.")}


def stable_ends(config: Mapping[str, str], topic: str, *, timeout_s: float = 120.0) -> dict[int, int]:
    """The end of each partition, once no transaction is open on the topic; `Unavailable` if one stays open."""
    return _wait_for_stable_ends(AdminClient(_for_confluent(config)), topic, Deadline(timeout_s))


def _wait_for_stable_ends(admin: AdminClient, topic: str, deadline: Deadline) -> dict[int, int]:
    metadata = admin.list_topics(topic, timeout=max(_ANSWER_S, deadline.remaining_s())).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    partitions = sorted(metadata.partitions)
    while True:
        try:
            # Ask for the stable ends first: messages produced in between can only make the two differ.
            stable = _ends(admin, topic, partitions, IsolationLevel.READ_COMMITTED, deadline)
            high = _ends(admin, topic, partitions, IsolationLevel.READ_UNCOMMITTED, deadline)
        except KafkaException as refused:
            if refused.args[0].code() not in PASSING or deadline.expired:
                raise
            time.sleep(0.01)
            continue
        if stable == high:
            return high
        if deadline.expired:
            opened = {partition: stable[partition] for partition in partitions if stable[partition] != high[partition]}
            raise Unavailable(f"a transaction stays open on {topic}: last stable offset by partition {opened}")
        time.sleep(0.01)


def _ends(
    admin: AdminClient, topic: str, partitions: list[int], isolation: IsolationLevel, deadline: Deadline
) -> dict[int, int]:
    asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in partitions}
    timeout_s = max(_ANSWER_S, deadline.remaining_s())
    found = list_offsets(admin, asked, isolation, timeout_s=timeout_s)
    return {where.partition: offset for where, offset in found.items()}


def value_as_text(record: Record) -> str:
    """The operation's name in a message whose value is that name."""
    return "" if record.value is None else record.value.decode()


class _Sight(NamedTuple):
    """A snapshot: user rows, messages by topic, the library's rows, recorded losses."""

    rows: list[str]
    messages: dict[str, list[Place]]
    states: Sequence[StateRow]
    incidents: Sequence[Incident]


class Checker:
    """Settles, then compares journal, database and Kafka. Use it once no writer runs any more.

    Run it in a separate process, which no fail point kills.

    Args:
        journal: The writers' journal.
        kafka: librdkafka configuration.
        topics: The topics that the operations publish to.
        database: A SQLAlchemy engine or a database URL.
        query: SQL whose first column is the operation's name, once for each row that an operation has inserted.
        operation_of: Extracts the operation's name from a message; the message's value if not given.
        rows_per_operation: Rows that each operation inserts.
        messages_per_operation: Messages that each operation publishes.
        prefix: Settles only transactional ids with this prefix; all if empty.
        schema: The database schema of the library's tables.
        timeout_s: Seconds that each step may take.
    """

    def __init__(
        self,
        *,
        journal: Path | str,
        kafka: Mapping[str, str],
        topics: Sequence[str],
        database: Engine | str,
        query: str,
        operation_of: Callable[[Record], str] = value_as_text,
        rows_per_operation: int = 1,
        messages_per_operation: int = 1,
        prefix: str = "",
        schema: str | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._journal = Path(journal)
        self._kafka = dict(kafka)
        self._topics = list(topics)
        self._database = database
        self._query = query
        self._operation_of = operation_of
        self._rows_per_operation = rows_per_operation
        self._messages_per_operation = messages_per_operation
        self._prefix = prefix
        self._schema = schema
        self._timeout_s = timeout_s

    def check(self, follower: Follower | None = None) -> Verdict:
        """Settle, compare, settle once more, and check that this changes nothing.

        A server that does not answer, or a transaction that does not end in time, is a finding (`Kind.HANGING`), not an
        error.

        Args:
            follower: A consumer that has run throughout; it must have seen the same messages as a new one.

        Raises:
            ConfigurationError: The journal is malformed, or the database is misconfigured.
            confluent_kafka.KafkaException: The brokers refuse, with their reason.
        """
        history = Journal.read(self._journal)
        with ExitStack() as disposed_later:
            engine = self._database
            if isinstance(engine, str):
                engine = create_engine(engine)
                disposed_later.callback(engine.dispose)
            try:
                findings, present = self._findings(history, engine, follower)
            except Unavailable as error:
                findings, present = [Finding(Kind.HANGING, self._prefix or "all", str(error))], 0
        return Verdict(findings, len(history.begun), len(history.acknowledged), len(history.aborted), present)

    def _findings(self, history: History, engine: Engine, follower: Follower | None) -> tuple[list[Finding], int]:
        self._settle(engine)
        sight = self._look(engine)
        findings = compare(
            history,
            sight.rows,
            [place for topic in self._topics for place in sight.messages[topic]],
            rows_per_operation=self._rows_per_operation,
            messages_per_operation=self._messages_per_operation,
        )
        findings += [
            Finding(Kind.LOST, incident.transactional_id, f"recorded as {incident.outcome.value}: {incident.detail}")
            for incident in sight.incidents
        ]
        findings += self._second_settling(engine, sight)
        if follower is not None:
            findings += self._followed(follower, sight)
        return findings, len(set(sight.rows))

    def _settle(self, engine: Engine) -> RecoveryReport:
        return recover(
            kafka={**self._kafka, "client.id": "checker"},
            database=engine,
            schema=self._schema,
            prefix=self._prefix or None,
            open_for_s=0.0,
            timeout_s=self._timeout_s,
        )

    def _look(self, engine: Engine) -> _Sight:
        messages = {
            topic: [
                Place(topic, record.partition, record.offset, self._operation_of(record))
                for record in read_committed(self._kafka, topic, timeout_s=self._timeout_s)
            ]
            for topic in self._topics
        }
        with engine.connect() as connection:
            rows = [str(row[0]) for row in connection.execute(text(self._query))]
        store = SqlDatabase(engine, self._schema).store()
        return _Sight(rows, messages, store.find(self._prefix), store.incidents(self._prefix))

    def _second_settling(self, engine: Engine, first: _Sight) -> list[Finding]:
        report = self._settle(engine)
        findings = [
            Finding(Kind.UNSTABLE, item.row.transactional_id, f"needs {item.step.value} after it was settled")
            for item in report.planned
        ]
        second = self._look(engine)
        if sorted(first.rows) != sorted(second.rows):
            findings.append(Finding(Kind.UNSTABLE, "rows", f"{len(first.rows)} before, {len(second.rows)} after"))
        changed = {row.transactional_id for row in {*first.states} ^ {*second.states}}
        findings += [Finding(Kind.UNSTABLE, key, "the row of its state has changed") for key in sorted(changed)]
        if len(first.incidents) != len(second.incidents):
            findings.append(Finding(Kind.UNSTABLE, "incidents", f"{second.incidents[len(first.incidents) :]}"))
        return findings + compare_readings(first.messages, second.messages, "before and after the second settling")

    def _followed(self, follower: Follower, sight: _Sight) -> list[Finding]:
        deadline = Deadline(self._timeout_s)
        ends = {topic: stable_ends(self._kafka, topic, timeout_s=deadline.remaining_s()) for topic in self._topics}
        try:
            records = follower.seen(ends, timeout_s=self._timeout_s)
        except (DualWriteError, KafkaException) as error:
            return [Finding(Kind.HANGING, "the consumer that ran all the time", str(error))]
        seen = {
            topic: [Place(topic, record.partition, record.offset, self._operation_of(record)) for record in found]
            for topic, found in records.items()
        }
        return compare_readings(
            seen, sight.messages, "the consumer that ran all the time, and one that reads afterwards"
        )


# Compares the journal, the rows and the messages, and lists what is wrong. Pure: it queries no server.


class Kind(Enum):
    """The kinds of findings."""

    LOST = "lost"
    """Acknowledged, but missing on a side; or decided, and known to be lost."""
    TORN = "torn"
    """On one side only, or with some of its rows or messages missing."""
    TWICE = "twice"
    """Too many rows or messages."""
    REORDERED = "reordered"
    """A partition shows the operations of a stream in another order than they began; or one operation of a writer behind
    another that began only after the first was acknowledged."""
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

    `rows` has the operation of every row; `messages`, every committed message, in order of offset within a partition.
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
    began = history.began_at
    latest: dict[tuple[str, int, str], str] = {}
    newest: dict[tuple[str, int, str], str] = {}
    findings = []
    for place in messages:
        operation = place.operation
        where = f"{place.topic}[{place.partition}]@{place.offset}"
        if stream := history.begun.get(operation):
            before = latest.get(key := (place.topic, place.partition, stream))
            if before is not None and began[before] > began[operation]:
                findings.append(Finding(Kind.REORDERED, operation, f"at {where}, behind {before} of {stream}"))
            latest[key] = operation
        if writer := history.writers.get(operation):
            before = newest.get(key := (place.topic, place.partition, writer))
            if before is None or began[before] < began[operation]:
                newest[key] = operation
            elif history.acknowledged_at.get(operation, began[before]) < began[before]:
                detail = f"at {where}, behind {before} of {writer}, which began when this one was acknowledged"
                findings.append(Finding(Kind.REORDERED, operation, detail))
    return findings


def compare_readings(
    before: Mapping[str, Sequence[Place]], after: Mapping[str, Sequence[Place]], which: str
) -> list[Finding]:
    """Compare the messages that two consumers saw, by topic; `which` names the consumers, for display."""
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


# A journal of the answers that writers got, on disk before the next step: half of every proof that nothing was lost.
#
# One line for each event of an operation, `word <tab> stream <tab> operation`, and of one that begins also `<tab> writer`, if
# it has one. Each line is one `write` to a file opened for appending, flushed to disk, so that many processes may share a
# journal and any of them may be killed at any instant. The order of its lines is that of the events: an operation whose
# acknowledgement stands before the beginning of another one was decided before that one began.


class Word(Enum):
    """An event of an operation."""

    BEGUN = "begun"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    IN_DOUBT = "in-doubt"
    LOST = "lost"


# The event for each DualWriteError.outcome.
_WORD_OF_OUTCOME: Final = {
    "none": Word.ABORTED,
    "aborted": Word.ABORTED,
    "decided": Word.ACKNOWLEDGED,
    "unknown": Word.IN_DOUBT,
    "lost": Word.LOST,
}


@dataclass
class History:
    """The contents of a journal, by operation.

    Attributes:
        begun: Every operation in the order in which it first began, with its stream (empty for none).
        writers: The writers of those that name one.
        began_at: The position of each one's first beginning among all events.
        acknowledged_at: Likewise of each one's first acknowledgement.
        acknowledged: Operations reported to the writer as done on both sides, now or soon.
        aborted: Operations last reported to the writer as done on neither side.
        in_doubt: Operations last reported to the writer as in doubt.
        lost: Operations reported to the writer as lost: the rows are committed and the messages are not.
    """

    begun: dict[str, str] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    writers: dict[str, str] = field(default_factory=dict)
    began_at: dict[str, int] = field(default_factory=dict)
    acknowledged_at: dict[str, int] = field(default_factory=dict)
    _events: int = 0

    def add(self, word: Word, operation: str, stream: str, writer: str = "") -> None:
        """Add the next event.

        Raises:
            ConfigurationError: An operation ends that never began.
        """
        self._events += 1
        if word is Word.BEGUN:
            self.begun.setdefault(operation, stream)
            self.began_at.setdefault(operation, self._events)
            if writer:
                self.writers.setdefault(operation, writer)
        elif operation not in self.begun:
            raise ConfigurationError(f"the journal says {word.value} of {operation!r}, which was never begun")
        if word is Word.ACKNOWLEDGED:
            self.acknowledged_at.setdefault(operation, self._events)
        # An operation may begin again after a process has found out that its first attempt did not happen.
        self.aborted.discard(operation)
        self.in_doubt.discard(operation)
        sets = {
            Word.ACKNOWLEDGED: self.acknowledged,
            Word.ABORTED: self.aborted,
            Word.IN_DOUBT: self.in_doubt,
            Word.LOST: self.lost,
        }
        if word in sets:
            sets[word].add(operation)


class Journal(Closing):
    """Records each operation's beginning and the answer that its writer got.

    Threads may share one; processes share it by its path.

    Args:
        path: The file; created if missing, otherwise appended to.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def begun(self, operation: str, *, stream: str = "", writer: str = "") -> None:
        """Record that an operation begins, before any part of it is done.

        The line is on disk on return.

        Args:
            operation: Its name, as in the row and in the messages. No tab, no line break.
            stream: Operations of one stream begin one after the other, and consumers must see them in that order in
                each partition. Empty: the order of this operation does not matter.
            writer: The writer's name, for an operation of one `DualWriter`. Whatever threads and lanes its operations have:
                if one was acknowledged before another began, consumers must see it first in each partition.

        Raises:
            ValueError: A name holds a tab or a line break, or is empty.
        """
        self._write(Word.BEGUN, operation, stream, writer)

    def acknowledged(self, operation: str) -> None:
        """Record a reported success: the operation must be on both sides. The line is on disk on return."""
        self._write(Word.ACKNOWLEDGED, operation)

    def aborted(self, operation: str) -> None:
        """Record a reported abort: neither side may have the operation. The line is on disk on return."""
        self._write(Word.ABORTED, operation)

    def in_doubt(self, operation: str) -> None:
        """Record that the operation was reported as in doubt. The line is on disk on return."""
        self._write(Word.IN_DOUBT, operation)

    def lost(self, operation: str) -> None:
        """Record that the operation was reported as lost. The line is on disk on return."""
        self._write(Word.LOST, operation)

    @contextmanager
    def operation(self, operation: str, *, stream: str = "", writer: str = "") -> Generator[None, None, None]:
        """Journal one operation around a dual write: its beginning, and its outcome when the block ends.

        A normal end is *acknowledged*. An error of this library carries the outcome (`DualWriteError.outcome`). After
        any other exception the operation counts as *in doubt*; if your code left the block on purpose, before the dual
        write's end, call `aborted` afterwards. The exception propagates.

        Args:
            operation: As for `begun`.
            stream: As for `begun`.
            writer: As for `begun`.
        """
        self.begun(operation, stream=stream, writer=writer)
        try:
            yield
        except DualWriteError as error:
            self._write(_WORD_OF_OUTCOME[error.outcome], operation)
            raise
        except BaseException:
            self.in_doubt(operation)
            raise
        self.acknowledged(operation)

    def _write(self, word: Word, operation: str, stream: str = "", writer: str = "") -> None:
        if not operation or any(mark in operation + stream + writer for mark in "\t\n\r"):
            raise ValueError(f"{operation!r} of {stream!r} cannot be a line of the journal")
        line = "\t".join([word.value, stream, operation, *([writer] if writer else [])]).encode() + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to the journal {self.path}")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @staticmethod
    def read(path: Path | str) -> History:
        """Read a journal back. Writers may still be active: ignores a last line without its end.

        Raises:
            ConfigurationError: A line is malformed; its number is in the message.
            OSError: The file cannot be read.
        """
        history = History()
        *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            word, *names = line.split("\t")
            try:
                stream, operation, *writer = names
                if len(writer) > 1:
                    raise ValueError("it has too many parts")
                history.add(Word(word), operation, stream, *writer)
            except (ValueError, ConfigurationError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}: {line!r} is not a line of a journal: {error}"
                ) from error
        return history


# A `read_committed` consumer that runs throughout a test and all its outages, and records what it sees.

AT_ONCE = 1_000
# A consumer reports these errors while a broker is down or starting, and does not know its topics yet; it recovers by itself.
_PASSING = PASSING | {KafkaError.UNKNOWN_TOPIC_OR_PART}


class Follower(Closing):
    """Follows topics from their beginning, in its own thread. A context manager.

    Kafka cannot take back a message that a consumer has seen: a later reader must see the same, offset by offset.

    Args:
        config: Bootstrap servers and security settings for confluent-kafka.
        topics: The topics. They must exist.

    Raises:
        confluent_kafka.KafkaException: The brokers refused, with their reason.
    """

    def __init__(self, config: Mapping[str, str], topics: Sequence[str]) -> None:
        self._consumer = Consumer(
            {
                **_for_confluent(config),
                "group.id": f"dualwrite-following-{secrets.token_hex(8)}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,  # the end of a partition shows in an empty answer
                "auto.offset.reset": "error",  # a missing offset is a finding, not a reason to skip ahead
                "log_level": 0,  # outages of brokers are expected
            }
        )
        self._seen: dict[str, list[Record]] = {topic: [] for topic in topics}
        self._ends: dict[tuple[str, int], int] = {}
        self._failure: KafkaException | None = None
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        metadata = AdminClient(_for_confluent(config)).list_topics(timeout=30).topics
        self._partitions = {topic: sorted(metadata[topic].partitions) for topic in topics}
        self._consumer.assign(
            [TopicPartition(topic, number, 0) for topic in topics for number in self._partitions[topic]]
        )
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            first = self._consumer.poll(0.2)
            if first is None:
                continue
            for message in [first, *self._consumer.consume(AT_ONCE, timeout=0)]:
                topic, partition, offset, error = (
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.error(),
                )
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the public name
                    if not (error.retriable() or error.code() in _PASSING):
                        self._fail(KafkaException(error))
                        return
                    continue
                assert topic is not None
                assert partition is not None
                assert offset is not None
                with self._moved:
                    if error is None:
                        self._seen[topic].append(Record(partition, offset, message.key(), message.value()))
                    else:
                        self._ends[topic, partition] = offset
                        self._moved.notify_all()

    def _fail(self, failure: KafkaException) -> None:
        with self._moved:
            self._failure = failure
            self._moved.notify_all()

    def seen(self, ends: Mapping[str, Mapping[int, int]], *, timeout_s: float = 120.0) -> dict[str, list[Record]]:
        """The messages seen, by topic, in order of arrival, once the consumer has reached these ends.

        Args:
            ends: By topic and partition, the offset after the last one.
            timeout_s: Seconds to wait for that.

        Raises:
            Unavailable: It did not get there in time.
            confluent_kafka.KafkaException: The consumer failed, with its reason.
        """
        deadline = Deadline(timeout_s)
        wanted = {(topic, number): end for topic, found in ends.items() for number, end in found.items() if end > 0}

        def behind() -> dict[tuple[str, int], int]:
            return {place: end for place, end in wanted.items() if self._ends.get(place, -1) < end}

        with self._moved:
            while self._failure is None and behind():
                if not self._moved.wait(deadline.remaining_s()):
                    raise Unavailable(f"the consumer that ran all the time did not reach {behind()}")
            if self._failure is not None:
                raise self._failure
            copied: defaultdict[str, list[Record]] = defaultdict(list)
            for topic, records in self._seen.items():
                copied[topic] = list(records)
            return copied

    def close(self) -> None:
        """Stop. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._consumer.close()
