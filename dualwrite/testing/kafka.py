"""A real Apache Kafka broker for tests: one node, KRaft, on free ports of the loopback interface."""

from __future__ import annotations

import base64
import os
import secrets
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.testing.jars import java, kafka_jars
from dualwrite.testing.kafka_properties import ADMIN, Ports, render, server_properties
from dualwrite.testing.ports import LOOPBACK, accepts_connections
from dualwrite.testing.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

SERVERS_VARIABLE = "DUALWRITE_TEST_KAFKA"
JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")
Mechanism = Literal["SCRAM-SHA-512", "PLAIN"]


class EmbeddedKafka:
    """One broker that is its own controller, with a directory that is deleted on exit.

    Topics are not created by mistake: ``auto.create.topics.enable`` is off, see `create_topic`. Every other setting
    that matters to a client is the broker's own default, ``transaction.max.timeout.ms`` (15 minutes) included.

    Where the environment variable ``DUALWRITE_TEST_KAFKA`` holds bootstrap servers, and neither ``properties`` nor
    ``users`` ask for a broker of a special kind, nothing is started: those servers are used, and cannot be stopped.

    Args:
        properties: Broker settings to add or to override.
        users: Names and passwords. The broker then asks clients for SASL (PLAIN and SCRAM-SHA-512 over plain TCP),
            refuses whatever `allow` has not allowed, and knows one more user, ``admin``, who may do everything.
        start_timeout_s: How long a start may take.

    Raises:
        ConfigurationError: From `start`: Java or Maven is missing, or the broker refuses its settings.
        Unavailable: From `start`: the broker was not ready in time.
    """

    def __init__(
        self,
        properties: Mapping[str, str] | None = None,
        *,
        users: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._properties = dict(properties or {})
        self._users = dict(users or {})
        self._start_timeout_s = start_timeout_s
        self._external = None if self._properties or self._users else os.environ.get(SERVERS_VARIABLE) or None
        self._process: ServerProcess | None = None
        self._ports: Ports | None = None
        self._admin_password = secrets.token_hex(16)
        self.cluster_id: str | None = None
        """The id of the embedded cluster; None before the start, and for servers of the environment."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._external or (f"{LOOPBACK}:{self._ports.client.number}" if self._ports else "not started")
        return f"{type(self).__name__}({where})"

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect. The same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        return self._external or f"{LOOPBACK}:{self._reserved.client.number}"

    @property
    def proxied_port(self) -> int:
        """The port of a second listener, whose clients are told to connect to `proxy_port`."""
        return self._reserved.proxied.number

    @property
    def proxy_port(self) -> int:
        """The port that a proxy in front of `proxied_port` has to listen on; reserved for it."""
        return self._reserved.proxy.number

    @property
    def running(self) -> bool:
        """Whether the broker's process exists (a suspended one does); True for servers of the environment."""
        return self._external is not None or (self._process is not None and self._process.running)

    @property
    def _reserved(self) -> Ports:
        if self._ports is None:
            why = "is not ours" if self._external else "was never started, or is closed"
            raise IllegalStateError(f"the Kafka broker {why}")
        return self._ports

    def client_config(self, user: str | None = None, *, mechanism: Mechanism = "SCRAM-SHA-512") -> dict[str, str]:
        """A configuration for confluent-kafka: bootstrap servers, and security settings where there are any.

        Args:
            user: One of ``users`` or ``admin``; the first of ``users`` if not given.
            mechanism: How the user proves who it is.

        Raises:
            ConfigurationError: This broker knows no such user.
        """
        config = {"bootstrap.servers": self.bootstrap_servers}
        if not self._users:
            if user is not None:
                raise ConfigurationError(f"this broker knows no users, so not {user!r}")
            return config
        passwords = {**self._users, ADMIN: self._admin_password}
        name = next(iter(self._users)) if user is None else user
        if name not in passwords:
            raise ConfigurationError(f"this broker knows no user {name!r}")
        return {
            **config,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": name,
            "sasl.password": passwords[name],
        }

    def admin_config(self) -> dict[str, str]:
        """A configuration for confluent-kafka that may do everything."""
        return self.client_config(ADMIN) if self._users else self.client_config()

    def start(self) -> None:
        """Start the broker, the first time with new ports and an empty directory, and return when it answers.

        Raises:
            IllegalStateError: It runs.
            ConfigurationError: Java or Maven is missing, or the broker refuses its settings.
            Unavailable: It was not ready in time.
        """
        if self._external is not None:
            return
        jars = kafka_jars()
        if self._process is None:
            self._process = ServerProcess("kafka")
            self._ports = Ports()
            try:
                self._format(self._process, self._ports, jars)
                self._run(self._process, jars)
            except BaseException:
                self.close()
                raise
        else:
            self._run(self._process, jars)

    def _format(self, process: ServerProcess, ports: Ports, jars: Path) -> None:
        # A leading hyphen would look like an option to the tool.
        self.cluster_id = "D" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        settings = server_properties(
            process.directory, ports, users=self._users, admin_password=self._admin_password, more=self._properties
        )
        (process.directory / "server.properties").write_text(render(settings), encoding="utf-8")
        (process.directory / "tmp").mkdir()
        arguments = ["format", "--cluster-id", self.cluster_id, "--config", "server.properties"]
        for name, password in ({**self._users, ADMIN: self._admin_password} if self._users else {}).items():
            arguments += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
        process.start(_command(jars, process.directory, "kafka.tools.StorageTool", *arguments))
        code = process.exit_code(self._start_timeout_s)
        if code != 0:
            raise ConfigurationError(f"Kafka's storage tool ended with {code}:\n{process.log_tail()}")

    def _run(self, process: ServerProcess, jars: Path) -> None:
        deadline = Deadline(self._start_timeout_s)
        process.start(_command(jars, process.directory, "kafka.Kafka", "server.properties"))
        while not accepts_connections(self._reserved.client.number):
            code = process.exit_code(0.05)
            if code is not None:
                raise ConfigurationError(f"the broker ended with {code} while it started:\n{process.log_tail()}")
            self._check(deadline, process)
        admin = self._admin()
        while not _answers(admin, deadline):
            self._check(deadline, process)

    def _check(self, deadline: Deadline, process: ServerProcess) -> None:
        if deadline.expired:
            raise Unavailable(f"the broker was not ready in {self._start_timeout_s} s:\n{process.log_tail()}")

    def _own(self, deed: str) -> ServerProcess:
        if self._external is not None:
            raise IllegalStateError(
                f"cannot {deed} the Kafka servers named by {SERVERS_VARIABLE}",
                next_step=f"unset {SERVERS_VARIABLE} to run this with an embedded broker",
            )
        if self._process is None:
            raise IllegalStateError(f"cannot {deed} a Kafka broker that was never started")
        return self._process

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stop the broker as an operator would (SIGTERM). Its data is kept for `start`.

        Raises:
            IllegalStateError: It does not run, or is not ours.
            Unavailable: It still runs.
        """
        process = self._own("stop")
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
        if process.exit_code(timeout_s) is None:
            raise Unavailable(f"the broker still runs {timeout_s} s after SIGTERM:\n{process.log_tail()}")

    def kill(self) -> None:
        """SIGKILL the broker, and return when it is gone. What it had written is kept for `start`.

        Raises:
            IllegalStateError: It does not run, or is not ours.
        """
        self._own("kill").kill()

    def restart(self) -> None:
        """`stop` the broker if it runs, then `start` it: same ports, same data."""
        if self._own("restart").running:
            self.stop()
        self.start()

    def suspend(self) -> None:
        """SIGSTOP: the broker answers nobody, and its connections stay open, until `resume`.

        Raises:
            IllegalStateError: It does not run, or is not ours.
        """
        self._own("suspend").signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `suspend`.

        Raises:
            IllegalStateError: It does not run, or is not ours.
        """
        self._own("resume").signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the broker if it runs, delete its directory, let its ports go. May be called again."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the broker's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._own("read the log of").log_tail(lines)

    def _admin(self) -> AdminClient:
        # A broker that is starting, or that a test has killed, is no news: log_level keeps librdkafka quiet.
        return AdminClient({**self.admin_config(), "log_level": "0"})

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None, *, timeout_s: float = 30.0
    ) -> str:
        """Create a topic, and return its name when every partition has a leader.

        Args:
            name: The topic's name.
            partitions: How many.
            config: Settings of the topic.
            timeout_s: How long it may take.

        Raises:
            confluent_kafka.KafkaException: The broker refused, with its reason.
            Unavailable: Not all partitions had a leader in time.
        """
        admin = self._admin()
        deadline = Deadline(timeout_s)
        replication = 1 if self._external is None else -1
        topic = NewTopic(name, num_partitions=partitions, replication_factor=replication, config=dict(config or {}))
        admin.create_topics([topic])[name].result(timeout_s)
        while True:
            found = admin.list_topics(name, timeout=max(0.1, deadline.remaining_s())).topics[name].partitions
            if len(found) == partitions and all(partition.leader >= 0 for partition in found.values()):
                return name
            if deadline.expired:
                raise Unavailable(f"topic {name} has no leaders after {timeout_s} s")
            time.sleep(0.01)

    def delete_topic(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Delete a topic.

        Raises:
            confluent_kafka.KafkaException: The broker refused, with its reason.
        """
        admin = self._admin()
        admin.delete_topics([name])[name].result(timeout_s)

    def allow(
        self,
        user: str,
        operation: str,
        resource_type: str,
        resource: str,
        *,
        prefixed: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        """Allow a user one operation, as an ACL does.

        Args:
            user: The user's name.
            operation: ``read``, ``write``, ``describe``, ``create``, ``all``, ...
            resource_type: ``topic``, ``group``, ``transactional_id`` or ``broker`` (the cluster).
            resource: Its name; ``kafka-cluster`` for the cluster.
            prefixed: Whether the name is a prefix.
            timeout_s: How long it may take.

        Raises:
            ConfigurationError: This broker has no authoriser.
        """
        if not self._users:
            raise ConfigurationError("this broker allows everybody everything: it was started without users")
        binding = AclBinding(
            ResourceType[resource_type.upper()],
            resource,
            ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[operation.upper()],
            AclPermissionType.ALLOW,
        )
        admin = self._admin()  # kept until the answer is there: librdkafka cancels what its handle still waits for
        admin.create_acls([binding])[binding].result(timeout_s)


def _answers(admin: AdminClient, deadline: Deadline) -> bool:
    try:
        admin.list_topics(timeout=max(0.1, min(5.0, deadline.remaining_s())))
    except KafkaException:  # it listens, and does not know yet that it is a member of its cluster
        return False
    return True


def _command(jars: Path, directory: Path, main: str, *arguments: str) -> list[str]:
    return [
        java(),
        *JVM_OPTIONS,
        f"-Djava.io.tmpdir={directory / 'tmp'}",  # native libraries unpacked there go with the directory
        f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.xml')}",
        "-cp",
        f"{jars}/*",
        main,
        *arguments,
    ]
