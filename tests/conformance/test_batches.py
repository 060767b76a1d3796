"""The ledger as a view, batch by batch, on every database."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from harness.databases import Database
from harness.patience import PATIENCE_S
from sqlalchemy import Engine, select

from dualwrite.cli.options import commands
from dualwrite.errors import ConfigurationError
from dualwrite.protocol.batches import Destination, Way
from dualwrite.protocol.values import owner_prefix, pool_of_sink, stream_name
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import (
    BEGUN,
    WHOLE_BATCH,
    Batch,
    Ledger,
    Runs,
    newest_batch,
    read_batches,
    read_nobody_at_work,
)
from dualwrite.stores.sql.tables import database_now

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import throughput

WHOLE = Destination(Way.WHOLE, "orders", "orders", "cluster")


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database.schema)


def now(engine: Engine) -> datetime:
    with engine.connect() as connection:
        found = connection.scalar(select(database_now()))
    assert found is not None
    return found


def record(
    engine: Engine,
    ledger: Ledger,
    batch: str,
    partition: int,
    *,
    rows: int = 0,
    of: int = 2,
    started_at: datetime | None = None,
    sink: str = "sink",
) -> None:
    with engine.begin() as connection:
        assert ledger.insert(
            connection,
            sink,
            batch,
            partition,
            row_count=rows,
            message_count=2 * rows,
            partition_count=of,
            started_at=started_at,
        )


def only(database: Database, engine: Engine) -> Batch:
    (batch,) = read_batches(engine, schema=database.schema)
    return batch


def test_the_newest_batch_is_the_one_that_has_written_messages_last(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    def newest(topic: str = "orders", sink: str = "sink") -> str | None:
        return newest_batch(engine, sink, topic, schema=database.schema)

    def begin(batch: str, topic: str = "orders", way: Way = Way.WHOLE) -> None:
        ledger.begin(engine, "sink", batch, replace(WHOLE, topic=topic, way=way))

    assert newest() is None
    begin("2")
    assert newest() is None
    record(engine, ledger, "2", WHOLE_BATCH, rows=1, of=1)
    assert newest() == "2"
    begin("1", way=Way.PARTITIONS)
    record(engine, ledger, "1", 0, rows=1, of=1)
    assert newest() == "1"
    begin("without rows")
    record(engine, ledger, "without rows", WHOLE_BATCH, of=1)
    begin("other topic", topic="%orders")
    record(engine, ledger, "other topic", WHOLE_BATCH, rows=1, of=1)
    record(engine, ledger, "other sink", WHOLE_BATCH, rows=1, of=1, sink="other")
    assert (newest(), newest("%orders"), newest("order_")) == ("1", "other topic", None)
    record(engine, ledger, "of an older version", WHOLE_BATCH, rows=1, of=1)
    assert newest() == "of an older version"
    assert newest(sink="other") == "other sink"


def test_a_batch_written_partition_by_partition(database: Database, engine: Engine, ledger: Ledger) -> None:
    before = now(engine)
    record(engine, ledger, "b", BEGUN)
    begun = only(database, engine)
    assert (begun.phase, begun.written_partitions, begun.partition_count, begun.row_count) == ("writing", 0, 2, 0)
    assert begun.started_at is not None
    assert before <= begun.started_at <= now(engine)
    assert (begun.decided_at, begun.completed_at, begun.decided_after_s) == (None, None, None)

    record(engine, ledger, "b", 0, rows=10, started_at=now(engine))
    half = only(database, engine)
    assert (half.phase, half.written_partitions, half.row_count, half.message_count) == ("writing", 1, 10, 20)

    record(engine, ledger, "b", 1, rows=5, started_at=now(engine))
    decided = only(database, engine)
    assert (decided.phase, decided.row_count, decided.message_count) == ("decided", 15, 30)
    assert decided.started_at == begun.started_at
    assert decided.decided_at is not None
    assert decided.decided_after_s == pytest.approx((decided.decided_at - begun.started_at).total_seconds(), abs=0.001)

    ledger.complete(engine, "sink", "b", BEGUN)
    completed = only(database, engine)
    assert completed.phase == "completed"
    assert completed.completed_at is not None
    assert decided.decided_at <= completed.completed_at
    assert completed.completed_after_s == pytest.approx(
        (completed.completed_at - begun.started_at).total_seconds(), abs=0.001
    )


def test_a_batch_decided_as_one(database: Database, engine: Engine, ledger: Ledger) -> None:
    begun = now(engine) - timedelta(seconds=60)
    record(engine, ledger, "b", WHOLE_BATCH, rows=1_000_000, of=64, started_at=begun)
    ledger.complete(engine, "sink", "b", WHOLE_BATCH, decided_ago_s=10.0)
    batch = only(database, engine)
    assert (batch.phase, batch.partition_count, batch.written_partitions) == ("completed", 64, 64)
    assert (batch.row_count, batch.message_count) == (1_000_000, 2_000_000)
    assert batch.started_at == begun
    assert batch.completed_at is not None
    assert batch.decided_at is not None
    # SQLite's clock has milliseconds.
    assert abs(batch.completed_at - batch.decided_at - timedelta(seconds=10)) <= timedelta(milliseconds=2)
    assert batch.decided_after_s is not None
    assert batch.completed_after_s == pytest.approx(batch.decided_after_s + 10, abs=0.005)


def test_a_batch_whose_run_has_failed_is_shown_until_it_is_written(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    ledger.fail(engine, "sink", "b")  # never begun: nothing to note it in
    ledger.begin(engine, "sink", "b", WHOLE)
    begun = only(database, engine)
    assert (begun.phase, begun.written_partitions, begun.failed_at) == ("writing", 0, None)
    ledger.fail(engine, "sink", "b")
    failed = only(database, engine)
    assert failed.phase == "failed"
    assert failed.failed_at is not None
    assert begun.started_at == failed.started_at <= failed.failed_at  # type: ignore[operator]

    ledger.begin(engine, "sink", "b", WHOLE)
    assert only(database, engine) == begun  # it is retried
    ledger.fail(engine, "sink", "b")  # another run of it
    record(engine, ledger, "b", WHOLE_BATCH, rows=5, of=4, started_at=now(engine))
    decided = only(database, engine)
    assert (decided.phase, decided.partition_count, decided.failed_at) == ("decided", 4, None)
    assert decided.started_at is not None
    assert begun.started_at is not None
    assert decided.started_at > begun.started_at  # of the run that has written it


def test_the_moment_of_a_decision_is_not_the_begin_of_its_transaction(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    with engine.connect() as connection:
        ledger.seen(connection, "sink", "b", WHOLE_BATCH)  # begins it
        later = now(database.engine())
        ledger.insert(connection, "sink", "b", WHOLE_BATCH, row_count=0, message_count=0, partition_count=1)
        connection.commit()
    decided_at = only(database, engine).decided_at
    assert decided_at is not None
    assert decided_at >= later


def test_completion_is_noted_once_and_only_of_what_is_there(database: Database, engine: Engine, ledger: Ledger) -> None:
    ledger.complete(engine, "sink", "b", WHOLE_BATCH)
    assert not read_batches(engine, schema=database.schema)
    record(engine, ledger, "b", WHOLE_BATCH)
    record(engine, ledger, "other", WHOLE_BATCH)
    ledger.complete(engine, "sink", "b", WHOLE_BATCH, decided_ago_s=1.0)
    first = read_batches(engine, schema=database.schema)
    ledger.complete(engine, "sink", "b", WHOLE_BATCH, decided_ago_s=0.0)
    assert read_batches(engine, schema=database.schema) == first
    assert {batch.batch_id: batch.phase for batch in first} == {"b": "completed", "other": "decided"}


def test_rows_of_an_older_library_are_shown_without_what_it_did_not_record(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    record(engine, ledger, "old", WHOLE_BATCH, rows=3)
    batch = only(database, engine)
    assert (batch.phase, batch.row_count) == ("decided", 3)
    assert batch.decided_at is not None
    assert (batch.started_at, batch.decided_after_s) == (None, None)


def test_the_newest_batches_in_the_order_in_which_they_began(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    begun = now(engine)
    for number in (2, 0, 3, 1):
        record(engine, ledger, f"b{number}", WHOLE_BATCH, started_at=begun + timedelta(seconds=number))
    record(engine, ledger, "b9", WHOLE_BATCH, sink="another", started_at=begun)

    def names(**selection: object) -> list[str]:
        return [batch.batch_id for batch in read_batches(engine, schema=database.schema, **selection)]  # type: ignore[arg-type]

    assert names(sink="sink") == ["b0", "b1", "b2", "b3"]
    assert names(sink="sink", limit=2) == ["b2", "b3"]
    assert names(sink="another") == ["b9"]
    assert len(names()) == 5


def test_a_missing_view_names_the_command(database: Database, engine: Engine) -> None:
    prefix = database.state_table.removesuffix("kafka_transaction_state")
    database.execute(f"DROP VIEW {prefix}dualwrite_batch")
    with pytest.raises(ConfigurationError, match="dualwrite migrate"):
        read_batches(engine, schema=database.schema)


def command(database: Database, *arguments: str) -> Result:
    schema = [] if database.schema is None else ["--schema", database.schema]
    return CliRunner().invoke(commands, ["batches", *arguments, *schema], env={"DUALWRITE_DATABASE_URL": database.url})


def test_the_command_shows_the_same(database: Database, engine: Engine, ledger: Ledger) -> None:
    begun = now(engine) - timedelta(seconds=100)
    record(engine, ledger, "whole", WHOLE_BATCH, rows=1_000_000, of=64, started_at=begun)
    ledger.complete(engine, "sink", "whole", WHOLE_BATCH, decided_ago_s=10.0)
    record(engine, ledger, "half", BEGUN)
    record(engine, ledger, "half", 1, rows=7, started_at=now(engine))
    record(engine, ledger, "other", WHOLE_BATCH, sink="another", started_at=now(engine))

    table = command(database)
    assert table.exit_code == 0, table.output
    lines = {
        line.split()[1]: line.split() for line in table.stdout.splitlines() if line.startswith(("sink ", "another"))
    }
    assert lines["whole"][:8] == ["sink", "whole", "completed", "64", "of", "64", "1,000,000", "2,000,000"]
    assert lines["half"][:8] == ["sink", "half", "writing", "1", "of", "2", "7", "14"]
    assert "3 batches, 1 not all written, 1,000,007 rows" in table.stdout

    document = json.loads(command(database, "sink", "--json").stdout)
    assert [batch["batch_id"] for batch in document["batches"]] == ["whole", "half"]
    assert datetime.fromisoformat(document["batches"][0]["started_at"]) == begun
    assert 89 <= document["batches"][0]["decided_after_s"] <= document["batches"][0]["completed_after_s"] - 9
    assert document["batches"][1]["decided_at"] is None

    assert "1 batches" in command(database, "--last", "1").stdout
    assert "3 batches" in command(database, "--last", "1", "--all").stdout


def test_a_batch_at_which_nobody_works_any_more_is_shown_with_the_moment_of_its_last_sign(
    database: Database, engine: Engine, ledger: Ledger
) -> None:
    begun_at = now(engine) - timedelta(hours=2)
    written_at = begun_at + timedelta(minutes=9)
    for name in ("deserted", "leased", "begun again", "of a stream", "young", "failed"):
        ledger.begin(engine, name if "stream" in name else "sink", name, WHOLE)
    record(engine, ledger, "deserted", 0, of=1)  # of two
    table = database.tables.ledger
    with engine.begin() as connection:
        connection.execute(table.update().where(table.c.batch_id != "young").values(written_at=begun_at))
        connection.execute(table.update().where(table.c.partition_id == 0).values(written_at=written_at))
        connection.execute(table.update().where(table.c.partition_id == BEGUN).values(partition_count=2))
    ledger.fail(engine, "sink", "failed")
    Runs(engine, database.schema).replace("sink", "begun again")
    for sink, name in (("sink", "leased"), ("of a stream", stream_name("0123"))):
        SlotPool(engine, pool_of_sink(sink), schema=database.schema).lease(f"{owner_prefix(name)}task", 600)

    found = read_nobody_at_work(engine, read_batches(engine, schema=database.schema), schema=database.schema)
    assert found == {("sink", "deserted"): written_at}

    shown = f"writing, nobody at work since {written_at:%Y-%m-%d %H:%M:%S}"
    assert shown in " ".join(command(database).stdout.split())
    document = json.loads(command(database, "sink", "--json").stdout)
    since = {batch["batch_id"]: batch["nobody_at_work_since"] for batch in document["batches"]}
    assert since.pop("deserted") == written_at.isoformat()
    assert not any(since.values())


def test_the_picture_holds_the_rows_of_the_ledger(
    database: Database, engine: Engine, ledger: Ledger, tmp_path: Path
) -> None:
    begun = now(engine) - timedelta(seconds=1000)
    for number in range(10):
        record(engine, ledger, f"b{number}", WHOLE_BATCH, rows=1000, started_at=begun + timedelta(seconds=number))
        ledger.complete(engine, "sink", f"b{number}", WHOLE_BATCH, decided_ago_s=998.0 - number)
    record(engine, ledger, "unfinished", BEGUN, sink="another")
    points = throughput.rates(read_batches(engine, schema=database.schema), begun)
    area = sum((right[0] - left[0]) * left[1] for left, right in itertools.pairwise(points))
    assert area == pytest.approx(10_000, rel=0.001)  # also where batches overlap

    out = tmp_path / "throughput.svg"
    schema = [] if database.schema is None else ["--schema", database.schema]
    done = subprocess.run(
        [sys.executable, throughput.__file__, "--url", database.url, "--out", str(out), *schema],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "10 batches drawn into throughput.svg\n"
    drawn = ET.parse(out)
    assert "10,000 rows in 10 batches" in (drawn.findtext("{*}text") or "")
    assert len(drawn.findall("{*}polyline")) == 1


def test_a_ledger_without_moments_gives_no_picture(database: Database, engine: Engine, ledger: Ledger) -> None:
    record(engine, ledger, "old", WHOLE_BATCH, rows=3)
    with pytest.raises(SystemExit, match="no decided batch"):
        throughput.picture(read_batches(engine, schema=database.schema))
