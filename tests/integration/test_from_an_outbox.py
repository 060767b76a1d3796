"""docs/from-an-outbox.md as it stands: an outbox table gives way to dual writes while orders are placed, and comes back.

Each version of the program is a process of its own; two of them place orders of the same customers at the same time.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S, wait_until
from harness.places import ROOT
from sqlalchemy import create_engine, inspect, text

from dualwrite.testing import read_committed

PAGE = (ROOT / "docs" / "from-an-outbox.md").read_text(encoding="utf-8")
CUSTOMERS = ("anna", "bert", "cleo")
PROGRAM = """
import json, os, random, sys
from sqlalchemy import create_engine, text
from dualwrite import DualWriter

{code}

engine = create_engine(os.environ["URL"])
customers, draws = {customers}, random.Random({version})


def place_one(writes):
    # A customer places the next order when the last one has been placed, by whichever process.
    customer = draws.choice(customers)
    with engine.begin() as counting:
        numbers = counting.execute(
            text("UPDATE customers SET placed = placed + 1 WHERE name = :name RETURNING placed, nextval('orders_placed')"),
            {{"name": customer}},
        ).one()
        place_order(writes, numbers[1], customer, json.dumps({{"number": numbers[0], "by": {version}}}))


def serve(writes):
    print("ready", flush=True)
    for count in sys.stdin:
        for _ in range(int(count)):
            place_one(writes)
        print("placed", flush=True)


if {version} == 0:
    serve(engine)
else:
    with DualWriter("orders-{version}", kafka={{"bootstrap.servers": os.environ["BROKERS"]}}, database=engine) as writer:
        serve(writer)
"""


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
        code = [code.replace('"orders"', f'"{topic}"') for code in blocks("python")]
        self.versions = ["\n".join(code[: number + 1]) for number in range(3)]
        self.placed = 0

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

    @contextmanager
    def program(self, version):
        """A process of this version of the program, which places so many orders at a time as it reads."""
        code = PROGRAM.format(code=self.versions[version], customers=CUSTOMERS, version=version)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()
            process.communicate()

    def places(self, count, *programs):
        """Let each of these programs place so many orders, all at the same time."""
        for process in programs:
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        for process in programs:
            assert process.stdout.readline() == "placed\n"
            self.placed += count

    def waiting(self):
        with self.engine.connect() as connection:
            return connection.scalar(text("SELECT count(*) FROM outbox_events"))

    def is_whole(self):
        """Every order has one event, and those of a customer stand in their order. Returns which versions placed them."""
        found = {customer: [] for customer in CUSTOMERS}
        versions = set()
        for record in read_committed(self.kafka, self.topic):
            event = json.loads(record.value)
            found[record.key.decode()].append(event["number"])
            versions.add(event["by"])
        with self.engine.connect() as connection:
            counts = dict(connection.execute(text("SELECT name, placed FROM customers")).all())
            assert connection.scalar(text("SELECT count(*) FROM orders")) == self.placed == sum(counts.values())
        assert found == {customer: list(range(1, count + 1)) for customer, count in counts.items()}
        return versions


@pytest.mark.postgresql
@pytest.mark.kafka
def test_the_page_as_it_stands(tmp_path, dualwrite_kafka_config, dualwrite_database, dualwrite_topic):
    reader = Reader(tmp_path, dualwrite_database, dualwrite_kafka_config, dualwrite_topic)
    export, migrate, relay, last_rows, recover, status, leave = commands()
    assert export.startswith("export BROKERS=")
    table, columns = blocks("sql")
    reader.sql("CREATE TABLE orders (id integer PRIMARY KEY); CREATE SEQUENCE orders_placed")
    reader.sql("CREATE TABLE customers (name text PRIMARY KEY, placed integer DEFAULT 0)")
    reader.sql(f"INSERT INTO customers VALUES {', '.join(f'({name!r})' for name in CUSTOMERS)}")

    reader.sql(table)
    with ExitStack() as newer:
        with reader.program(0) as before:
            reader.places(5, before)
            reader.runs(migrate)
            reader.sql(columns)
            reader.places(5, before)
            with reader.relay(relay):
                reader.places(20, before)
                wait_until(lambda: reader.waiting() == 0)
                between = newer.enter_context(reader.program(1))
                reader.places(60, before, between)
                reader.places(20, between)
            reader.places(1, before)
        reader.runs(last_rows)
        assert reader.waiting() == 0
        with reader.program(2) as after:
            reader.places(10, between, after)
        assert reader.is_whole() == {0, 1, 2}

        with reader.relay(relay), reader.program(0) as before:
            reader.places(30, between, before)
            newer.close()
            reader.places(10, before)
            wait_until(lambda: reader.waiting() == 0)
    reader.is_whole()
    for command in (recover, status, leave):
        reader.runs(command)
    assert set(inspect(reader.engine).get_table_names()) == {
        "orders",
        "customers",
        "outbox_events",
        "dualwrite_version",
    }
    reader.engine.dispose()
