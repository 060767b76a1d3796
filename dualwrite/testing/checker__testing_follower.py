"""A ``read_committed`` consumer that runs throughout a test and all its outages, and records what it sees."""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.testing.reading import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

AT_ONCE = 1_000


class Follower:
    """Follows topics from their beginning, in its own thread. A context manager.

    A message once shown to a consumer cannot be taken back: a later reader must see the same, offset by offset.

    Args:
        config: Bootstrap servers and security settings for confluent-kafka.
        topics: The topics. They must exist.

    Raises:
        confluent_kafka.KafkaException: The brokers refused, with their reason.
    """

    def __init__(self, config: Mapping[str, str], topics: Sequence[str]) -> None:
        self._consumer = Consumer(
            {
                **config,
                "group.id": f"dualwrite-following-{secrets.token_hex(8)}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,  # the end of a partition shows in an empty answer
                "auto.offset.reset": "error",  # a missing offset is a finding, not a reason to skip ahead
                "log_level": 0,  # outages of brokers are expected
            }
        )
        self._seen: dict[str, list[Record]] = {topic: [] for topic in topics}
        self._ends: dict[tuple[str, int], int] = {}
        self._failure: KafkaException | None = None
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        metadata = AdminClient(dict(config)).list_topics(timeout=30).topics
        self._partitions = {topic: sorted(metadata[topic].partitions) for topic in topics}
        self._consumer.assign(
            [TopicPartition(topic, number, 0) for topic in topics for number in self._partitions[topic]]
        )
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            first = self._consumer.poll(0.2)
            if first is None:
                continue
            for message in [first, *self._consumer.consume(AT_ONCE, timeout=0)]:
                topic, partition, offset, error = (
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.error(),
                )
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the public name
                    if not (error.retriable() or error.code() in _PASSING):
                        self._fail(KafkaException(error))
                        return
                    continue
                assert topic is not None
                assert partition is not None
                assert offset is not None
                with self._moved:
                    if error is None:
                        self._seen[topic].append(Record(partition, offset, message.key(), message.value()))
                    else:
                        self._ends[topic, partition] = offset
                        self._moved.notify_all()

    def _fail(self, failure: KafkaException) -> None:
        with self._moved:
            self._failure = failure
            self._moved.notify_all()

    def seen(self, ends: Mapping[str, Mapping[int, int]], *, timeout_s: float = 120.0) -> dict[str, list[Record]]:
        """The messages seen, by topic, in order of arrival, once the consumer has reached these ends.

        Args:
            ends: By topic and partition, the offset after the last one.
            timeout_s: Seconds to wait for that.

        Raises:
            Unavailable: It did not get there in time.
            confluent_kafka.KafkaException: The consumer failed, with its reason.
        """
        deadline = Deadline(timeout_s)
        wanted = {(topic, number): end for topic, found in ends.items() for number, end in found.items() if end > 0}

        def behind() -> dict[tuple[str, int], int]:
            return {place: end for place, end in wanted.items() if self._ends.get(place, -1) < end}

        with self._moved:
            while self._failure is None and behind():
                if not self._moved.wait(deadline.remaining_s()):
                    raise Unavailable(f"the consumer that ran all the time did not reach {behind()}")
            if self._failure is not None:
                raise self._failure
            copied: defaultdict[str, list[Record]] = defaultdict(list)
            for topic, records in self._seen.items():
                copied[topic] = list(records)
            return copied

    def close(self) -> None:
        """Stop. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._consumer.close()


_PASSING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - the constants' public names
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError.UNKNOWN_TOPIC_OR_PART,  # a broker that has just started does not know its topics yet
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
    }
)
"""Errors that a consumer reports while a broker is down or starting; it recovers by itself."""
