"""A real PgBouncer in front of the embedded PostgreSQL, where its program is installed (``apt install pgbouncer``)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import make_url

from dualwrite.clock import Deadline, pause
from dualwrite.testing.servers.databases import unprivileged_user
from dualwrite.testing.servers.embedded import LOOPBACK
from harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from typing_extensions import Self

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
KNOWS_STATEMENTS = PROGRAM is not None and b"max_prepared_statements" in Path(PROGRAM).read_bytes()
"""Whether it follows prepared statements from one connection to another: version 1.21 and newer."""
NEEDS_PGBOUNCER = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed: apt install pgbouncer")


class PgBouncer:
    """PgBouncer for one database. It shares few connections, so that transactions take turns on them.

    Args:
        directory: Empty; for its files.
        url: The database, as PgBouncer reaches it.
        pool_mode: ``transaction``, ``session`` or ``statement``.
    """

    def __init__(self, directory: Path, url: str, *, pool_mode: str = "transaction") -> None:
        self._target = make_url(url)
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server((LOOPBACK, 0)) as probe:
            self.port = probe.getsockname()[1]
        target = self._target
        self._settings = directory / "pgbouncer.ini"
        self._settings.write_text(
            f"""[databases]
{target.database} = host={target.host} port={target.port} user={target.username} password={target.password}
[pgbouncer]
listen_addr = {LOOPBACK}
listen_port = {self.port}
auth_type = any
pool_mode = {pool_mode}
default_pool_size = 3
unix_socket_dir =
ignore_startup_parameters = extra_float_digits
"""
        )
        for path in (self._settings, directory):
            path.chmod(0o755)

    @property
    def url(self) -> str:
        """The same database through PgBouncer."""
        through = self._target.set(host=LOOPBACK, port=self.port, password=None)
        return through.render_as_string(hide_password=False)

    @property
    def by_asyncpg(self) -> str:
        """The same for asyncpg."""
        return make_url(self.url).set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)

    def start(self) -> None:
        """Start it, and return when it listens."""
        assert PROGRAM is not None
        user = unprivileged_user()
        command = [PROGRAM, "-q", *(["-u", user.pw_name] if user else []), str(self._settings)]
        # Its standard error holds what it logs: pytest shows it where a test fails.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = Deadline(PATIENCE_S)
        while True:
            assert self._process.poll() is None, "PgBouncer ended while it started"
            try:
                socket.create_connection((LOOPBACK, self.port), 1).close()
            except OSError:
                assert not deadline.expired
                pause(0.02)
            else:
                return

    def kill(self) -> None:
        """SIGKILL it, with all that it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
