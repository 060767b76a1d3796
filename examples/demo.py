"""``make demo``: a Spark job writes a year of flights to Kafka and PostgreSQL, and is killed again and again.

Starts a real Kafka broker and a real PostgreSQL server. A job in its own process writes all flights that left New York in
2013 into a topic and a table. The demo kills the job with SIGKILL, including its JVM and its Python workers, at random
instants and at fail points that chance would hardly hit. Each time it starts the job again, which settles what the dead one
left behind. At the end it compares every row with every message.

Exits with 1 if the two sides are not equal, row for row. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil
from confluent_kafka import Consumer, TopicPartition
from flights import FLIGHTS, KEY, TABLE, read_flights, start_spark, write_parquet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

from dualwrite import migrations
from dualwrite.sinks.spark import write_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

TOPIC = "flights"
TOPIC_PARTITIONS = 4
FILES = 16
"""Partitions of the Spark job: each is one dual write."""
MARK = "DUALWRITE_DEMO"
PATIENCE_S = 900.0
LINE_EVERY_S = 5.0

Flight = tuple[object, ...]


@dataclass(frozen=True)
class Attempt:
    """One start of the job.

    Attributes:
        what: The fate of the job, as shown to people.
        failpoints: Armed in the job's processes.
        random_kill: Whether the demo kills it at a random instant.
    """

    what: str
    failpoints: str = ""
    random_kill: bool = False


KILLED = [
    Attempt(
        "SIGKILL to a worker between its two commits, then to the driver while it repairs that",
        failpoints="write.decided,settle.before_commit",
    ),
    Attempt("SIGKILL to driver, JVM and workers at a random instant", random_kill=True),
    Attempt("SIGKILL to driver, JVM and workers at a random instant", random_kill=True),
]
LAST = Attempt("nothing: it may finish")


def job(bootstrap_servers: str, url: str, source: str) -> None:
    """The Spark job: reads the flights and writes both sides. Nothing in it prepares for being killed."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dualwrite.sinks.spark").setLevel(logging.INFO)
    spark = start_spark()
    write_batch(
        spark.read.parquet(source),
        sink="flights",
        batch_id="2013",
        kafka={"bootstrap.servers": bootstrap_servers},
        url=url,
        topic=TOPIC,
        table="flights",
        key=KEY,
    )
    spark.stop()


class Sides:
    """Observes both sides from outside: committed rows, and messages received by a ``read_committed`` consumer."""

    def __init__(self, kafka: dict[str, str], engine: Engine) -> None:
        self._engine = engine
        self._consumer = Consumer({**kafka, "group.id": "demo", "isolation.level": "read_committed"})
        self._consumer.assign([TopicPartition(TOPIC, number, 0) for number in range(TOPIC_PARTITIONS)])
        self._stop = threading.Event()
        self.messages = 0
        self._thread = threading.Thread(target=self._consume, name="consumer", daemon=True)
        self._thread.start()

    @property
    def rows(self) -> int:
        """Committed rows in the table."""
        with self._engine.connect() as connection:
            return int(connection.scalar(text("SELECT count(*) FROM flights")) or 0)

    def _consume(self) -> None:
        while not self._stop.is_set():
            self.messages += sum(message.error() is None for message in self._consumer.consume(10_000, timeout=0.1))

    def close(self) -> None:
        """Stop the consumer."""
        self._stop.set()
        self._thread.join()
        self._consumer.close()


class Demo:
    """Starts the job on running servers, kills it, and shows both sides."""

    def __init__(self, console: Console, kafka: dict[str, str], url: str, source: Path, sides: Sides) -> None:
        self._console = console
        self._kafka = kafka
        self._url = url
        self._source = source
        self._sides = sides
        self._log = source.parent / "job.log"
        self._marker = secrets.token_hex(8)
        self.kills = 0

    def run(self, attempt: Attempt, number: int) -> None:
        """Start the job once and wait for its end."""
        self._console.print(f"\n[bold]start {number}[/]  {attempt.what}")
        begun = time.monotonic()
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "job", self._kafka["bootstrap.servers"], self._url, str(self._source)],
                env={**os.environ, "DUALWRITE_FAILPOINT": attempt.failpoints, MARK: self._marker},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._watch(process, attempt, begun)
        finally:
            self._kill(process)
        self._tell(process, time.monotonic() - begun)

    def _watch(self, process: subprocess.Popen[bytes], attempt: Attempt, begun: float) -> None:
        target = self._sides.rows + random.randint(1, FLIGHTS // 4) if attempt.random_kill else None
        delay_s = random.uniform(0.0, 0.8)
        with _shown(self._console) as show:
            while process.poll() is None:
                rows = self._sides.rows
                show(rows, self._sides.messages)
                if target is not None and rows >= target:
                    time.sleep(delay_s)
                    return
                if time.monotonic() - begun > PATIENCE_S:
                    raise TimeoutError(f"the job did not end:\n{self._log.read_text()[-3000:]}")
                time.sleep(0.1)
            show(self._sides.rows, self._sides.messages)

    def _tell(self, process: subprocess.Popen[bytes], took_s: float) -> None:
        for line in self._log.read_text().splitlines():
            if ": settled " in line:
                self._console.print(f"  [dim]{line.partition(': ')[2]}[/]")
        rows, messages = self._sides.rows, self._sides.messages
        if process.returncode == 0:
            self._console.print(f"  [green]finished[/] after {took_s:.1f} s")
            return
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the job failed by itself:\n{self._log.read_text()[-3000:]}")
        self.kills += 1
        ahead = "equal for now" if rows == messages else f"{abs(rows - messages):,} apart"
        self._console.print(f"  [red]killed[/] after {took_s:.1f} s: {rows:,} rows, {messages:,} messages, {ahead}")

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to the driver and its JVM, and to the Python workers, which are in a process group of their own."""
        with suppress(ProcessLookupError):  # it has ended, and so has its JVM
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for worker in psutil.process_iter(["pid"]):
            try:
                if worker.environ().get(MARK) == self._marker:
                    worker.kill()
                    worker.wait(60)
            except psutil.Error:  # it has ended by itself, or belongs to another user
                continue


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show the counts as two bars; if the output is not a terminal, as a line every few seconds."""
    columns = (TextColumn("  {task.description:<22}"), BarColumn(40), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        database = progress.add_task("rows in PostgreSQL", total=FLIGHTS)
        kafka = progress.add_task("messages in Kafka", total=FLIGHTS)
        due = time.monotonic() + LINE_EVERY_S

        def show(rows: int, messages: int) -> None:
            nonlocal due
            progress.update(database, completed=rows)
            progress.update(kafka, completed=messages)
            if not console.is_terminal and time.monotonic() >= due:
                console.print(f"  {rows:>9,} rows, {messages:>9,} messages")
                due = time.monotonic() + LINE_EVERY_S

        yield show


def rows_of(engine: Engine, names: Sequence[str]) -> Counter[Flight]:
    """Every row of the table, by all its columns."""
    columns = ", ".join(f'"{name}"' for name in names)
    with engine.connect() as connection:
        return Counter(map(tuple, connection.execute(text(f"SELECT {columns} FROM flights"))))


def messages_of(kafka: dict[str, str], names: Sequence[str]) -> Counter[Flight]:
    """Every committed message as a row. Its key must match its value."""
    found: Counter[Flight] = Counter()
    for record in read_committed(kafka, TOPIC, timeout_s=PATIENCE_S):
        value = json.loads(record.value or b"{}")
        key = None if record.key is None else record.key.decode()
        if key != value[KEY]:
            raise AssertionError(f"a message has the key {key!r} and the value {value}")
        value["time_hour"] = datetime.strptime(value["time_hour"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
        found[tuple(value[name] for name in names)] += 1
    return found


def verdict(console: Console, expected: Counter[Flight], rows: Counter[Flight], messages: Counter[Flight]) -> bool:
    """Show the comparison. Returns whether all three are equal."""
    table = Table(title="every row, all columns, and every message, key and value", title_justify="left")
    table.add_column("")
    for head in ("count", "missing", "too many"):
        table.add_column(head, justify="right")
    table.add_row("flights in the source", f"{expected.total():,}", "", "")
    for name, side in (("rows in PostgreSQL", rows), ("messages in Kafka", messages)):
        missing, surplus = (expected - side).total(), (side - expected).total()
        table.add_row(name, f"{side.total():,}", f"{missing:,}", f"{surplus:,}")
    console.print()
    console.print(table)
    return expected == rows == messages


def main(kills: int) -> int:
    """Run the demonstration with this number of kills. Returns the exit code."""
    console = Console(highlight=False)
    begun = time.monotonic()
    console.print("starting Kafka and PostgreSQL ...")
    with (
        # As in production: a decided transaction waits for its recovery for as long as it takes.
        EmbeddedKafka({"transaction.max.timeout.ms": "2147483647"}) as broker,
        EmbeddedPostgres() as postgres,
        tempfile.TemporaryDirectory() as directory,
    ):
        kafka = broker.client_config()
        broker.create_topic(TOPIC, partitions=TOPIC_PARTITIONS)
        url = postgres.create_database("air")
        engine = create_engine(url)
        with engine.begin() as connection:
            migrations.upgrade(connection)
            connection.execute(text(TABLE))
        flights = read_flights()
        source = Path(directory) / "flights"
        write_parquet(flights, source, files=FILES)
        names = flights.schema.names

        sides = Sides(kafka, engine)
        try:
            demo = Demo(console, kafka, url, source, sides)
            for number, attempt in enumerate([*KILLED[:kills], LAST], start=1):
                demo.run(attempt, number)
        finally:
            sides.close()

        console.print("\ncomparing ...")
        expected = Counter(zip(*(column.to_pylist() for column in flights.columns), strict=True))
        equal = verdict(console, expected, rows_of(engine, names), messages_of(kafka, names))
        engine.dispose()
    took = f"{time.monotonic() - begun:.0f} s"
    if not equal:
        console.print(f"[bold red]The two sides differ[/] after {demo.kills} kills ({took}).")
        return 1
    console.print(f"[bold green]Both sides are equal, row for row,[/] after {demo.kills} kills ({took}).")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--kills", type=int, choices=range(len(KILLED) + 1), default=len(KILLED))
        sys.exit(main(parser.parse_args().kills))
