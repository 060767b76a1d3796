"""A standby of an embedded PostgreSQL server, which can be promoted."""

from __future__ import annotations

import os
import signal

import psutil

from dualwrite.testing import EmbeddedPostgres
from dualwrite.testing.servers.databases import unprivileged_user
from dualwrite.testing.servers.embedded import ServerProcess


class StandbyPostgres(EmbeddedPostgres):
    """Made by ``pg_basebackup`` from a running server, whose log it then follows.

    Args:
        primary: The server.
    """

    def __init__(self, primary: EmbeddedPostgres) -> None:
        super().__init__({"hot_standby": "on"})
        self._primary = primary
        self._password = primary._password

    def _initialise(self, process: ServerProcess) -> None:
        self._bin = self._binaries(process.directory)
        user = unprivileged_user()
        data = process.directory / "data"
        data.mkdir(mode=0o700)
        if user is not None:
            process.directory.chmod(0o711)
            os.chown(data, user.pw_uid, user.pw_gid)
        arguments = ["-D", str(data), "-d", self._primary.dsn, "--write-recovery-conf", "--checkpoint=fast"]
        process.start([str(self._bin / "pg_basebackup"), *arguments], user=None if user is None else user.pw_name)
        assert process.exit_code(self._start_timeout_s) == 0, process.log_tail()
        with (data / "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write(f"port = {self.port}\n")

    def suspend(self) -> None:
        """SIGSTOP to all its processes: it receives nothing, and its connections stay open."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `suspend`."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        postmaster = self._process.directory / "data" / "postmaster.pid"
        process = psutil.Process(int(postmaster.read_text(encoding="utf-8").split()[0]))
        for one in (process, *process.children()):
            one.send_signal(number)
