"""The differences between producer engines, for tests that do the same with each of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest

from dualwrite.clock import Deadline
from dualwrite.kafka.config import EngineName
from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.kafka.native.producer import NativeInstance
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.message import Message
from harness.patience import PATIENCE_S

ENGINES = ["librdkafka", "native"]


def answered(producer: TransactionalProducer) -> None:
    """Wait until the brokers have answered for every message so far, in whatever way."""
    instance = producer._chosen
    if isinstance(instance, NativeInstance):
        send(producer, PATIENCE_S)
    else:
        assert instance._raw.flush(PATIENCE_S) == 0


def send(producer: TransactionalProducer, timeout_s: float) -> None:
    """Let a producer that has no thread of its own send, for so long at most, what it has taken."""
    instance = producer._chosen
    if isinstance(instance, NativeInstance):
        instance._sender.flush(Deadline(timeout_s))


def taking(monkeypatch: pytest.MonkeyPatch, note: Callable[[Message], object]) -> None:
    """Show each message that an engine takes. It is sent without its headers, which simulated brokers do not keep."""
    for kind in (NativeInstance, ProducerInstance):

        def send(self: Any, message: Message, real: Any = kind.send) -> None:
            note(message)
            real(self, message._replace(headers=()))

        monkeypatch.setattr(kind, "send", send)


def refusing(monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., object]) -> None:
    """Let engines refuse each message."""
    for kind in (NativeInstance, ProducerInstance):
        monkeypatch.setattr(kind, "send", refuse)


def quick(engine: str) -> dict[str, int]:
    """Settings under which a topic that nobody knows is given up soon, and a topic made again is noticed soon."""
    found = {"topic.metadata.propagation.max.ms": 300}
    # The native engine looks a topic up for each transaction, and knows no such setting.
    return found if engine == "native" else {**found, "topic.metadata.refresh.interval.ms": 300}


def prepare_and_die(
    kafka: Mapping[str, object], kafka_id: str, engine: EngineName, topic: str, told: Connection, *, bulk: bool
) -> None:
    """Prepare a message for each of two partitions, tell the state, and kill this process."""
    producer = TransactionalProducer({**kafka, "dualwrite.engine": engine, "dualwrite.bulk": bulk}, kafka_id)
    producer.init_transactions()
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(topic, b"1", partition=partition)
    told.send(str(producer.prepare_transaction()))
    os.kill(os.getpid(), signal.SIGKILL)
