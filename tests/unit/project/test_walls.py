"""The import contracts: each of them breaks when a module imports what it may not, though for type checkers alone."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from harness.places import PROOF, ROOT

LINT = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; lint_imports_command()"
PLANTED = {
    "the rooms point one way": ("errors", "dualwrite.clock"),
    "runtime: deadlines over waits": ("runtime/waiting", "dualwrite.clock"),
    "the protocol: batches and decisions over values, tables on their own": (
        "protocol/naming",
        "dualwrite.protocol.settle",
    ),
    "recovery: calls for people over recipes": ("recovery/reported", "dualwrite.recovery.recover"),
    "recovery: settling over looking": ("recovery/settling/look_back", "dualwrite.recovery.settle"),
    "a process: groups over what may run again": ("protocol/process/redo", "dualwrite.protocol.grouping"),
    "writing: the writer over one dual write over lanes": ("writing/lanes/turns", "dualwrite.writing.writer"),
    "a block: its transaction over one dual write": ("writing/blocks/sending", "dualwrite.writing.transaction"),
    "the consumer: one loop over reading and working": (
        "apps/consumer/offsets",
        "dualwrite.consumer.reading",
    ),
    "tasks run the protocol that threads run": ("apps/async_writer", "dualwrite.protocol.settle"),
    "units: images over records": ("units/records", "dualwrite.units.image"),
    "the rules of units are pure": ("units/image", "time"),
    "telemetry: the observer over what it records": ("telemetry/names", "dualwrite.telemetry.observer"),
    "group: who waits over one group's units": ("writing/group/results", "dualwrite.writing.group_commit"),
    "state: the store over its databases over what is pure": ("state/uncommitted", "dualwrite.state.store"),
    "scans and uncommitted writes are pure": ("state/scans", "os"),
    "lanes: the pool over lanes": ("writing/lanes/losses", "dualwrite.writing.lane"),
    "kafka: producers over what looks at them from outside": ("kafka/config", "dualwrite.kafka.coordinator"),
    "kafka: verbs over engines": ("kafka/producer/ends", "dualwrite.kafka.producer"),
    "native: the rules of the wire over the bytes of batches": (
        "kafka/producer/native/records/partitioners",
        "dualwrite.kafka.native.produce_state",
    ),
    "filling: messages over their contents": (
        "kafka/producer/native/filling/sticky",
        "dualwrite.kafka.native.accumulator",
    ),
    "coordinating: producer ids over requests over their messages": (
        "kafka/producer/native/coordinating/offsets",
        "dualwrite.kafka.native.coordination",
    ),
    "wire: a transaction over its partitions over the meaning of answers": (
        "kafka/producer/native/wire/answers",
        "dualwrite.kafka.native.produce_state",
    ),
    "the rules of the wire are pure": ("kafka/producer/native/wire/partition", "threading"),
    "records: batches over their bytes": (
        "kafka/producer/native/records/compression",
        "dualwrite.kafka.native.records",
    ),
    "records need no Arrow": ("kafka/producer/native/records/varints", "numpy"),
    "records are bytes alone": ("kafka/producer/native/records/body", "socket"),
    "kafka: questions over connections": ("kafka/coordinator/network", "dualwrite.kafka.coordinator"),
    "stores: each kind of database over what they share": ("stores/keyed/keys", "dualwrite.stores.keyed.rocksdb"),
    "SQL: the state and the rows of batches over one database": (
        "stores/sql/participants",
        "dualwrite.stores.sql.store",
    ),
    "dialects: each database over what they share": (
        "stores/sql/dialects/dialect",
        "dualwrite.stores.sql.sqlite",
    ),
    "drivers: what a connection shows over its statements": (
        "stores/sql/drivers/awaited",
        "dualwrite.stores.sql.drivers",
    ),
    "access: connections over failures": ("stores/sql/access/grants", "dualwrite.stores.sql.access"),
    "tables: rows over what is declared": ("stores/sql/tables/clock", "dualwrite.stores.sql.tables"),
    "zookeeper: the database over its requests": (
        "stores/zookeeper/session",
        "dualwrite.stores.keyed.zookeeper",
    ),
    "sinks: engines over the decision on a batch": ("sinks/batches", "dualwrite.sinks.spark.api"),
    "the decision on a batch needs no writer": ("sinks/batches", "dualwrite.writing.lane"),
    "the Spark sinks: two ways over what both share": (
        "sinks/spark/options",
        "dualwrite.sinks.spark.schema_parts",
    ),
    "the Spark sinks: each kind of database over what they share": (
        "sinks/spark/databases/postgresql",
        "dualwrite.sinks.spark.databases.mariadb",
    ),
    "the pure core imports no driver and does no I/O": ("protocol/settling/settle", "sqlalchemy"),
    "the ports import no driver": ("ports/store", "psycopg"),
    "the simulated broker is pure": ("../simulator/broker", "time"),
}


def contracts():
    return re.findall(r'^name = "(.*?)"(?: #.*)?\ntype = ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.fixture
def tree(tmp_path):
    """The source tree as it is installed."""
    package = tmp_path / "dualwrite"
    ignored = shutil.ignore_patterns("__pycache__", "spark_discovery")
    for folder, place in (("dualwrite", "."), ("sinks", "sinks"), ("migrations", "migrations")):
        shutil.copytree(ROOT / folder, package / place, dirs_exist_ok=True, ignore=ignored)
    shutil.copytree(PROOF / "simulator", tmp_path / "simulator", ignore=ignored)
    return tmp_path


def test_every_contract_breaks_on_an_import_that_it_forbids(tree):
    assert sorted(PLANTED) == sorted(contracts())
    for module, imported in PLANTED.values():
        with (tree / "dualwrite" / f"{module}.py").open("a", encoding="utf-8") as file:
            file.write(f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {imported}\n")
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--config", ROOT / "pyproject.toml", "--no-cache"],
        cwd=tree, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Contracts: 0 kept" in done.stdout, (done.stdout, done.stderr)
    for name, (module, imported) in PLANTED.items():
        assert own_line(module, imported).search(told_of(name, done.stdout)), (name, done.stdout)


def told_of(name, output):
    """The report on one broken contract: from its heading to the next one."""
    return re.split(
        r"^.+\n-+\n", output.partition(f"\n\n{name}\n{'-' * len(name)}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]


def own_line(module, imported):
    """The chain of the planted import alone: a neighbour's plant may break the same contract by a longer one."""
    importer = module.removeprefix("../") if module.startswith("../") else f"dualwrite/{module}"
    names = rf"{re.escape(importer.replace('/', '.'))} -> {re.escape(imported)}"
    return re.compile(rf"^- +{names} \(l\.[\d, l.]+\)\n(?:\n|\Z)", re.MULTILINE)
