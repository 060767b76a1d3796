"""The settings that the embedded Kafka broker starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError
from dualwrite.testing.ports import LOOPBACK, ReservedPort

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ADMIN = "admin"
FORBIDDEN_IN_NAMES = frozenset('",=[]\\; \n')
"""These have a meaning in the two notations in which the broker is told of its users."""


class Ports:
    """The ports of one broker, reserved until released."""

    def __init__(self) -> None:
        self.client = ReservedPort()
        self.internal = ReservedPort()
        self.controller = ReservedPort()
        self.proxied = ReservedPort()
        self.proxy = ReservedPort()

    def release(self) -> None:
        """Let all of them go. May be called again."""
        for port in (self.client, self.internal, self.controller, self.proxied, self.proxy):
            port.release()


def server_properties(
    directory: Path,
    ports: Ports,
    *,
    users: Mapping[str, str],
    admin_password: str,
    more: Mapping[str, str],
) -> dict[str, str]:
    """The whole ``server.properties`` of a single node.

    There are three listeners for clients' requests. The broker talks to itself over ``INTERNAL``, so that a proxy
    in front of ``PROXIED`` sees what clients send and nothing else; ``CLIENTS`` goes around the proxy.

    Args:
        directory: Where the data goes.
        ports: Where to listen.
        users: Names and passwords; without any there is no authentication and no authoriser.
        admin_password: The password of the super user, which is also the broker itself.
        more: Added, or put in the place of what is here.

    Raises:
        ConfigurationError: A user's name or password that cannot be written down for the broker.
    """
    protocol = "SASL_PLAINTEXT" if users else "PLAINTEXT"
    listening = {
        "CLIENTS": ports.client,
        "PROXIED": ports.proxied,
        "INTERNAL": ports.internal,
        "CONTROLLER": ports.controller,
    }
    advertised = {"CLIENTS": ports.client, "PROXIED": ports.proxy, "INTERNAL": ports.internal}
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{LOOPBACK}:{ports.controller.number}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "INTERNAL",
        "listeners": _addresses(listening),
        "advertised.listeners": _addresses(advertised),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name in listening),
        "log.dirs": str(directory / "data"),
        # One node: what a cluster keeps on three is kept on one.
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        # Small: a broker per test run, on a machine that does other things too.
        "offsets.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "2",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": "16777216",
        "group.initial.rebalance.delay.ms": "0",
        # After a SIGKILL the node waits until its former self has lost its session: 9 s by default.
        "broker.session.timeout.ms": "1500",
        "broker.heartbeat.interval.ms": "300",
        # A misspelt topic is an error, as it is in production.
        "auto.create.topics.enable": "false",
    }
    if users:
        settings |= _security(users, admin_password)
    return {**settings, **more}


def _addresses(ports: Mapping[str, ReservedPort]) -> str:
    return ",".join(f"{name}://{LOOPBACK}:{port.number}" for name, port in ports.items())


def _security(users: Mapping[str, str], admin_password: str) -> dict[str, str]:
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
    for listener in ("clients", "proxied", "internal", "controller"):
        settings[f"listener.name.{listener}.plain.sasl.jaas.config"] = f"{plain};"
        settings[f"listener.name.{listener}.scram-sha-512.sasl.jaas.config"] = scram
    return settings


def render(settings: Mapping[str, str]) -> str:
    """The settings as a Java properties file."""
    return "".join(f"{key}={value}\n" for key, value in settings.items())
