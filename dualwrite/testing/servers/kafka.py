"""``EmbeddedKafka``: real brokers in processes of their own, their properties, and what tests do with them."""

from __future__ import annotations

import base64
import secrets
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.testing.servers.embedded import (
    LOOPBACK,
    EmbeddedCluster,
    ReservedPort,
    ServerProcess,
    accepts_connections,
    java,
    kafka_jars,
    wait_until_ready,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from confluent_kafka.admin import TopicMetadata

# The settings of the embedded Kafka broker.

ADMIN = "admin"
# Characters with a special meaning in the two notations that define the broker's users.
FORBIDDEN_IN_NAMES = frozenset('",=[]\\; \n')


class Ports:
    """The ports of one broker, reserved until released."""

    def __init__(self, proxies: int) -> None:
        self.client = ReservedPort()
        self.internal = ReservedPort()
        self.controller = ReservedPort()
        self.proxied = [ReservedPort() for _ in range(proxies)]
        self.proxy = [ReservedPort() for _ in range(proxies)]

    def release(self) -> None:
        """Release all ports. Idempotent."""
        for port in (self.client, self.internal, self.controller, *self.proxied, *self.proxy):
            port.release()


def proxied_listener(number: int) -> str:
    """The name of the listener behind a proxy; the first is number 0."""
    return f"PROXIED{number + 1}" if number else "PROXIED"


def server_properties(
    directory: Path,
    ports: Ports,
    *,
    node_id: int,
    controllers: Mapping[int, ReservedPort],
    users: Mapping[str, str],
    admin_password: str,
    more: Mapping[str, str],
) -> dict[str, str]:
    """The complete ``server.properties`` of a node.

    The broker talks to itself over ``INTERNAL``, so that a proxy in front of ``PROXIED`` sees only clients' requests;
    ``CLIENTS`` bypasses the proxies. `admin_password` is the super user's, which the broker itself also uses. Without `users`
    there is no authentication and no authoriser. `directory` is the parent of the data directory.
    """
    protocol = "SASL_PLAINTEXT" if users else "PLAINTEXT"
    replicas = min(3, len(controllers))
    in_sync = max(1, replicas - 1)
    proxied = {proxied_listener(number): port for number, port in enumerate(ports.proxied)}
    proxy = {proxied_listener(number): port for number, port in enumerate(ports.proxy)}
    listening = {"CLIENTS": ports.client, **proxied, "INTERNAL": ports.internal, "CONTROLLER": ports.controller}
    advertised = {"CLIENTS": ports.client, **proxy, "INTERNAL": ports.internal}
    settings = {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": ",".join(f"{node}@{LOOPBACK}:{port.number}" for node, port in controllers.items()),
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "INTERNAL",
        "listeners": _addresses(listening),
        "advertised.listeners": _addresses(advertised),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name in listening),
        "log.dirs": str(directory / "data"),
        # Three replicas, or as many as there are nodes.
        "default.replication.factor": str(replicas),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        # Small: test runs start brokers on machines that do other work too.
        "offsets.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "2",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": "16777216",
        "group.initial.rebalance.delay.ms": "0",
        # A consumer may ask for a session of less than 6 s; with KIP-848 the broker sets its heartbeat, 5 s by default.
        "group.min.session.timeout.ms": "1000",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "group.consumer.heartbeat.interval.ms": "500",
        # After a SIGKILL the restarted node waits until its old session expires: 9 s by default. Among several
        # nodes, one that is merely slow must not lose its leadership.
        "broker.session.timeout.ms": "1500" if len(controllers) == 1 else "4000",
        "broker.heartbeat.interval.ms": "300",
        # A lone node has no follower that it must tell twice a second that nothing has changed: a quarter of its idle work.
        "metadata.max.idle.interval.ms": "10000" if len(controllers) == 1 else "500",
        # Leadership that moved away from a killed node stays there.
        "auto.leader.rebalance.enable": "false",
        # A misspelt topic is an error, as it is in production.
        "auto.create.topics.enable": "false",
    }
    if users:
        settings |= _security(users, admin_password, listening)
    return {**settings, **more}


def _addresses(ports: Mapping[str, ReservedPort]) -> str:
    return ",".join(f"{name}://{LOOPBACK}:{port.number}" for name, port in ports.items())


def _security(users: Mapping[str, str], admin_password: str, listeners: Iterable[str]) -> dict[str, str]:
    for name, password in users.items():
        if name == ADMIN or not name or not password or FORBIDDEN_IN_NAMES & set(name + password):
            raise ConfigurationError(f"{name!r} cannot be a user of the embedded broker: its name or password")
    everybody = {**users, ADMIN: admin_password}
    plain = (
        f'org.apache.kafka.common.security.plain.PlainLoginModule required username="{ADMIN}" '
        f'password="{admin_password}" ' + " ".join(f'user_{name}="{password}"' for name, password in everybody.items())
    )
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{ADMIN}",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
    }
    for listener in map(str.lower, listeners):
        settings[f"listener.name.{listener}.plain.sasl.jaas.config"] = f"{plain};"
        settings[f"listener.name.{listener}.scram-sha-512.sasl.jaas.config"] = scram
    return settings


def render(settings: Mapping[str, str]) -> str:
    """The settings as a Java properties file."""
    return "".join(f"{key}={value}\n" for key, value in settings.items())


# One node of the embedded Kafka cluster: a process with a directory and ports.

WHO = "the broker"
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")


class Broker:
    """A broker that is also a controller. Closing it deletes its directory."""

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
        """Write its settings, and create its data directory."""
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
        """Start the process."""
        self.process.start(self._command(jars, "kafka.Kafka", ["server.properties"]))

    def wait_until_it_listens(self, deadline: Deadline) -> None:
        """Wait until clients can connect. `ConfigurationError` means that it exited while starting."""
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
        version: The brokers' version, such as ``"3.9.2"``. If not given, that of the environment variable
            ``DUALWRITE_KAFKA_VERSION``, else the one that this library's own tests use.
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
        version: str | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        special = properties or users or brokers > 1 or proxies > 1 or version
        super().__init__(special=bool(special), start_timeout_s=start_timeout_s)
        self._properties = dict(properties or {})
        self._users = dict(users or {})
        self._count = brokers
        self._proxies = proxies
        self._version = version
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

    def start(self, server: int | None = None) -> None:
        """Start the brokers, the first time with new ports and empty directories, and return when they answer.

        Args:
            server: The id of the only broker to start; if None, all that do not run.

        Raises:
            IllegalStateError: It is running, or all of them are.
            ConfigurationError: Java or Maven is missing, or a broker refuses its settings.
            Unavailable: They were not ready in time.
        """
        if self._external is not None:
            return
        jars = kafka_jars(version=self._version)
        deadline = Deadline(self._start_timeout_s)
        if self._members:
            self._run(self._stopped(server), jars, deadline)
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
        create(self._admin(), [name], partitions, config or {}, Deadline(timeout_s))
        return name

    def delete_topic(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Delete a topic, and return once the brokers no longer know it.

        Raises:
            confluent_kafka.KafkaException: The broker refused, with its reason.
            Unavailable: It was still there after ``timeout_s``.
        """
        delete(self._admin(), name, Deadline(timeout_s))

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
        allow(admin, user, operation, resource_type, resource, prefixed=prefixed, deadline=Deadline(timeout_s))


def _joined(admin: AdminClient, deadline: Deadline) -> set[int]:
    try:
        return set(admin.list_topics(timeout=max(0.1, min(5.0, deadline.remaining_s()))).brokers)
    except KafkaException:  # the broker listens, but has not joined its cluster yet
        return set()


# Creates and deletes topics, allows users operations, and waits until the brokers show what the controller promised.


def create(
    admin: AdminClient, names: Sequence[str], partitions: int, config: Mapping[str, str], deadline: Deadline
) -> None:
    """Create topics, and return when every partition has a leader."""
    wanted = [NewTopic(one, num_partitions=partitions, replication_factor=-1, config=dict(config)) for one in names]
    for created in admin.create_topics(wanted).values():
        created.result(deadline.remaining_s())
    for name in names:
        while True:
            found = _described(admin, name, deadline).partitions
            if len(found) == partitions and all(partition.leader >= 0 for partition in found.values()):
                break
            _wait(deadline, f"topic {name} has no leaders")


def delete(admin: AdminClient, name: str, deadline: Deadline) -> None:
    """Delete a topic, and return once the brokers no longer know it."""
    admin.delete_topics([name])[name].result(deadline.remaining_s())
    while True:
        error = _described(admin, name, deadline).error
        if error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return
        _wait(deadline, f"topic {name} is still there")


def allow(
    admin: AdminClient,
    user: str,
    operation: str,
    resource_type: str,
    resource: str,
    *,
    prefixed: bool,
    deadline: Deadline,
) -> None:
    """Allow a user one operation, and return once a broker applies it; the other brokers follow."""
    described = (
        ResourceType[resource_type.upper()],
        resource,
        ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )
    binding = AclBinding(*described)
    admin.create_acls([binding])[binding].result(deadline.remaining_s())
    while not admin.describe_acls(AclBindingFilter(*described)).result(deadline.remaining_s()):
        _wait(deadline, f"{user!r} may not {operation} {resource_type} {resource!r} yet")


def _described(admin: AdminClient, name: str, deadline: Deadline) -> TopicMetadata:
    return admin.list_topics(name, timeout=max(0.1, deadline.remaining_s())).topics[name]


def _wait(deadline: Deadline, what_is_wrong: str) -> None:
    if deadline.expired:
        raise Unavailable(f"{what_is_wrong}, and the time is up")
    time.sleep(0.01)
