"""The thread that reads for a member, its settings, and what dead members have left open.

One thread polls, so that the group keeps the member whatever its workers wait for. An open transaction of a dead member
would block its successors, and Kafka does not say so: it is looked for and settled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.coordinator import connection_settings
from dualwrite.protocol.consuming import left_behind, member_prefix, pause_s
from dualwrite.recovery.recover import status
from dualwrite.writing.left_behind import recover

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.consumer.partitions import Name, Offsets, Partition, Partitions
    from dualwrite.interfaces import Database
    from dualwrite.recovery.recover import IdStatus, RecoveryReport

logger = logging.getLogger(__name__)

_MOST: Final = 1000
_POLL_S: Final = 0.1
_SHORT_POLL_S: Final = 0.01
_STALLED_S: Final = 5.0
_LONGEST_STALLED_S: Final = 60.0
_DEFAULT_MAX_POLL_MS: Final = 300_000

_MISCONFIGURED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - confluent-kafka's own error codes begin with an underscore
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.UNSUPPORTED_ASSIGNOR,
    }
)


class Reading:
    """A consumer, and what its rebalances do to the member's partitions. Used by the thread that polls.

    ``stop`` is set when the member must end: nothing is waited for then.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        partitions: Partitions,
        offsets: Offsets,
        peers: Peers,
        stop: threading.Event,
        *,
        make_consumer: Callable[[dict[str, Any]], Consumer] | None = None,
    ) -> None:
        # End-of-partition events are for :meth:`lag` alone: nothing else shows where the consumer stands before it reads.
        self._consumer = (make_consumer or Consumer)({**settings, "enable.partition.eof": True})
        self._incremental = is_incremental(settings)
        self._partitions = partitions
        self._offsets = offsets
        self._peers = peers
        self._stop = stop
        max_poll_s = float(str(settings.get("max.poll.interval.ms", _DEFAULT_MAX_POLL_MS))) / 1000
        # The rest of the time is for the callback's other work, and for the poll that follows.
        self._revoke_s = max_poll_s / 2
        self._rebalances = 0
        # librdkafka keeps a pause while the partition is another member's: it would never be fetched again here.
        self._paused: set[Name] = set()
        self._stalled_s = _STALLED_S
        self._look_at = now_s() + _STALLED_S

    def subscribe(self, topics: Sequence[str]) -> None:
        """Join the group with the first poll."""
        self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    def poll(self) -> bool:
        """Serve the group, and read what there is. Returns whether messages came."""
        paused = self._pause_and_resume()
        self._rewind()
        message = self._consumer.poll(_SHORT_POLL_S if paused else _POLL_S)
        self._offsets.membership(self._consumer)
        if message is None:
            self._look_for_stalled()
            return False
        rebalances = self._rebalances
        found, ends = _divided([message, *self._consumer.consume(_MOST, 0)])
        self._partitions.reach(ends)
        if self._rebalances == rebalances:
            self._partitions.put(found)
        else:
            # Their partitions may have gone and come back meanwhile: read them again.
            self._offsets.membership(self._consumer)
            self._read_again(found)
        if not found:
            self._look_for_stalled()
            return False
        self._stalled_s = _STALLED_S
        return True

    # Rebalances: called from within poll(), and close().

    def _assigned(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._rebalances += 1
        logger.info("assigned: %s", _shown(assigned))
        if not assigned:
            return
        # Before the consumer asks for committed offsets: it would wait silently for those of an open transaction.
        self._peers.settle()
        made = self._partitions.add([(one.topic, one.partition) for one in assigned])
        for partition in made:
            partition.paused = partition.name in self._paused
        found = self._patiently_start(made)
        if found is None:
            return
        placed = [TopicPartition(one.topic, one.partition, found[one.topic, one.partition]) for one in assigned]
        if self._incremental:
            consumer.incremental_assign(placed)
        else:
            consumer.assign(placed)

    def _patiently_start(self, made: Sequence[Partition]) -> Mapping[Name, int] | None:
        deadline, failures = Deadline(self._revoke_s), 0
        while True:
            try:
                return self._offsets.start(self._consumer, made)
            except Unavailable as error:
                failures += 1
                if deadline.expired or self._stop.is_set():
                    raise
                logger.warning("cannot read committed offsets yet; retrying: %s", error)
                self._stop.wait(min(pause_s(failures), deadline.remaining_s()))

    def _revoked(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        del consumer
        self._rebalances += 1
        logger.info("revoked: %s", _shown(revoked))
        began = now_s()
        self._partitions.remove([(one.topic, one.partition) for one in revoked], self._revoke_s)
        # Nothing is read meanwhile, not even from other partitions. A person who looks for the reason must find it in the log.
        if (took_s := now_s() - began) >= _STALLED_S:
            logger.warning("transactions under way with %s held up reading for %.0f s", _shown(revoked), took_s)

    def _lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        del consumer
        self._rebalances += 1
        logger.warning("lost: %s", _shown(lost))
        self._partitions.remove([(one.topic, one.partition) for one in lost], 0)

    # Positions

    def _read_again(self, dropped: Sequence[Message]) -> None:
        first: dict[Name, int] = {}
        for message in dropped:
            first.setdefault((message.topic() or "", message.partition() or 0), message.offset() or 0)
        for one in self._partitions.all():
            if one.name in first:
                self._partitions.rewind(one, first[one.name])

    def _rewind(self) -> None:
        """Set back the positions of partitions whose work was aborted for good, once no unit works on them."""
        asked = [one for one in self._partitions.all() if one.rewind and not one.busy]
        if not asked:
            return
        try:
            found = self._offsets.committed(self._consumer, asked)
            for one in asked:
                if one.name in found:
                    self._consumer.seek(TopicPartition(*one.name, found[one.name]))
                    self._partitions.rewound(one, found[one.name])
        except (KafkaException, Unavailable) as error:
            logger.warning("cannot reset positions yet; retrying: %s", error)

    def _pause_and_resume(self) -> bool:
        for one in self._partitions.to_pause():
            self._consumer.pause([TopicPartition(*one.name)])
            one.paused = True
            self._paused.add(one.name)
        for one in self._partitions.to_resume():
            self._consumer.resume([TopicPartition(*one.name)])
            one.paused = False
            self._paused.discard(one.name)
        return any(one.paused for one in self._partitions.all())

    # Peers

    def _look_for_stalled(self) -> None:
        """Look for dead members again, less and less often, while a partition yields nothing and its log holds more."""
        if now_s() < self._look_at:
            return
        self._look_at = now_s() + self._stalled_s
        if any(self._is_stalled(one) for one in self._partitions.all()):
            self._stalled_s = min(2 * self._stalled_s, _LONGEST_STALLED_S)
            self._peers.settle()

    def _is_stalled(self, partition: Partition) -> bool:
        if partition.busy or partition.waiting or now_s() - partition.read_at < _STALLED_S:
            return False
        [position] = self._consumer.position([TopicPartition(*partition.name)])
        # Before its first message it has no position, but may have come to the end of the log.
        at = partition.reached if position.offset < 0 else position.offset
        end = self._end(partition)
        return at is None or end is None or at < end

    def _end(self, partition: Partition) -> int | None:
        """The high watermark as of the last fetch; None if there was none."""
        _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition.name), cached=True)
        return high if high >= 0 else None

    def lag(self) -> dict[Name, int]:
        """Offsets not yet processed, per partition."""
        found = {}
        for one in self._partitions.all():
            end, at = self._end(one), one.reached if one.next_offset is None else one.next_offset
            if end is not None and at is not None:
                found[one.name] = max(0, end - at)
        return found


def _divided(polled: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages, and the ends of partitions. Logs errors, and raises those that no waiting mends."""
    messages: list[Message] = []
    ends: list[Message] = []
    for one in polled:
        error = one.error()
        if error is None:
            messages.append(one)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - as above
            ends.append(one)
        elif error.fatal() or error.code() in _MISCONFIGURED:
            raise ConfigurationError(f"the consumer cannot read: {error.str()}")
        else:
            logger.warning("the consumer reports: %s", error.str())
    return messages, ends


def _shown(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{one.topic}[{one.partition}]" for one in partitions) or "none"


# The settings of the consumer: ours by the protocol, the user's, and those by which both clients reach the brokers.

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
    """The whole dictionary for confluent-kafka's ``Consumer``: what it shares with producers, then the user's for it alone.

    Refuses a setting that would break the promise, or that belongs to this library.
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


# Settles what dead members left open: their open transactions block their successors, and Kafka does not say so.

_ANSWER_S: Final = 30.0


class Peers:
    """The other members of a group. ``ours`` is our own transactional id and client id."""

    def __init__(self, group: str, ours: str, *, kafka: Mapping[str, object], database: Database) -> None:
        self._group = group
        self._ours = ours
        self._kafka = kafka
        self._database = database

    def settle(self) -> list[str]:
        """Settle the transactions left open by members that are no longer in the group, and return their transactional ids.

        If a server does not answer, that is logged, and the rest is left to the next call. After an error a person must look.
        """
        try:
            return self._settle()
        except (KafkaException, TimeoutError, Unavailable, Fenced, TransactionAborted) as error:
            logger.warning("%s: cannot settle peers' transactions yet; retrying later: %s", self._ours, error)
        return []

    def _settle(self) -> list[str]:
        unsettled = {one.row.transactional_id for one in self._status() if one.needs_recovery}
        if not unsettled:
            return []
        # Only now: the rule of left_behind() needs a list of members that is younger than the transactions.
        gone = left_behind(self._group, unsettled, self._members(), self._ours)
        settled = []
        for name in gone:
            report = self._recover(name)
            settled += report.settled
            logger.warning("%s: settled the open transactions of %s, which left the group", self._ours, name)
            if report.losses:
                raise report.losses[0].as_error()
        return settled

    def _status(self) -> list[IdStatus]:
        return status(
            prefix=member_prefix(self._group), kafka=self._kafka, database=self._database, timeout_s=_ANSWER_S
        )

    def _recover(self, name: str) -> RecoveryReport:
        return recover(
            name, kafka={**self._kafka, "client.id": self._ours}, database=self._database, timeout_s=_ANSWER_S
        )

    def _members(self) -> set[str]:
        """The client ids of the group's members, whichever protocol the group uses."""
        admin = AdminClient(connection_settings(self._kafka))  # type: ignore[arg-type] # callbacks, too
        answer = admin.describe_consumer_groups([self._group], request_timeout=_ANSWER_S)[self._group]
        return {member.client_id for member in answer.result(_ANSWER_S).members}
