"""A real Apache ZooKeeper for tests: one server, or an ensemble, on free ports of the loopback interface."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded import (
    LOOPBACK,
    EmbeddedCluster,
    ReservedPort,
    ServerProcess,
    fetched_jars,
    java,
    stop_process,
    wait_until_ready,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

POM = Path(__file__).with_name("zookeeper_pom.xml")
HOSTS_VARIABLE = "DUALWRITE_TEST_ZOOKEEPER"
JVM_OPTIONS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")
_SETTINGS = {
    "tickTime": "500",
    "initLimit": "40",
    "syncLimit": "20",
    "minSessionTimeout": "1000",
    "maxSessionTimeout": "60000",
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "*",
}


class EmbeddedZooKeeper(EmbeddedCluster["_Server"]):
    """An ensemble of servers, one by default. Deletes their directories on exit.

    It is as durable as ZooKeeper is out of the box: every server forces its log to the disk before it answers.

    If the environment variable ``DUALWRITE_TEST_ZOOKEEPER`` holds a connection string (``host:port,host:port``), and no
    argument asks for a special server, that ensemble is used: nothing is started, and it cannot be stopped.

    Args:
        settings: Settings to add or to override, as in ``zoo.cfg``.
        servers: Number of servers; their ids count from 1.
        jvm: Options to add to the servers' command, such as ``-Djute.maxbuffer=65536``.
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: Java or Maven is missing, or a server refuses its settings.
        Unavailable: Raised by `start`: the servers were not ready in time.
    """

    _SOFTWARE = "ZooKeeper"
    _VARIABLE = HOSTS_VARIABLE
    _CLUSTER = "ensemble"
    _MEMBER = "server"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        servers: int = 1,
        jvm: tuple[str, ...] = (),
        start_timeout_s: float = 180.0,
    ) -> None:
        special = settings or jvm or servers > 1
        super().__init__(special=bool(special), start_timeout_s=start_timeout_s)
        self._settings = {**_SETTINGS, **(settings or {})}
        self._count = servers
        self._jvm = jvm

    @property
    def hosts(self) -> str:
        """The connection string for clients. The same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        return self._addresses()

    def host(self, server: int) -> str:
        """The address of one server.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "connect to")[0].address

    def start(self, server: int | None = None) -> None:
        """Start the servers, the first time with new ports and empty directories, and return when they serve requests.

        Args:
            server: The id of the only server to start; if None, all that do not run.

        Raises:
            IllegalStateError: It is running, or all of them are.
            ConfigurationError: Java or Maven is missing, or a server refuses its settings.
            Unavailable: They were not ready in time.
        """
        if self._external is not None:
            return
        jars = fetched_jars(POM, "zookeeper", "Apache ZooKeeper")
        deadline = Deadline(self._start_timeout_s)
        if self._members:
            chosen = self._stopped(server)
        else:
            self._members = chosen = [_Server(number + 1) for number in range(self._count)]
        try:
            for one in chosen:
                one.start(jars, self._settings, self._members, self._jvm)
            for one in chosen:
                one.wait_until_it_serves(deadline)
        except ConfigurationError:
            self.close()
            raise

    def stop(self, timeout_s: float = 60.0, *, server: int | None = None) -> None:
        """Stop the servers as an operator would (SIGTERM). `start` finds their data again.

        Args:
            timeout_s: Seconds that each may take.
            server: The id of the only server to stop; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        for one in self._running(server, "stop"):
            stop_process(one.process, self._SOFTWARE, timeout_s)

    def kill(self, server: int | None = None) -> None:
        """SIGKILL the servers, and return when they are gone. `start` finds the data that they had written.

        Args:
            server: The id of the only server to kill; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "kill"):
            one.process.kill()

    def restart(self, server: int | None = None) -> None:
        """`stop` the running servers, then `start` them: same ports, same data.

        Args:
            server: The id of the only server; all if None.
        """
        if any(one.process.running for one in self._chosen(server, "restart")):
            self.stop(server=server)
        self.start(server)

    def suspend(self, server: int | None = None) -> None:
        """SIGSTOP: until `resume` the servers do not answer, and their connections stay open.

        Args:
            server: The id of the only server to suspend; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "suspend"):
            one.process.signal(signal.SIGSTOP)

    def resume(self, server: int | None = None) -> None:
        """SIGCONT after `suspend`.

        Args:
            server: The id of the only server; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "resume"):
            one.process.signal(signal.SIGCONT)

    def mode(self, server: int = 1) -> str:
        """The server's own word for its part: ``standalone``, ``leader`` or ``follower``; empty while it serves no requests.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "ask")[0].mode()

    def log_tail(self, lines: int = 50, *, server: int = 1) -> str:
        """The last lines of a server's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "read the log of")[0].process.log_tail(lines)


class _Server:
    """One server: a process with a directory and ports. Closing it deletes its directory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = ServerProcess("zookeeper")
        self.client, self.peer, self.election = ReservedPort(), ReservedPort(), ReservedPort()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.client.number}"

    def start(self, jars: Path, settings: Mapping[str, str], ensemble: list[_Server], jvm: tuple[str, ...]) -> None:
        directory = self.process.directory
        data = directory / "data"
        data.mkdir(exist_ok=True)
        written = {
            **settings,
            "dataDir": str(data),
            "clientPort": str(self.client.number),
            "clientPortAddress": LOOPBACK,
        }
        if len(ensemble) > 1:
            (data / "myid").write_text(f"{self.number}\n", encoding="utf-8")
            for one in ensemble:
                written[f"server.{one.number}"] = f"{LOOPBACK}:{one.peer.number}:{one.election.number}"
        lines = "".join(f"{name}={value}\n" for name, value in written.items())
        (directory / "zoo.cfg").write_text(lines, encoding="utf-8")
        (directory / "tmp").mkdir(exist_ok=True)
        self.process.start(
            [
                java(),
                *JVM_OPTIONS,
                f"-Djava.io.tmpdir={directory / 'tmp'}",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                *jvm,
                "-cp",
                f"{jars}/*",
                "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                "zoo.cfg",
            ]
        )

    def wait_until_it_serves(self, deadline: Deadline) -> None:
        """Wait until it answers requests; in an ensemble that takes a quorum."""
        wait_until_ready(self.process, "ZooKeeper", self.mode, deadline)

    def mode(self) -> str:
        for line in _asked(self.client.number, b"srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ").strip()
        return ""

    def close(self) -> None:
        """Kill it if it runs, delete its directory, release its ports."""
        self.process.close()
        for port in (self.client, self.peer, self.election):
            port.release()


def _asked(port: int, word: bytes) -> str:
    """The answer to a four-letter word; empty if there is none."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2.0) as connection:
            connection.sendall(word)
            found = b""
            while part := connection.recv(65536):
                found += part
    except OSError:
        return ""
    return found.decode("utf-8", errors="replace")
