"""The settings by which any client of librdkafka reaches the brokers, taken from the dictionary of a writer."""

from __future__ import annotations

from collections.abc import Mapping

from dualwrite.kafka.config import CONNECTING, KERBEROS_TICKETS
from dualwrite.kafka.config__kafka_config import KafkaConfig


def connection_settings(kafka: Mapping[str, object]) -> dict[str, object]:
    """The settings by which any client of librdkafka reaches the brokers.

    Raises:
        ConfigurationError: As :meth:`KafkaConfig.parse`.
    """
    reaching = CONNECTING | KERBEROS_TICKETS
    return {key: value for key, value in KafkaConfig.parse(kafka).librdkafka().items() if key in reaching}
