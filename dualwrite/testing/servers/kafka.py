"""A real Apache Kafka for tests: one or more KRaft brokers on free ports of the loopback interface."""

from __future__ import annotations

import base64
import secrets
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers import kafka__testing_servers_kafka_admin
from dualwrite.testing.servers.embedded import EmbeddedCluster, stop_process, wait_until_ready
from dualwrite.testing.servers.jars import kafka_jars
from dualwrite.testing.servers.kafka__testing_servers_kafka_broker import WHO, Broker
from dualwrite.testing.servers.kafka__testing_servers_kafka_properties import ADMIN, server_properties

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SERVERS_VARIABLE = "DUALWRITE_TEST_KAFKA"
Mechanism = Literal["SCRAM-SHA-512", "PLAIN"]


class EmbeddedKafka(EmbeddedCluster[Broker]):
    """A cluster of brokers that are also controllers, one by default. Deletes their directories on exit.

    With three or more brokers, every partition has three replicas and needs two in sync, internal topics included: you
    can kill one broker at a time, and its partitions move to another leader. `stop`, `kill`, `suspend` and the like act
    on one broker or on all.

    ``auto.create.topics.enable`` is off, so that no topic appears by mistake; see `create_topic`. Consumer groups are quick:
    ``session.timeout.ms`` may be 1000, and with KIP-848 a heartbeat comes every 500 ms. Every other setting that matters to a
    client is the broker's own default, ``transaction.max.timeout.ms`` (15 minutes) included.

    If the environment variable ``DUALWRITE_TEST_KAFKA`` holds bootstrap servers, and no argument asks for a special
    broker, those servers are used: nothing is started, and they cannot be stopped.

    Args:
        properties: Broker settings to add or to override.
        users: Names and passwords. The broker then requires SASL (PLAIN and SCRAM-SHA-512 over plain TCP), refuses
            everything that `allow` has not allowed, and has one more user, ``admin``, with all rights.
        brokers: Number of brokers; their ids count from 1.
        proxies: Number of `KafkaProxy` instances that each broker supports at a time.
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: Java or Maven is missing, or the broker refuses its settings.
        Unavailable: Raised by `start`: the broker was not ready in time.
    """

    _SOFTWARE = "Kafka"
    _VARIABLE = SERVERS_VARIABLE
    _CLUSTER = "cluster"
    _MEMBER = "broker"

    def __init__(
        self,
        properties: Mapping[str, str] | None = None,
        *,
        users: Mapping[str, str] | None = None,
        brokers: int = 1,
        proxies: int = 1,
        start_timeout_s: float = 180.0,
    ) -> None:
        special = properties or users or brokers > 1 or proxies > 1
        super().__init__(special=bool(special), start_timeout_s=start_timeout_s)
        self._properties = dict(properties or {})
        self._users = dict(users or {})
        self._count = brokers
        self._proxies = proxies
        self._admin_password = secrets.token_hex(16)
        self.cluster_id: str | None = None
        """The id of the embedded cluster; None before the start, and for servers from the environment."""

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients. The same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        return self._addresses()

    def proxy_ports(self, number: int = 0, *, broker: int = 1) -> tuple[int, int]:
        """The broker's port behind a proxy, and the proxy's own port, which that listener advertises to clients.

        Args:
            number: The number of the proxy, from 0.
            broker: The id of the broker.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        ports = self._chosen(broker, "stand in front of")[0].ports
        return ports.proxied[number].number, ports.proxy[number].number

    def client_config(self, user: str | None = None, *, mechanism: Mechanism = "SCRAM-SHA-512") -> dict[str, str]:
        """A configuration for confluent-kafka: bootstrap servers, and security settings where there are any.

        Args:
            user: One of ``users`` or ``admin``; the first of ``users`` if not given.
            mechanism: The SASL mechanism.

        Raises:
            ConfigurationError: This broker has no such user.
        """
        config = {"bootstrap.servers": self.bootstrap_servers}
        if not self._users:
            if user is not None:
                raise ConfigurationError(f"this broker has no users, so no user {user!r}")
            return config
        passwords = {**self._users, ADMIN: self._admin_password}
        name = next(iter(self._users)) if user is None else user
        if name not in passwords:
            raise ConfigurationError(f"this broker has no user {name!r}")
        return {
            **config,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": name,
            "sasl.password": passwords[name],
        }

    def admin_config(self) -> dict[str, str]:
        """A configuration for confluent-kafka with all rights."""
        return self.client_config(ADMIN) if self._users else self.client_config()

    def start(self, broker: int | None = None) -> None:
        """Start the brokers, the first time with new ports and empty directories, and return when they answer.

        Args:
            broker: The id of the only broker to start; if None, all that do not run.

        Raises:
            IllegalStateError: It is running, or all of them are.
            ConfigurationError: Java or Maven is missing, or a broker refuses its settings.
            Unavailable: They were not ready in time.
        """
        if self._external is not None:
            return
        jars = kafka_jars()
        deadline = Deadline(self._start_timeout_s)
        if self._members:
            self._run(self._stopped(broker), jars, deadline)
            return
        heap = "512m" if self._count == 1 else "384m"
        try:
            for number in range(self._count):
                self._members.append(Broker(number + 1, proxies=self._proxies, heap=heap))
            self._format(jars, deadline)
            self._run(self._members, jars, deadline)
        except BaseException:
            self.close()
            raise

    def _format(self, jars: Path, deadline: Deadline) -> None:
        # A leading hyphen would look like an option to the tool.
        self.cluster_id = cluster_id = "D" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        controllers = {broker.node_id: broker.ports.controller for broker in self._members}
        passwords = {**self._users, ADMIN: self._admin_password} if self._users else {}

        def format_one(broker: Broker) -> None:
            settings = server_properties(
                broker.process.directory,
                broker.ports,
                node_id=broker.node_id,
                controllers=controllers,
                users=self._users,
                admin_password=self._admin_password,
                more=self._properties,
            )
            broker.format(jars, cluster_id, settings, passwords, deadline)

        with ThreadPoolExecutor(len(self._members)) as threads:
            list(threads.map(format_one, self._members))

    def _run(self, brokers: Sequence[Broker], jars: Path, deadline: Deadline) -> None:
        for broker in brokers:
            broker.start(jars)
        for broker in brokers:
            broker.wait_until_it_listens(deadline)
        admin = self._admin()
        wanted = {broker.node_id for broker in brokers}
        wait_until_ready(brokers[0].process, WHO, lambda: wanted <= _joined(admin, deadline), deadline)

    def stop(self, timeout_s: float = 180.0, *, broker: int | None = None) -> None:
        """Stop the brokers as an operator would (SIGTERM). `start` finds their data again.

        Args:
            timeout_s: Seconds that each may take.
            broker: The id of the only broker to stop; if None, all that run. Without a quorum, the last of several
                controllers cannot shut down cleanly, so prefer `kill` for a whole cluster.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        for one in self._running(broker, "stop"):
            stop_process(one.process, WHO, timeout_s)

    def kill(self, broker: int | None = None) -> None:
        """SIGKILL the brokers, and return when they are gone. `start` finds the data that they had written.

        Args:
            broker: The id of the only broker to kill; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(broker, "kill"):
            one.process.kill()

    def restart(self, broker: int | None = None) -> None:
        """`stop` the running brokers, then `start` them: same ports, same data.

        Args:
            broker: The id of the only broker; all if None.
        """
        if any(one.process.running for one in self._chosen(broker, "restart")):
            self.stop(broker=broker)
        self.start(broker)

    def suspend(self, broker: int | None = None) -> None:
        """SIGSTOP: until `resume` the brokers do not answer, and their connections stay open.

        Args:
            broker: The id of the only broker to suspend; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(broker, "suspend"):
            one.process.signal(signal.SIGSTOP)

    def resume(self, broker: int | None = None) -> None:
        """SIGCONT after `suspend`.

        Args:
            broker: The id of the only broker; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(broker, "resume"):
            one.process.signal(signal.SIGCONT)

    def log_tail(self, lines: int = 50, *, broker: int = 1) -> str:
        """The last lines of a broker's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(broker, "read the log of")[0].process.log_tail(lines)

    def _admin(self) -> AdminClient:
        # Brokers that are starting, or were killed by a test, are expected: log_level silences librdkafka.
        return AdminClient({**self.admin_config(), "log_level": "0"})

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None, *, timeout_s: float = 120.0
    ) -> str:
        """Create a topic, and return its name when every partition has a leader.

        Args:
            name: The topic's name.
            partitions: Number of partitions.
            config: Settings of the topic.
            timeout_s: Seconds that it may take.

        Raises:
            confluent_kafka.KafkaException: The broker refused, with its reason.
            Unavailable: Some partitions had no leader in time.
        """
        kafka__testing_servers_kafka_admin.create(self._admin(), name, partitions, config or {}, Deadline(timeout_s))
        return name

    def delete_topic(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Delete a topic, and return once the brokers no longer know it.

        Raises:
            confluent_kafka.KafkaException: The broker refused, with its reason.
            Unavailable: It was still there after ``timeout_s``.
        """
        kafka__testing_servers_kafka_admin.delete(self._admin(), name, Deadline(timeout_s))

    def allow(
        self,
        user: str,
        operation: str,
        resource_type: str,
        resource: str,
        *,
        prefixed: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """Allow a user one operation, by an ACL, and return once a broker applies it; the other brokers follow.

        Args:
            user: The user's name.
            operation: ``read``, ``write``, ``describe``, ``create``, ``all``, ...
            resource_type: ``topic``, ``group``, ``transactional_id`` or ``broker`` (the cluster).
            resource: Its name; ``kafka-cluster`` for the cluster.
            prefixed: Whether the name is a prefix.
            timeout_s: Seconds that it may take.

        Raises:
            ConfigurationError: This broker has no authoriser.
            confluent_kafka.KafkaException: The broker refused, with its reason.
            Unavailable: It was not in force after ``timeout_s``.
        """
        if not self._users:
            raise ConfigurationError("this broker allows every operation: it was started without users")
        admin = self._admin()  # keep it until the answer: without its handle, librdkafka cancels the request
        kafka__testing_servers_kafka_admin.allow(
            admin, user, operation, resource_type, resource, prefixed=prefixed, deadline=Deadline(timeout_s)
        )


def _joined(admin: AdminClient, deadline: Deadline) -> set[int]:
    try:
        return set(admin.list_topics(timeout=max(0.1, min(5.0, deadline.remaining_s()))).brokers)
    except KafkaException:  # the broker listens, but has not joined its cluster yet
        return set()
