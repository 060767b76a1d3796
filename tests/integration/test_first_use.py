"""The first dual write of a process loads what it uses, and no more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_USE = """
import json, sys
from dualwrite import DualWriter
url, topic, name, engine = sys.argv[1:5]
with DualWriter(name, kafka={**json.loads(sys.argv[5]), "dualwrite.engine": engine}, database=url) as writer:
    with writer.transaction() as tx:
        tx.connection.exec_driver_sql("INSERT INTO orders (id, note) VALUES (1, 'first')")
        tx.produce(topic, b"first", key=b"1")
    loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    with writer.transaction() as tx:  # what was left out comes with its first use
        tx.session.connection().exec_driver_sql("UPDATE orders SET note = 'second'")
print(json.dumps(loaded))
"""
NEVER = (
    "alembic", "click", "dualwrite.cli", "dualwrite.kafka.abandoned", "dualwrite.kafka.blocking",
    "dualwrite.kafka.listing", "dualwrite.kafka.security", "dualwrite.migrations", "dualwrite.protocol.members",
    "dualwrite.recovery.recover", "dualwrite.sinks", "dualwrite.stores.sql.adopted",
    "dualwrite.stores.sql.asyncpg_driver", "dualwrite.stores.sql.ledger", "dualwrite.stores.sql.operators",
    "dualwrite.stores.sql.outbox", "dualwrite.stores.sql.postgresql_outbox", "dualwrite.stores.sql.waiting_rows",
    "dualwrite.testing", "dualwrite.writing.group_commit", "dualwrite.writing.opening", "dualwrite.writing.sender", "numpy",
    "pandas", "pyarrow", "pyspark", "rich", "sqlalchemy.dialects.mysql", "sqlalchemy.orm",
)  # fmt: skip
MOST_LINES = 28_000
"""Of this library. On 2026-11-28 the native engine on PostgreSQL loaded 27,760, in 65 modules."""
LEFT_OUT = {
    "native": (
        "confluent_kafka",
        "dualwrite.kafka.kafka_python",
        "dualwrite.kafka.librdkafka.producer",
        "dualwrite.kafka.log",
        "kafka",
    ),
    "librdkafka": ("cramjam", "dualwrite.kafka.native.producer"),
    "postgresql": ("dualwrite.stores.sql.sqlite", "sqlalchemy.dialects.sqlite"),
    "sqlite": ("dualwrite.stores.sql.postgresql", "psycopg"),
}


@pytest.mark.parametrize(
    ("producer_engine", "url"),
    [
        ("native", "postgresql"),
        ("librdkafka", "sqlite"),
        pytest.param("native", "sqlite", marks=pytest.mark.thorough),
        pytest.param("librdkafka", "postgresql", marks=pytest.mark.thorough),
    ],
    indirect=["url"],
)
def test_the_first_dual_write_loads_only_its_engines(
    dualwrite_kafka, dualwrite_topic, url, engine, kafka_id, producer_engine
):
    kafka = json.dumps(dict(dualwrite_kafka.client_config()))
    shown = engine.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, shown, dualwrite_topic, kafka_id, producer_engine, kafka],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert {"dualwrite.writing.writer", "sqlalchemy"} <= loaded.keys()
    unused = {*NEVER, *LEFT_OUT[producer_engine], *LEFT_OUT[engine.url.get_backend_name()]}
    assert sorted(unused & loaded.keys()) == []
    ours = {name: Path(file) for name, file in loaded.items() if name.partition(".")[0] == "dualwrite" and file}
    lines = sum(len(file.read_text().splitlines()) for file in ours.values())
    assert 20_000 < lines < MOST_LINES, f"{lines} lines in {len(ours)} modules"
