"""One node of the embedded Kafka cluster: a process with a directory and ports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded import wait_until_ready
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK, accepts_connections
from dualwrite.testing.servers.embedded__testing_servers_server_process import ServerProcess
from dualwrite.testing.servers.jars import java
from dualwrite.testing.servers.kafka__testing_servers_kafka_properties import Ports, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dualwrite.clock import Deadline

WHO = "the broker"
"""Its name in errors."""
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")


class Broker:
    """A broker that is also a controller. Closing it deletes its directory.

    Args:
        node_id: From 1.
        proxies: Number of proxies that it supports.
        heap: The JVM's maximum heap.
    """

    def __init__(self, node_id: int, *, proxies: int, heap: str) -> None:
        self.node_id = node_id
        self.process = ServerProcess("kafka")
        self.ports = Ports(proxies)
        self._heap = heap

    @property
    def address(self) -> str:
        """Where clients connect, as ``host:port``."""
        return f"{LOOPBACK}:{self.ports.client.number}"

    def format(
        self, jars: Path, cluster_id: str, settings: Mapping[str, str], passwords: Mapping[str, str], deadline: Deadline
    ) -> None:
        """Write its settings, and create its data directory.

        Raises:
            ConfigurationError: The storage tool refuses the settings.
        """
        directory = self.process.directory
        (directory / "server.properties").write_text(render(settings), encoding="utf-8")
        (directory / "tmp").mkdir()
        arguments = ["format", "--cluster-id", cluster_id, "--config", "server.properties"]
        for name, password in passwords.items():
            arguments += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
        self.process.start(self._command(jars, "kafka.tools.StorageTool", arguments))
        code = self.process.exit_code(deadline.remaining_s())
        if code != 0:
            raise ConfigurationError(f"Kafka's storage tool ended with {code}:\n{self.process.log_tail()}")

    def start(self, jars: Path) -> None:
        """Start the process.

        Raises:
            IllegalStateError: It is running already.
        """
        self.process.start(self._command(jars, "kafka.Kafka", ["server.properties"]))

    def wait_until_it_listens(self, deadline: Deadline) -> None:
        """Wait until clients can connect.

        Raises:
            ConfigurationError: It exited while starting.
            Unavailable: It took too long.
        """
        port = self.ports.client.number
        wait_until_ready(self.process, WHO, lambda: accepts_connections(port), deadline)

    def close(self) -> None:
        """Kill it if it runs, delete its directory, release its ports."""
        self.process.close()
        self.ports.release()

    def _command(self, jars: Path, main: str, arguments: Sequence[str]) -> list[str]:
        return [
            java(),
            f"-Xmx{self._heap}",
            *JVM_OPTIONS,
            f"-Djava.io.tmpdir={self.process.directory / 'tmp'}",  # native libraries unpacked there are deleted with it
            f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.xml')}",
            "-cp",
            f"{jars}/*",
            main,
            *arguments,
        ]
