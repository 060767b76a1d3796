"""``make demo``: a Spark job writes 336,776 real flights to Kafka and PostgreSQL, is killed again and again, and loses nothing.

The job runs in a process of its own. It is killed by SIGKILL, with its JVM and its workers, at moments that nobody chose, and
once by a fail point between the database's commit and Kafka's. Each run is simply started again: the same batch, the same
code. At the end every row of the table is compared with every message of the topic.

Run without arguments it starts a Kafka broker and a PostgreSQL server of its own, or uses those that ``DUALWRITE_TEST_KAFKA``
and ``DUALWRITE_TEST_POSTGRES`` name. It leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from flights import FLIGHTS, TABLE, messages_of, read_flights, rows_of, spark_session, unpack
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

from dualwrite import migrations
from dualwrite.recovery import status
from dualwrite.sinks.spark import write_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

PARTITIONS = 12
LONGEST_RUN_S = 240
console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Run:
    """One start of the job.

    Attributes:
        name: What will happen to it.
        kill_at: SIGKILL for all its processes when the table has this share of the flights; None lets it run.
        failpoint: A fail point to arm in it.
    """

    name: str
    kill_at: float | None = None
    failpoint: str = ""


RUNS = [
    Run("SIGKILL to the driver, its JVM and its workers", kill_at=0.10),
    Run("SIGKILL again", kill_at=0.35),
    Run("a worker dies between the database's commit and Kafka's", failpoint="write.decided:2"),
    Run("SIGKILL once more", kill_at=0.70),
    Run("no more harm"),
]


def job(settings: dict[str, object], flights: str) -> None:
    """What an application would have: read, and write the batch. Nothing in it knows of crashes."""
    spark = spark_session("demo")
    write_batch(read_flights(spark, Path(flights), PARTITIONS), batch_id="2013", **settings)  # type: ignore[arg-type]
    spark.stop()


def start(job_file: Path, failpoint: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the job in a process of its own."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, __file__, str(job_file)],
            env=os.environ | {"DUALWRITE_FAILPOINT": failpoint},
            stdout=file,
            stderr=file,
        )


def count(engine: Engine) -> int:
    """How many flights the database shows."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM flights")).scalar_one()


def watch(process: subprocess.Popen[bytes], run: Run, engine: Engine, progress: Progress, task: TaskID) -> str:
    """Show what the table holds until the job ends or is killed; returns how it ended."""
    deadline = time.monotonic() + LONGEST_RUN_S
    while process.poll() is None:
        rows = count(engine)
        progress.update(task, completed=rows)
        if time.monotonic() > deadline or (run.kill_at is not None and rows >= run.kill_at * FLIGHTS):
            time.sleep(random.uniform(0.2, 2.0))  # not at the end of a partition, but somewhere in the next ones
            kill(process)
            return "killed" if run.kill_at is not None else "killed: it took too long"
        time.sleep(0.1)
    progress.update(task, completed=count(engine))
    return "came to its end" if process.returncode == 0 else "failed"


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the driver, its JVM and all its Python workers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        driver = psutil.Process(process.pid)
        for victim in [driver, *driver.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()


def run_all(job_file: Path, log: Path, engine: Engine, kafka: dict[str, str], url: str) -> Table:
    """Start the job until it came through; returns what happened, a line for each start."""
    story = Table("start", "what was done to it", "how it ended", "rows in the table", "left open in Kafka", box=None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for number, run in enumerate(RUNS, start=1):
            task = progress.add_task(f"start {number}: {run.name}", total=FLIGHTS)
            ended = watch(start(job_file, run.failpoint, log), run, engine, progress, task)
            left = [item for item in status(kafka=kafka, engine=url) if item.open_for_s is not None]
            story.add_row(str(number), run.name, ended, f"{count(engine):,}", str(len(left)))
            progress.stop_task(task)
    return story


def verdict(engine: Engine, kafka: dict[str, str], topic: str) -> bool:
    """Compare both sides row for row."""
    console.print("\ncomparing every row with every message ...")
    rows, messages = rows_of(engine), messages_of(kafka, topic)
    table = Table("", "PostgreSQL", "Kafka", box=None)
    table.add_row("flights", f"{sum(rows.values()):,}", f"{sum(messages.values()):,}")
    table.add_row("only here", f"{sum((rows - messages).values()):,}", f"{sum((messages - rows).values()):,}")
    console.print(table)
    equal = rows == messages and sum(rows.values()) == FLIGHTS
    console.print("[bold green]equal, row for row[/]" if equal else "[bold red]NOT EQUAL[/]")
    return equal


def main() -> int:
    """Run the demo; 0 if both sides are equal at the end."""
    logging.disable(logging.WARNING)  # the story is told below
    console.print("starting Kafka and PostgreSQL ...")
    with tempfile.TemporaryDirectory() as name, EmbeddedKafka() as server, EmbeddedPostgres() as postgres:
        directory, kafka = Path(name), server.client_config()
        topic = server.create_topic(f"flights-{secrets.token_hex(4)}", partitions=4)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        with engine.begin() as connection:
            connection.execute(text(TABLE))
        settings = {"sink": "demo", "kafka": kafka, "url": url, "topic": topic, "table": "flights", "key": "tailnum"}
        job_file, log = directory / "job.json", directory / "job.log"
        job_file.write_text(json.dumps([settings, str(unpack(directory))]), encoding="utf-8")
        story = run_all(job_file, log, engine, kafka, url)
        console.print(story)
        equal = verdict(engine, kafka, topic)
        engine.dispose()
        if not equal:
            console.print(log.read_text(encoding="utf-8", errors="replace")[-5000:], markup=False)
    return 0 if equal else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(*json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        sys.exit(main())
