"""Compares the answers that writers got, the rows in the database, and the messages that consumers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaException
from sqlalchemy import Engine, create_engine, text

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError, Unavailable
from dualwrite.recovery.recover import RecoveryReport, recover
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing.checker__testing_follower import Follower
from dualwrite.testing.checker__testing_journal import History, Journal
from dualwrite.testing.checker__testing_verdict import Finding, Kind, Place, Verdict, compare, compare_readings
from dualwrite.testing.reading import Record, read_committed, stable_ends

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_rows import Incident, StateRow


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
