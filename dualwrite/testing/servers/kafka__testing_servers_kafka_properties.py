"""The settings of the embedded Kafka broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK, ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ADMIN = "admin"
FORBIDDEN_IN_NAMES = frozenset('",=[]\\; \n')
"""Characters with a special meaning in the two notations that define the broker's users."""


class Ports:
    """The ports of one broker, reserved until released.

    Args:
        proxies: Number of proxies to reserve ports for.
    """

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
    ``CLIENTS`` bypasses the proxies.

    Args:
        directory: The parent of the data directory.
        ports: The node's ports.
        node_id: The node's number.
        controllers: The controller port of each node of the cluster.
        users: Names and passwords; if empty, there is no authentication and no authoriser.
        admin_password: The password of the super user, which the broker itself also uses.
        more: Settings to add or to override.

    Raises:
        ConfigurationError: A user's name or password cannot be represented in the broker's settings.
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
