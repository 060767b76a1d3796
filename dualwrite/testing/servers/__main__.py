"""Kafka and PostgreSQL in the background: ``python -m dualwrite.testing.servers up`` and ``down``.

``up`` prints the environment variables that make `EmbeddedKafka` and `EmbeddedPostgres`, and so the pytest fixtures,
use these servers instead of starting their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError, Unavailable, extra_missing

try:
    from dualwrite.testing.servers.databases import POSTGRES_SERVER_VARIABLE, EmbeddedPostgres
    from dualwrite.testing.servers.kafka import SERVERS_VARIABLE, EmbeddedKafka
except ModuleNotFoundError as error:
    sys.exit(str(extra_missing("testing", error)))

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE = Path(".cache", "servers")
UP_TIMEOUT_S = 300.0
DOWN_TIMEOUT_S = 60.0


def _try_lock(lock: TextIO) -> bool:
    """Whether no process holds the servers: their holder keeps this lock until it ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held() -> bool:
    with (STATE / "lock").open("w", encoding="utf-8") as lock:
        return not _try_lock(lock)


def hold() -> int:
    """Run both servers until SIGTERM."""
    with (STATE / "lock").open("w", encoding="utf-8") as lock:
        if not _try_lock(lock):
            return 0
        # Transactions may stay open as long as librdkafka allows: the setting recommended for your own brokers.
        timeouts = {"transaction.max.timeout.ms": "2147483647"}
        with EmbeddedPostgres() as postgres, EmbeddedKafka(properties=timeouts) as kafka:
            # From here on, wait for a signal; before, it simply ends this process, and the servers with it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            environment = {SERVERS_VARIABLE: kafka.bootstrap_servers, POSTGRES_SERVER_VARIABLE: postgres.url}
            state = STATE / "state.json"
            partial = state.with_suffix(".partial")
            partial.touch(mode=0o600)  # it holds a password
            partial.write_text(json.dumps({"pid": os.getpid(), "environment": environment}), encoding="utf-8")
            partial.rename(state)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
            state.unlink()
    return 0


def up() -> int:
    """Start the servers unless they run, and print the environment variables that lead to them."""
    STATE.mkdir(parents=True, exist_ok=True)
    state, log = STATE / "state.json", STATE / "log"
    if not _held():
        state.unlink(missing_ok=True)
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in {SERVERS_VARIABLE, POSTGRES_SERVER_VARIABLE}
        }
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "dualwrite.testing.servers", "hold"]
            holder = subprocess.Popen(command, env=own, stdout=output, stderr=output, start_new_session=True)
        deadline = Deadline(UP_TIMEOUT_S)
        while not state.exists():
            if holder.poll() is not None or deadline.expired:
                said = log.read_text(encoding="utf-8").strip()
                raise Unavailable(f"the servers did not start: {said}", next_step=f"see {log}")
            time.sleep(0.05)
        holder.returncode = 0  # it outlives this process, so never wait for it
    for name, value in json.loads(state.read_text(encoding="utf-8"))["environment"].items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


def down() -> int:
    """Stop the servers and delete their data, if they run."""
    state = STATE / "state.json"
    if not STATE.is_dir() or not _held() or not state.exists():
        sys.stderr.write("no servers run\n")
        return 0
    os.kill(json.loads(state.read_text(encoding="utf-8"))["pid"], signal.SIGTERM)
    deadline = Deadline(DOWN_TIMEOUT_S)
    while _held():
        if deadline.expired:
            raise Unavailable(f"the servers did not stop in {DOWN_TIMEOUT_S} s")
        time.sleep(0.05)
    sys.stderr.write("stopped\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run one of ``up``, ``down`` and (for ``up``'s own use) ``hold``."""
    commands = {"up": up, "down": down, "hold": hold}
    if len(arguments) != 1 or arguments[0] not in commands:
        sys.stderr.write("usage: python -m dualwrite.testing.servers up|down\n")
        return 2
    try:
        return commands[arguments[0]]()
    except DualWriteError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
