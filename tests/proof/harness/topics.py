"""Topics for tests, made and deleted many at a time: each by itself takes the broker 18 ms of the processor, and this process 4."""

from __future__ import annotations

import secrets
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from dualwrite.clock import Deadline
from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.plugin import PARTITIONS
from dualwrite.testing.servers.kafka import create
from harness.patience import PATIENCE_S

AT_ONCE: Final = 20


class Topics:
    """Empty topics of a broker that lasts for the whole session. Each is for one test."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self._kafka = kafka
        self._ready: list[str] = []
        self._used: list[str] = []

    def take(self) -> str:
        """The name of one that nobody has used."""
        if not self._ready:
            self._ready = self._made()
        return self._ready.pop()

    def give_back(self, name: str) -> None:
        """Let it be deleted with others."""
        self._used.append(name)
        if len(self._used) == AT_ONCE:
            self._delete(self._used)
            self._used = []

    def close(self) -> None:
        """Delete those that are left."""
        self._delete([*self._ready, *self._used])

    def _made(self) -> list[str]:
        names = [f"dualwrite-{secrets.token_hex(6)}" for _ in range(AT_ONCE)]
        # Some tests give their messages times of long ago, which the broker would delete at its next look.
        create(self._kafka._admin(), names, PARTITIONS, {"retention.ms": "-1"}, Deadline(PATIENCE_S))
        return names

    def _delete(self, names: list[str]) -> None:
        if not names:
            return
        admin = self._kafka._admin()
        for deleted in admin.delete_topics(names).values():
            try:
                deleted.result(PATIENCE_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:  # by the test itself
                    raise
