"""The choice of a producer's engine, by the user's wish and the cluster's transaction version."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces__ports_coordinator import NativeCoordinator, TransactionCoordinator
from dualwrite.kafka.config import TWO_PHASE_COMMIT
from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.values import NEVER_MS

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.kafka.config__kafka_config import KafkaConfig

logger = logging.getLogger("dualwrite.kafka.producer")

EngineName: TypeAlias = Literal["auto", "native", "librdkafka"]
"""The engines that a user may ask for; ``auto`` is native wherever the cluster allows it."""

_VARIABLE: Final = "DUALWRITE_PRODUCER_ENGINE"
_NATIVE_FROM: Final = 2
_logged: Final[set[str]] = set()


def wanted_engine(name: str) -> Engine | None:
    """The engine of that name; None for ``auto``.

    Raises:
        ConfigurationError: There is no such engine.
    """
    if name not in get_args(EngineName):
        raise ConfigurationError(f"there is no producer engine {name!r}", next_step="choose auto, native or librdkafka")
    return None if name == "auto" else Engine(name)


def choose_engine(
    wanted: Engine | None, config: KafkaConfig, coordinator: TransactionCoordinator, deadline: Deadline, *, bulk: bool
) -> Engine:
    """The engine to use. Logged once in a process, where neither the user nor the environment decides.

    ``DUALWRITE_PRODUCER_ENGINE`` in the environment decides where the user leaves it open.

    Args:
        wanted: The user's wish; None leaves the choice to the environment, then to the cluster.
        config: The user's settings. If one is librdkafka's alone, that engine is used unless the native one is wanted.
        coordinator: Knows the cluster's transaction version.
        deadline: Limits the question.
        bulk: Whether the producer is in bulk mode.

    Raises:
        ConfigurationError: The native engine was asked for, or two-phase commit, which only it has, and the cluster does not
            have transaction version 2.
        Unavailable: The brokers did not answer in time.
    """
    wanted = wanted or wanted_engine(os.environ.get(_VARIABLE, "auto"))
    if config.two_phase_commit:
        if wanted is Engine.LIBRDKAFKA:
            raise ConfigurationError(
                f"Kafka setting {TWO_PHASE_COMMIT!r}: librdkafka cannot ask for two-phase commit",
                next_step="choose the native engine, or leave the setting out",
            )
        wanted = Engine.NATIVE
    if wanted is Engine.LIBRDKAFKA:
        return wanted
    version = coordinator.transaction_version(deadline) if isinstance(coordinator, NativeCoordinator) else 0
    if wanted is None:
        found, why = _best(version, config, bulk=bulk)
        _log_once(found, why)
        return found
    if version < _NATIVE_FROM:
        raise ConfigurationError(
            f"the cluster's transaction.version is {version}: native transactions need {_NATIVE_FROM}",
            next_step="finalize it (kafka-features.sh upgrade --feature transaction.version=2), or choose librdkafka",
        )
    return wanted


def _best(version: int, config: KafkaConfig, *, bulk: bool) -> tuple[Engine, str]:
    if version < _NATIVE_FROM:
        return Engine.LIBRDKAFKA, f"the cluster's transaction.version is {version}"
    from dualwrite.kafka.native.settings import native_settings  # noqa: PLC0415 - loads the codecs of batches

    try:
        native_settings(config, bulk=bulk, transaction_timeout_ms=NEVER_MS)
    except ConfigurationError as error:
        return Engine.LIBRDKAFKA, str(error)
    return Engine.NATIVE, f"the cluster's transaction.version is {version}"


def _log_once(found: Engine, why: str) -> None:
    if why not in _logged:
        _logged.add(why)
        logger.info("producer engine: %s, as %s", found.value, why)
