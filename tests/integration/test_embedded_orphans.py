"""A test process that is killed takes its servers and their directories with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.testing import EmbeddedPostgres

# Says where its server is, and waits to be killed. A fork that lives on keeps the parent's pipes open.
VICTIM = """
import os, signal, sys
from dualwrite.testing import {server} as Server
server = Server()
server.start()
{before}
fork = 0
if {fork}:
    fork = os.fork()
    if fork == 0:
        os.close(1)
        os.close(2)
        signal.pause()
process = server._members[0].process if hasattr(server, "_members") else server._process
print(process.pid or 0, fork, process.directory, flush=True)
signal.pause()
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("server", "fork"),
    [
        pytest.param("EmbeddedKafka", False, id="kafka-", marks=pytest.mark.kafka),
        pytest.param(
            "EmbeddedKafka", True, id="kafka-with a fork that lives on", marks=[pytest.mark.kafka, pytest.mark.thorough]
        ),
        pytest.param("EmbeddedPostgres", False, id="postgresql-", marks=[pytest.mark.postgresql, pytest.mark.thorough]),
        pytest.param("EmbeddedPostgres", True, id="postgresql-with a fork that lives on", marks=pytest.mark.postgresql),
    ],
)
def test_a_killed_parent_takes_its_server_along(server, fork):
    check_that_a_kill_leaves_nothing(VICTIM.format(server=server, fork=fork, before=""))


@pytest.mark.parametrize(
    "before", ["server.kill()", "server._process.signal(signal.SIGSTOP)"], ids=["killed", "suspended"]
)
def test_a_killed_parent_takes_along_a_server_that_does_not_run(before):
    check_that_a_kill_leaves_nothing(VICTIM.format(server="EmbeddedPostgres", fork=False, before=before))


def check_that_a_kill_leaves_nothing(script):
    victim = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid, fork, directory = victim.stdout.readline().split()
    try:
        assert Path(directory).is_dir()
        victim.kill()
        # Whatever cleans up has inherited these pipes: they end when it has ended.
        _, said = victim.communicate(timeout=120)
    finally:
        if int(fork):
            os.kill(int(fork), signal.SIGKILL)
    assert said == ""
    assert int(pid) == 0 or not alive(int(pid))
    assert not Path(directory).exists()


@pytest.mark.postgresql
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing ends a server whose parent died")
def test_a_server_dies_with_the_process_that_holds_it():
    with EmbeddedPostgres() as server:
        pid, directory = server._process.pid, server._process.directory
        ended = os.pidfd_open(pid)
        server._process._warden.kill()
        assert select.select([ended], [], [], 30)[0] == [ended]
        os.close(ended)
        with pytest.raises(IllegalStateError, match="was killed"):
            server.kill()
    assert not directory.exists()


@pytest.mark.postgresql
def test_a_fork_can_neither_stop_nor_close_its_parents_server():
    with EmbeddedPostgres() as server:
        child = os.fork()
        if child == 0:
            try:
                server.kill()
            except IllegalStateError as error:
                server.close()
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert server.running
        server.create_database("alive")
