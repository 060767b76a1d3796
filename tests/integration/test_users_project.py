"""A project that uses the library, with tests that take every warning for an error, in a process of its own."""

import subprocess
import sys

import pytest
from harness.patience import PATIENCE_S

TEST = """
import os

from sqlalchemy import text

import dualwrite
from dualwrite import DualWriter, recover
from dualwrite.migrations import upgrade
from sqlalchemy import create_engine


def test_it_writes(tmp_path):
    engine = create_engine("sqlite:///" + str(tmp_path / "shop.db"))
    with engine.connect() as connection:
        upgrade(connection)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    kafka = {"bootstrap.servers": os.environ["KAFKA"]}
    with DualWriter("project", kafka=kafka, database=engine) as writer:
        with writer.transaction() as tx:
            tx.connection.execute(text("INSERT INTO orders VALUES (1)"))
            tx.produce(os.environ["TOPIC"], value="1")
    assert recover(kafka=kafka, database=engine).losses == []
    engine.dispose()
"""


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_warnings_may_be_errors_and_only_our_own_loggers_speak(tmp_path, kafka, url, dualwrite_kafka, dualwrite_topic):
    (tmp_path / "test_shop.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider"),
            *("-o", "log_cli=true", "--log-cli-level=INFO", "test_shop.py"),
        ],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "KAFKA": dualwrite_kafka.bootstrap_servers, "TOPIC": dualwrite_topic},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dualwrite.recovery.claim" in done.stdout
    assert "kafka.net" not in done.stdout
    assert "kafka.cluster" not in done.stdout
