"""Wheels of three versions write side by side while the tables are migrated, and migrated back: nothing is lost or one-sided.

The wheel *before* is built from the last commit that took the tables of its own version alone, *now* from this tree, and *next*
from this tree with one more migration.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.expanding import LATER
from harness.patience import PATIENCE_S, wait_until
from sqlalchemy import create_engine, text

from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]
BEFORE = "d351f3308463d7c5099ad62be4edb5cb9e7241a8"
PARTS = ("dualwrite", "sinks", "migrations", "pyproject.toml", "README.md", "LICENSE")
NEXT = f'''"""A note beside each row."""

import sqlalchemy as sa

revision = "{LATER}"
down_revision = "{SCHEMA_REVISION}"
branch_labels = None
depends_on = None
TABLES = ("kafka_transaction_state", "dualwrite_lease", "dualwrite_incident")


def upgrade(op, schema):
    for name in TABLES:
        op.add_column(name, sa.Column("later_note", sa.String(10)), schema=schema)


def downgrade(op, schema):
    for name in TABLES:
        op.drop_column(name, "later_note", schema=schema)
'''
WRITE = """
import json, sys, threading
from sqlalchemy import create_engine, text
import dualwrite
site, kafka, url, name, topic = sys.argv[1:]
assert dualwrite.__file__.startswith(site), dualwrite.__file__
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
number = 0
def work(tx):
    tx.connection.execute(text("INSERT INTO written VALUES (:id)"), {"id": f"{name} {number}"})
    tx.produce(topic, value=f"{name} {number}")
with dualwrite.DualWriter(name, kafka=json.loads(kafka), database=create_engine(url)) as writer:
    while not stop.wait(0.02):  # several of them must leave the processors to those that start
        number += 1
        writer.run(work)
        print(number, flush=True)
"""
COMMAND = "from dualwrite.cli.options import commands; commands()"


def started_in(site):
    """For a process that has the wheel at that site, and not this tree, which would be found first in its directory."""
    return {"env": {**os.environ, "PYTHONPATH": str(site)}, "cwd": site}


def built(source, folder):
    """The place of what the wheel of that source holds."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", source]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    zipfile.ZipFile(next((folder / "dist").glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE, *PARTS], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(
            f"LEFT OUT: the history here does not hold {BEFORE}, of which the wheel before is built (a shallow clone?)"
        )
    (folder / "source").mkdir()
    subprocess.run(["tar", "-x", "-C", folder / "source"], input=archive.stdout, check=True)
    return built(folder / "source", folder)


@pytest.fixture(scope="module")
def now(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("now"))


@pytest.fixture(scope="module")
def following(tmp_path_factory):
    folder = tmp_path_factory.mktemp("next")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    (source / "migrations" / "versions" / f"{LATER}_later.py").write_text(NEXT)
    schema = source / "dualwrite" / "stores" / "sql" / "schema.py"
    declared = f'SCHEMA_REVISION: Final = "{SCHEMA_REVISION}"'
    assert declared in schema.read_text()
    schema.write_text(schema.read_text().replace(declared, f'SCHEMA_REVISION: Final = "{LATER}"'))
    return built(source, folder)


class Writer:
    """A process that writes until it is stopped, with the wheel at that site."""

    def __init__(self, site, kafka, url, name, topic):
        words = [sys.executable, "-c", WRITE, str(site), json.dumps(kafka), url, name, topic]
        self.process = subprocess.Popen(
            words,
            **started_in(site),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.name, self.written, self.said = name, 0, ""
        self.threads = [threading.Thread(target=self._count), threading.Thread(target=self._listen)]
        for thread in self.threads:
            thread.start()

    def _count(self):
        for line in self.process.stdout:
            self.written = int(line)

    def _listen(self):
        self.said = self.process.stderr.read()

    def writes_on(self, more=5):
        """Wait until it has written more."""
        aim = self.written + more
        wait_until(lambda: self.written >= aim or self.process.poll() is not None)
        assert self.written >= aim, f"{self.name}: {self.said}"

    def ended(self):
        """Wait for its end, and return its exit code."""
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        for thread in self.threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return self.process.returncode


def command(site, *words):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], **started_in(site), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_programs_of_neighbouring_versions_write_through_a_migration_and_back(
    before, now, following, kafka, dualwrite_database, dualwrite_topic
):
    url, topic = dualwrite_database, dualwrite_topic
    command(before, "migrate", "--url", url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (id VARCHAR(40) PRIMARY KEY)"))
    with ExitStack() as later:

        def start(site, name):
            writer = Writer(site, kafka, url, name, topic)
            later.callback(writer.ended)
            writer.writes_on()
            return writer

        writers = [start(before, "before"), start(now, "now")]
        assert f"now at {LATER}" in command(following, "migrate", "--url", url)
        writers += [start(now, "now on later tables"), start(following, "next")]
        for writer in writers:
            writer.writes_on()
        assert f"already at {LATER}" in command(now, "migrate", "--url", url)

        refused = Writer(before, kafka, url, "refused", topic)
        assert refused.ended() != 0
        assert re.search(rf"of version {LATER}, this library knows only {SCHEMA_REVISION}", refused.said)

        killed = writers.pop(0)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(PATIENCE_S)
        command(now, "recover", "before", "--url", url, *(f"-X{key}={value}" for key, value in kafka.items()))

        assert f"now at {SCHEMA_REVISION}" in command(
            following, "migrate", "--url", url, "--downgrade", "--revision", SCHEMA_REVISION
        )
        writers += [start(before, "before again"), start(now, "now again"), start(following, "next again")]
        for writer in writers:
            writer.writes_on()
        for writer in writers:
            assert writer.ended() == 0, writer.said
    with engine.connect() as connection:
        rows = sorted(connection.execute(text("SELECT id FROM written")).scalars())
    engine.dispose()
    assert rows == sorted(record.value.decode() for record in read_committed(kafka, topic))
    assert len(rows) >= 50
