"""The settings of the consumer: ours by the protocol, the user's, and those by which both clients reach the brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.coordinator__kafka_connecting import connection_settings

_FIXED: Final[Mapping[str, tuple[str, str]]] = {
    "enable.auto.commit": (
        "false",
        "offsets are committed with the rows and messages that come from them, or they lie",
    ),
    "isolation.level": ("read_committed", "messages of open and aborted transactions must not be consumed"),
}
"""Settings with the only value that they may have, and the reason."""

_OWN: Final[Mapping[str, str]] = {
    "group.id": "it is the argument group",
    "client.id": "peers find a dead member's transactions by it: it is made of the group's and the member's name",
    "on_commit": "offsets are not committed by the consumer",
    "group.instance.id": "a restarted member would not be seen as gone, and peers would not settle what it has left",
}


def consumer_settings(
    kafka: Mapping[str, object], given: Mapping[str, object], *, group: str, client_id: str
) -> dict[str, object]:
    """The whole dictionary for confluent-kafka's ``Consumer``.

    Args:
        kafka: The settings that producers and consumers share.
        given: The user's settings for the consumer alone.
        group: The ``group.id``.
        client_id: The member's transactional id.

    Raises:
        ConfigurationError: A setting would break the promise, or belongs to this library.
    """
    settings: dict[str, object] = {"auto.offset.reset": "earliest", **connection_settings(kafka), **given}
    for key, (value, reason) in _FIXED.items():
        if str(settings.get(key, value)).lower() != value:
            raise ConfigurationError(
                f"the consumer's setting {key!r} must be {value}, not {settings[key]!r}",
                next_step=f"leave it out: {reason}",
            )
        settings[key] = value
    for key, reason in _OWN.items():
        if key in given:
            raise ConfigurationError(f"the consumer's setting {key!r} is this library's own", next_step=reason)
    return {**settings, "group.id": group, "client.id": client_id}


def is_incremental(settings: Mapping[str, object]) -> bool:
    """Whether the group moves single partitions (cooperative, KIP-848), instead of all at each rebalance."""
    strategy = str(settings.get("partition.assignment.strategy", ""))
    return settings.get("group.protocol") == "consumer" or strategy.startswith("cooperative")
