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
    "the floors point one way": ("errors", "dualwrite.clock"),
    "the protocol is pure": ("protocol/settle", "sqlalchemy"),
    "the interfaces import no driver": ("interfaces", "psycopg"),
    "tasks run the protocol that threads run": ("asyncio/writer", "dualwrite.protocol.settle"),
    "recovery: calls for people over recipes over looking": ("recovery/inspect", "dualwrite.recovery.settle"),
    "writing: the writer over one dual write over its transaction and its lane": (
        "writing/lane",
        "dualwrite.writing.writer",
    ),
    "kafka: the producer's verbs over engines over requests": ("kafka/config", "dualwrite.kafka.coordinator"),
    "the native engine's rules are pure": ("kafka/native/produce_state", "threading"),
    "record batches are bytes alone, and need no Arrow": ("kafka/native/records", "numpy"),
    "stores: the state over each database's ways over connections over tables": (
        "stores/sql/dialect",
        "dualwrite.stores.sql.sqlite",
    ),
    "images of units and entries of state stores are pure": ("units/records", "time"),
    "the decision on a batch needs no writer and no engine": ("sinks/batches", "dualwrite.writing.lane"),
    "the Spark sinks: two ways over what both share": ("sinks/spark/options", "dualwrite.sinks.spark.registry"),
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
