"""The partition that carries a store's changes, and the stores that follow it: rolled forward by what Kafka has committed."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import ChangelogDiffers, ConfigurationError, StoreTooOld, Unavailable
from dualwrite.kafka.coordinator import connection_settings
from dualwrite.kafka.librdkafka.handle import PASSING, list_offsets
from dualwrite.state.entries import Change, Position, position_in
from dualwrite.state.store import KeyValueStore

Answer = TypeVar("Answer")
_AT_ONCE: Final = 10_000
_REQUEST_S: Final = 10.0
_PAUSE_S: Final = 0.01
_END_MS: Final = 20
"""How long a broker waits for more at the end of the log: its empty answer shows the end. By default half a second."""


class Changelog:
    """Describes one partition, and reads its committed records. ``check`` is called while a method waits; it may raise."""

    def __init__(self, kafka: Mapping[str, object], topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self._settings = connection_settings(kafka)
        self._where = TopicPartition(topic, partition)
        self._admin = AdminClient(self._settings)  # type: ignore[arg-type] # callbacks, too

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"

    def identity(self, deadline: Deadline, check: Callable[[], None]) -> str:
        """The topic's id with the partition: a topic that is deleted and created again has another one."""
        found = self._describe_topic(deadline, check)
        if self.partition not in {partition.id for partition in found.partitions}:
            raise ConfigurationError(
                f"the changelog {self} has no such partition: the topic has {len(found.partitions)}"
            )
        return f"{found.topic_id}/{self.partition}"

    def count_partitions(self, deadline: Deadline, check: Callable[[], None]) -> int:
        """How many partitions the topic has."""
        return len(self._describe_topic(deadline, check).partitions)

    def _describe_topic(self, deadline: Deadline, check: Callable[[], None]) -> Any:
        def ask() -> Any:
            asked = self._admin.describe_topics(TopicCollection([self.topic]), request_timeout=_REQUEST_S)
            return asked[self.topic].result()

        return self._answer(ask, deadline, check)

    def describe(self, deadline: Deadline, at_least: int | None, check: Callable[[], None]) -> Log:
        """The partition's offsets, and the settings that delete records.

        Waits only for transactions that are open below the offset ``at_least``: the marker of a committed one is written a
        moment after its commit is answered. The end is then where the first open transaction begins. None waits until no
        transaction is open. Raises `Unavailable` if one stays open.
        """
        end = self._stable_end(deadline, at_least, check)
        resource = ConfigResource(ResourceType.TOPIC, self.topic)

        def ask() -> tuple[int, Any]:
            start = self._offset(OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
            return start, self._admin.describe_configs([resource], request_timeout=_REQUEST_S)[resource].result()

        def ask_recent() -> int:
            since = OffsetSpec.for_timestamp(max(0, int(time.time() * 1000) - delete_retention_ms))
            return self._offset(since, IsolationLevel.READ_UNCOMMITTED)

        start, settings = self._answer(ask, deadline, check)
        delete_retention_ms = int(settings["delete.retention.ms"].value)
        recent = self._answer(ask_recent, deadline, check)
        return Log(
            name=str(self),
            start=start,
            end=end,
            policy=frozenset(settings["cleanup.policy"].value.split(",")),
            retention_ms=int(settings["retention.ms"].value),
            retention_bytes=int(settings["retention.bytes"].value),
            delete_retention_ms=delete_retention_ms,
            recent=recent if recent >= 0 else end,
        )

    def _stable_end(self, deadline: Deadline, at_least: int | None, check: Callable[[], None]) -> int:
        def ask() -> tuple[int, int]:
            # The stable end first: records written in between can only make the two differ.
            stable = self._offset(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
            return stable, self._offset(OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)

        while True:
            stable, high = self._answer(ask, deadline, check)
            if stable == high or (at_least is not None and stable >= at_least):
                return stable
            if deadline.expired:
                raise Unavailable(f"a transaction stays open in the changelog {self}, from offset {stable} on")
            time.sleep(_PAUSE_S)

    def _answer(self, ask: Callable[[], Answer], deadline: Deadline, check: Callable[[], None]) -> Answer:
        """Ask, and ask again after an error that passes, until the deadline."""
        while True:
            check()
            try:
                return ask()
            except KafkaException as refused:
                if refused.args[0].code() not in PASSING or deadline.expired:
                    raise self._mapped(refused) from refused
            time.sleep(_PAUSE_S)

    def _offset(self, spec: OffsetSpec, isolation: IsolationLevel) -> int:
        return list_offsets(self._admin, {self._where: spec}, isolation, timeout_s=_REQUEST_S)[self._where]

    def read(
        self, start: int, end: int, deadline: Deadline, check: Callable[[], None]
    ) -> Generator[tuple[list[Change], int], None, None]:
        """The committed records of the offsets from ``start`` to ``end``, in batches. Calls ``check`` in between.

        With each batch comes the offset after its last record; ``end`` with the last batch. Refuses a record without a key.
        """
        consumer = Consumer(
            {
                **self._settings,
                "group.id": f"dualwrite-state-{secrets.token_hex(8)}",  # librdkafka requires a group; nothing is committed
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": _END_MS,
                "auto.offset.reset": "error",
            }
        )
        reached = start
        with closing(consumer):
            consumer.assign([TopicPartition(self.topic, self.partition, start)])
            while reached < end:
                check()
                if deadline.expired:
                    raise Unavailable(f"the changelog {self} was read up to {reached}, not to {end}, in time")
                changes: list[Change] = []
                for message in _next(consumer, min(0.2, deadline.remaining_s())):
                    offset, error = message.offset(), message.error()
                    if error is not None:
                        # Only this event shows that nothing but markers and aborted records follows.
                        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the constant's public name
                            reached = max(reached, offset or 0)
                        elif error.code() not in PASSING:
                            raise self._mapped(KafkaException(error))
                        continue
                    key = message.key()
                    if key is None:
                        raise ConfigurationError(f"the record at {offset} of the changelog {self} has no key")
                    assert offset is not None
                    if offset < end:
                        changes.append((_bytes(key), None if (value := message.value()) is None else _bytes(value)))
                    reached = max(reached, offset + 1)
                if changes or reached >= end:
                    yield changes, min(reached, end)

    def _mapped(self, refused: KafkaException) -> ConfigurationError | Unavailable:
        error: KafkaError = refused.args[0]
        if error.code() in PASSING or error.retriable():
            return Unavailable(f"the brokers did not answer about the changelog {self}: {error.str()}")
        return ConfigurationError(
            f"the changelog {self} cannot be read: {error.str()}",
            next_step="create the topic with cleanup.policy=compact, and grant Read, Describe and DescribeConfigs on it",
        )


def _next(consumer: Consumer, timeout_s: float) -> list[Message]:
    """The next messages, as soon as there are some: consume() with a timeout would wait for as many as it may return."""
    first = consumer.poll(timeout_s)
    return [] if first is None else [first, *consumer.consume(_AT_ONCE, timeout=0)]


def _bytes(given: bytes | str) -> bytes:
    return given.encode() if isinstance(given, str) else given


# Whether a store may be rolled forward from its changelog. Pure.
#
# A compacted log keeps the newest value of each key forever, but a deletion only for a while: after `delete.retention.ms` the
# broker may remove the tombstone. A store that read the key before and comes back later would keep it forever. A store that
# has only been quiet loses nothing: everything after its commit was written a moment ago.

_REBUILD = "move the store's directory away: the next start builds the store from the whole changelog"


@dataclass(frozen=True)
class Log:
    """A changelog's partition, as the brokers describe it. ``name`` is the topic with the partition, for errors.

    No transaction is open below ``end``, the offset after the last one. ``retention_ms`` is -1 for never, and
    ``retention_bytes`` for none. ``delete_retention_ms`` is the time for which a tombstone is kept at least, and ``recent``
    the first offset that was written within that time; the end if none was.
    """

    name: str
    start: int
    end: int
    policy: frozenset[str]
    retention_ms: int
    retention_bytes: int
    delete_retention_ms: int
    recent: int


def require_complete(log: Log) -> None:
    """Check that the brokers keep the newest value of every key: they must not delete records by age or size."""
    if "delete" in log.policy and (log.retention_ms, log.retention_bytes) != (-1, -1):
        raise ConfigurationError(
            f"the changelog {log.name} loses records: its cleanup.policy is {','.join(sorted(log.policy))}",
            next_step="set the topic's cleanup.policy to compact",
        )


def first_to_read(position: Position, log: Log, now_ms: int) -> int:
    """The offset from which the changelog must be applied to the store, as of ``now_ms`` (ms since 1970).

    Raises `ChangelogDiffers` if the changelog ends before the store does, or its beginning was deleted, and `StoreTooOld` if
    deletions that the store has not seen may be gone from it.
    """
    offset = position.offset or 0
    if offset > log.end:
        raise ChangelogDiffers(
            f"the changelog {log.name} ends at {log.end}, before the store's offset {offset}: it was truncated, or has"
            " lost records",
            next_step="find out which of the two is right; " + _REBUILD,
        )
    if offset < log.start:
        raise ChangelogDiffers(
            f"the changelog {log.name} begins at {log.start}: records from {offset} on, which the store needs, were deleted",
            next_step="restore a newer copy of the store" if offset else "nothing can build this store: restore a copy",
        )
    # A commit's own marker stands at its offset, so nothing else can have been written and removed below it.
    follows = log.end > offset + 1
    # If the first recent record stands there, too, nothing older follows, so no tombstone can be gone yet.
    may_miss = follows and log.recent > offset + 1
    if may_miss and position.at_ms and "compact" in log.policy and now_ms - position.at_ms > log.delete_retention_ms:
        hours = (now_ms - position.at_ms) / 3_600_000
        raise StoreTooOld(
            f"the store is {hours:.1f} hours old, and the changelog {log.name} keeps deletions for"
            f" {log.delete_retention_ms / 3_600_000:.1f}: it may have lost some that the store has not seen",
            next_step=_REBUILD,
        )
    return offset


logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the offset reached so far, and the end; of several partitions, with those of each in turn."""


def ignore_progress(reached: int, end: int) -> None:
    """Do nothing."""


def do_not_ask() -> None:
    """Let the work continue."""


class Standby:
    """A copy of a task's store, kept warm: it follows the changelog that the task's process writes.

    To take over, stop calling `catch_up`, and give the store to a `StateTask`.

    With ``partition=None`` it is a copy of the whole topic, for readers: of the stores of all tasks, or of any compacted
    topic. No task can take such a store over.

    Args:
        store: The store; nobody else writes to it.
        kafka: librdkafka configuration.
        changelog: The changelog's topic.
        partition: The changelog's partition; None for all that the topic has. Each key must then be in one partition alone.
        timeout_s: Limits each `catch_up`, in seconds.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        kafka: Mapping[str, object],
        changelog: str,
        partition: int | None,
        timeout_s: float = 600.0,
    ) -> None:
        self.store = store
        self._kafka = dict(kafka)
        self._topic = changelog
        self._whole = partition is None
        self._changelogs = [Changelog(self._kafka, changelog, partition or 0)]
        self._timeout_s = timeout_s

    def catch_up(self, on_progress: OnProgress = ignore_progress) -> int:
        """Apply what is committed in the changelog since the last call. Call it repeatedly.

        An interrupted call leaves the store at the last part that it has committed; the next one continues there.

        Args:
            on_progress: Called with the offset reached and the end, after each part.

        Returns:
            The number of records applied. On return they are durable.

        Raises:
            ChangelogDiffers: The changelog is another topic than before, was truncated, or its beginning was deleted.
            StoreTooOld: Deletions may be gone that the store has not seen.
            ConfigurationError: The topic, or a right on it, is missing, or it deletes records.
            Unavailable: The brokers did not answer, or the end was not reached in time.
        """
        if self._whole:
            count = self._changelogs[0].count_partitions(Deadline(self._timeout_s), do_not_ask)
            self._changelogs += [
                Changelog(self._kafka, self._topic, partition) for partition in range(len(self._changelogs), count)
            ]
        return roll_forward(
            self.store, *self._changelogs, timeout_s=self._timeout_s, wait_for_end=False, on_progress=on_progress
        )


def roll_forward(
    store: KeyValueStore,
    *changelogs: Changelog,
    timeout_s: float,
    wait_for_end: bool,
    on_progress: OnProgress,
    check: Callable[[], None] = do_not_ask,
) -> int:
    """Discard uncommitted writes, apply what the changelogs have committed since the last commit, and count the records.

    ``changelogs`` are all that the store follows. ``wait_for_end`` waits until no transaction is open in them. ``check`` is
    called between any two steps; it raises to interrupt the call, which leaves the store at the last part committed.
    """
    deadline = Deadline(timeout_s)
    store.recover()
    followed = {changelog.identity(deadline, check): changelog for changelog in changelogs}
    store.follow(*followed)
    began_ms = int(time.time() * 1000)
    logs = {}
    for identity, changelog in followed.items():
        at_least = None if wait_for_end else position_in(store.committed, identity).offset or 0
        logs[identity] = changelog.describe(deadline, at_least, check)
        require_complete(logs[identity])
    try:
        starts = {name: first_to_read(position_in(store.committed, name), log, began_ms) for name, log in logs.items()}
    except StoreTooOld as refused:
        if not store.rebuild_if_too_old:
            raise
        # Raises if the changelog cannot build a store either: then the old one stays.
        starts = {name: first_to_read(Position(), log, began_ms) for name, log in logs.items()}
        logger.warning("%s; the data moves to %s, and is built again", refused, store.path / "too-old")
        store.start_over()
        store.follow(*followed)
    applied = 0
    for identity, changelog in followed.items():
        start, end = starts[identity], logs[identity].end
        # Tombstones may vanish from the log while it is read: the store counts as old as before until the end is reached.
        as_of_ms = position_in(store.committed, identity).at_ms or began_ms
        for changes, reached in changelog.read(start, end, deadline, check):
            store.put_all(changes)
            applied += len(changes)
            store.commit({identity: reached}, as_of_ms=began_ms if reached == end else as_of_ms)
            failpoints.hit("state.restored")
            on_progress(reached, end)
        if start == end:
            store.commit({identity: end}, as_of_ms=began_ms)
    logger.info("%r: %d records applied", store, applied)
    return applied
