"""Servers in the background: ``make servers-up`` and ``make servers-down``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import class_archive
from harness.patience import PATIENCE_S

from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from dualwrite.testing.servers.embedded import accepts_connections

pytestmark = [pytest.mark.kafka, pytest.mark.postgresql]


def run(directory, command):
    done = subprocess.run(
        [sys.executable, "-m", "dualwrite.testing.servers", command],
        cwd=directory,
        env=os.environ | class_archive.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.fixture
def directory(tmp_path, monkeypatch):
    for variable in ("DUALWRITE_TEST_KAFKA", "DUALWRITE_TEST_POSTGRES"):
        monkeypatch.delenv(variable, raising=False)
    yield tmp_path
    run(tmp_path, "down")


def holder(directory):
    return json.loads((directory / ".cache" / "servers" / "state.json").read_text())["pid"]


@pytest.mark.thorough
def test_a_killed_holder_is_replaced(directory):
    first, _ = run(directory, "up")
    os.kill(holder(directory), signal.SIGKILL)
    assert run(directory, "up")[0] != first


def test_servers_stay_up_until_they_are_taken_down(directory, monkeypatch):
    exports, _ = run(directory, "up")
    assert run(directory, "up")[0] == exports
    state = Path(directory, ".cache", "servers", "state.json")
    assert state.stat().st_mode & 0o077 == 0, "the password is nobody else's business"
    for line in exports.splitlines():
        name, _, value = shlex.split(line)[1].partition("=")
        monkeypatch.setenv(name, value)
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        kafka.create_topic("there")
        postgres.create_database("there")
        ports = [int(kafka.bootstrap_servers.split(":")[1]), postgres.port]

    assert run(directory, "down") == ("", "stopped\n")
    assert not any(accepts_connections(port) for port in ports)
    assert run(directory, "down") == ("", "no servers run\n")
