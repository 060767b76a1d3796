"""Every application example runs without arguments and prints what it says it shows."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from harness import class_archive
from harness.patience import PATIENCE_S
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.dialects import postgresql

from dualwrite import migrations
from dualwrite.testing import read_committed

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

PRINTED = {
    "async_orders.py": """\
placed:   90
refused:  10
rows:     90
messages: 90
""",
    "async_sessions.py": """\
200 1
409 {'detail': 'out of stock'}
200 3
rows:     {1: 'tea', 3: 'pot'}
messages: {1: 'tea', 3: 'pot'}
""",
    "order_service.py": """\
placed order 1: 2 x tea
refused: 500 x cup
placed order 3: 1 x pot
rows:     {1: 'tea', 3: 'pot'}
messages: {1: 'tea', 3: 'pot'}
""",
    "outage_orders.py": """\
placed order 1: tea, its message is in Kafka
Kafka is away
placed order 2: cup, its message waits
placed order 3: pot, its message waits
placed order 4: milk, its message waits
Kafka is back
placed order 5: sugar, its message is in Kafka
rows:     {1: 'tea', 2: 'cup', 3: 'pot', 4: 'milk', 5: 'sugar'}
messages: {1: 'tea', 2: 'cup', 3: 'pot', 4: 'milk', 5: 'sugar'}
""",
    "startup_recovery.py": """\
killed after the database commit: rows [1], Kafka transaction Ongoing
recovered: ['payments'] rolled forward
rows [1], messages [1]
""",
    "rocksdb_orders.py": """\
placed order 1: tea
refused order 2: no cup
killed: 2 orders in RocksDB, the last one's Kafka transaction is Ongoing
orders:   {'order/1': 'tea', 'order/3': 'tea'}
messages: {'order/1': 'tea', 'order/3': 'tea'}
tea left: 1
""",
    "mariadb_orders.py": """\
placed: rows {1: 'tea'}, messages {1: 'tea'}
refused: ALTER would have committed the rows of the dual write without its messages: it was not sent
aborted: rows {1: 'tea'}, messages {1: 'tea'}
killed after the database commit: Kafka transaction Ongoing
recovered: rows {1: 'tea', 2: 'pot'}, messages {1: 'tea', 2: 'pot'}
""",
    "offsets_as_rows.py": """\
member 0 has read 10 messages, and pauses
member 1 has taken over, and written 20
member 0 was taken over: it writes nothing, and continues from the row
rows: 20, messages: 20, written twice: 0
""",
    "consumer_service.py": """\
member 0 was killed: True
member 1 has settled it: 10 rows, 10 receipts
dead letter: b'a button', invalid literal for int() with base 10: b'a button'
""",
    "async_consumer.py": """\
cancelled: True
20 rows, 20 bills
dead letters: [b'a button']
""",
    "prometheus_metrics.py": """\
dualwrite_duration_seconds_count{dualwrite_outcome="aborted",dualwrite_writer="order-service"} 1.0
dualwrite_duration_seconds_count{dualwrite_outcome="committed",dualwrite_writer="order-service"} 2.0
dualwrite_lane_count{dualwrite_lane_state="idle",dualwrite_writer="order-service"} 3.0
dualwrite_lane_count{dualwrite_lane_state="unsettled",dualwrite_writer="order-service"} 0.0
dualwrite_lane_count{dualwrite_lane_state="used",dualwrite_writer="order-service"} 0.0
dualwrite_ready{dualwrite_writer="order-service"} 1.0
dualwrite_writes_total{dualwrite_outcome="aborted",dualwrite_writer="order-service"} 1.0
dualwrite_writes_total{dualwrite_outcome="committed",dualwrite_writer="order-service"} 2.0
""",
    "gunicorn_orders.py": """\
workers take: shop-0 shop-1 shop-2
one was killed, and another has taken its place
scaled out: 4 ids for 4 workers
scaled in: 3 ids for 3 workers
all replaced: 3 ids for 3 workers
ids are below shop-8: True
rows equal messages: True
""",
    "uvicorn_orders.py": """\
workers take: shop-0 shop-1
one was killed, and another has taken its place
rows equal messages: True
""",
    "celery_orders.py": """\
a worker process was killed: True
rows:     30
messages: 30
""",
    "zookeeper_flags.py": """\
changed to green
not changed to blue: BadVersionError, nothing announced
killed: True, the flag is red
recovered: 1 announcement
flag: red, changes: 2, announced: ['green', 'red']
""",
    "kip939_recipe.py": """\
event 1: written; recovery: nothing was ongoing
event 2: killed before the decision; recovery: aborted
event 3: killed after the decision; recovery: committed
rows [1, 3], messages [1, 3]
""",
    "counting_service.py": """\
member 0 was killed: True
member 1 has counted on: UA 552, B6 541, all 3000
counts equal input: True
""",
    "running_count.py": """\
the store stands at offset None, 0 records applied
killed
the store stands at offset 133, 11 records applied
ended with 0
UA 552, B6 541, all 3000
store equals input: True
messages equal input: True
""",
}


@pytest.mark.parametrize("example", PRINTED)
def test_example_prints_what_it_shows(request, example, dualwrite_kafka, dualwrite_postgres):
    mariadb = {}
    if example.startswith("mariadb"):
        mariadb = {"DUALWRITE_TEST_MARIADB": request.getfixturevalue("dualwrite_mariadb").url}
    servers = {
        **mariadb,
        "DUALWRITE_TEST_KAFKA": dualwrite_kafka.bootstrap_servers,
        "DUALWRITE_TEST_POSTGRES": dualwrite_postgres.url,
    }
    if example.startswith("outage"):
        del servers["DUALWRITE_TEST_KAFKA"]  # it stops a broker of its own
        servers |= class_archive.environment()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env=os.environ | servers,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED[example]


@pytest.mark.thorough
def test_offsets_as_rows_by_an_upsert_are_written_twice(dualwrite_kafka, dualwrite_postgres, monkeypatch):
    """The control: what the condition in the example is for."""
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", dualwrite_kafka.bootstrap_servers)
    monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", dualwrite_postgres.url)
    names = runpy.run_path(str(EXAMPLES / "offsets_as_rows.py"))
    offsets = names["OFFSETS"]

    def upsert(connection, topic, partition, *, expected, to):
        new = postgresql.insert(offsets).values(topic=topic, partition=partition, next_offset=to)
        connection.execute(new.on_conflict_do_update(index_elements=["topic", "partition"], set_={"next_offset": to}))

    names["main"].__globals__["move_offset"] = upsert
    with pytest.raises(AssertionError, match="written twice"):
        names["main"]()


def test_first_code_that_a_reader_copies_writes_to_both_sides(dualwrite_kafka, dualwrite_topic, dualwrite_database):
    engine = create_engine(dualwrite_database)
    with engine.connect() as connection:
        migrations.upgrade(connection)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\$ psql .* -c '(.*)'$", page, re.MULTILINE)
    with engine.begin() as connection:
        connection.execute(text(table))
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [code] = [block for block in blocks if "import DualWriter" in block]
    for shown, meant in {
        "postgresql+psycopg://localhost/shop": dualwrite_database,
        "localhost:9092": dualwrite_kafka.bootstrap_servers,
        'tx.produce("orders"': f'tx.produce("{dualwrite_topic}"',
    }.items():
        assert shown in code
        code = code.replace(shown, meant)
    exec(code, {})
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(text("SELECT id, item FROM orders"))]
    engine.dispose()
    messages = [record.value for record in read_committed(dualwrite_kafka.client_config(), dualwrite_topic)]
    assert rows == [(1, "tea")]
    assert messages == [b'{"id": 1, "item": "tea"}']


def test_the_code_of_the_page_on_consuming_writes_each_message_once(
    dualwrite_kafka, dualwrite_topic, migrated_database, monkeypatch
):
    page = (ROOT / "docs" / "consumer.md").read_text(encoding="utf-8")
    code, in_a_loop = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    compile(in_a_loop, "docs/consumer.md", "exec")  # examples/async_consumer.py runs the like of it
    topics = {name: dualwrite_kafka.create_topic(f"{dualwrite_topic}-{name}", 1) for name in ("receipts", "dead")}
    for shown, meant in {
        "postgresql+psycopg://app@localhost/shop": migrated_database,
        "localhost:9092": dualwrite_kafka.bootstrap_servers,
        '"payment-service"': f'"service-{dualwrite_topic}"',
        'topics=["payments"]': f'topics=["{dualwrite_topic}"]',
        '"receipts"': f'"{topics["receipts"]}"',
        '"payments-dead"': f'"{topics["dead"]}"',
        "consumer.run()": "consumer.run(max_messages=4)",
    }.items():
        assert shown in code
        code = code.replace(shown, meant)
    metadata = MetaData()
    payments = Table("payments", metadata, Column("id", Integer, primary_key=True))
    engine = create_engine(migrated_database)
    metadata.create_all(engine)
    producer = Producer(dualwrite_kafka.client_config())
    for value in ("1", "two", "3", "4"):
        producer.produce(dualwrite_topic, value=value)
    producer.flush()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    exec(code, {"insert": insert, "payments": payments})
    with engine.connect() as connection:
        rows = list(connection.scalars(select(payments.c.id).order_by(payments.c.id)))
    engine.dispose()
    written = {
        name: sorted(record.value for record in read_committed(dualwrite_kafka.client_config(), topic))
        for name, topic in topics.items()
    }
    assert rows == [1, 3, 4]
    assert written == {"receipts": [b"receipt 1", b"receipt 3", b"receipt 4"], "dead": [b"two"]}


@pytest.mark.longest
@pytest.mark.parametrize(
    "steps", ['STEPS = ["write.prepared", "write.decided"]', pytest.param("", marks=pytest.mark.thorough)]
)
def test_the_example_of_the_page_on_proving_a_pipeline_passes(tmp_path, steps):
    """It starts servers of its own, and kills them; and the pipeline at some of its steps, or at each, as it stands."""
    page = (ROOT / "docs" / "prove-your-own-pipeline.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in files] == ["pipeline.py", "test_pipeline.py"]
    for name, code in files:
        written, count = re.subn(r"^STEPS = .*$", steps or r"\g<0>", code, flags=re.MULTILINE)
        assert count == (name == "test_pipeline.py")
        (tmp_path / name).write_text(written, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | class_archive.environment(),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
