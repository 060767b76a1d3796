"""docs/from-an-outbox.md as it stands: an outbox table gives way to dual writes while orders are placed, and comes back."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S, wait_until
from harness.places import ROOT
from sqlalchemy import create_engine, inspect, text

from dualwrite import DualWriter
from dualwrite.testing import read_committed

PAGE = (ROOT / "docs" / "from-an-outbox.md").read_text(encoding="utf-8")
CUSTOMERS = ("anna", "bert", "cleo")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands():
    """The page's commands, in order."""
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


class Reader:
    """Somebody who follows the page, with servers and a topic of their own."""

    def __init__(self, place, url, kafka, topic):
        self.engine, self.kafka, self.topic, self.place = create_engine(url), kafka, topic, place
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "URL": url,
            "BROKERS": kafka["bootstrap.servers"],
        }
        names = {}
        self.versions = []
        for code in blocks("python"):
            exec(compile(code.replace('"orders"', f'"{topic}"'), "the page", "exec"), names)
            self.versions.append(names["place_order"])
        self.placed = dict.fromkeys(CUSTOMERS, 0)
        self.number = 0

    def starts(self, command):
        ours = command.replace("--topic orders", f"--topic {self.topic}")
        return subprocess.Popen(
            ["bash", "-c", f"exec {ours}"],
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def runs(self, command):
        process = self.starts(command)
        printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{command}\n{printed}"

    @contextmanager
    def relay(self, command):
        process = self.starts(command)
        try:
            yield process
            assert process.poll() is None, "the relay has ended by itself"
        finally:
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, printed

    def sql(self, block):
        with self.engine.begin() as connection:
            for statement in filter(str.strip, block.split(";")):
                connection.execute(text(statement))

    def places(self, count, *versions, writer=None):
        """Place orders, one after the other, each by one of these versions of the program."""
        chosen = random.Random(count)
        for _ in range(count):
            customer = chosen.choice(CUSTOMERS)
            version = chosen.choice(versions)
            event = json.dumps({"number": self.placed[customer]})
            version(self.engine if version is self.versions[0] else writer, self.number, customer, event)
            self.placed[customer] += 1
            self.number += 1

    def waiting(self):
        with self.engine.connect() as connection:
            return connection.scalar(text("SELECT count(*) FROM outbox_events"))

    def is_whole(self):
        """Every order has one event, and those of a customer stand in their order."""
        found = {customer: [] for customer in CUSTOMERS}
        for record in read_committed(self.kafka, self.topic):
            found[record.key.decode()].append(json.loads(record.value)["number"])
        assert found == {customer: list(range(count)) for customer, count in self.placed.items()}
        with self.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM orders")) == self.number


@pytest.mark.postgresql
@pytest.mark.kafka
def test_the_page_as_it_stands(tmp_path, dualwrite_kafka_config, dualwrite_database, dualwrite_topic):
    reader = Reader(tmp_path, dualwrite_database, dualwrite_kafka_config, dualwrite_topic)
    export, migrate, relay, last_rows, recover, status, leave = commands()
    assert export.startswith("export BROKERS=")
    table, columns = blocks("sql")
    before, between, after = reader.versions

    reader.sql("CREATE TABLE orders (id integer PRIMARY KEY)")
    reader.sql(table)
    reader.places(5, before)
    reader.runs(migrate)
    reader.sql(columns)
    reader.places(5, before)
    with DualWriter("orders", kafka=reader.kafka, database=reader.engine) as writer:
        with reader.relay(relay):
            reader.places(20, before)
            wait_until(lambda: reader.waiting() == 0)
            reader.places(120, before, between, writer=writer)
            reader.places(20, between, writer=writer)
        reader.places(1, before)
        reader.runs(last_rows)
        assert reader.waiting() == 0
        reader.places(20, after, writer=writer)
        reader.is_whole()

        with reader.relay(relay):
            reader.places(60, between, before, writer=writer)
            reader.places(10, before)
            wait_until(lambda: reader.waiting() == 0)
    reader.is_whole()
    for command in (recover, status, leave):
        reader.runs(command)
    assert set(inspect(reader.engine).get_table_names()) == {"orders", "outbox_events", "dualwrite_version"}
    reader.engine.dispose()
