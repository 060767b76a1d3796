"""A native producer's requests to its coordinators: a producer id, the end of a transaction, consumed offsets.

The requests are built from values and answered with values; which answers are retried, and how long, is decided in one
place.

They go over the sender's connections, in the thread that uses it. What an answer means stands in
:mod:`dualwrite.kafka.native.produce_state`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.brokers import Connections, NotYet
from dualwrite.kafka.cluster import find_coordinators
from dualwrite.kafka.config import TWO_PHASE_COMMIT
from dualwrite.kafka.engine import choose_transaction_timeout_ms, log_that_unlimited, warn_if_bounded
from dualwrite.kafka.error_codes import Code
from dualwrite.kafka.messages import EndTxn, Group, Message, NotOffered, Offset, Partition, TxnOffsetCommit
from dualwrite.kafka.messages import Request as WireRequest
from dualwrite.kafka.native.produce_state import Meaning, Request, meaning_of
from dualwrite.kafka.opening_messages import CoordinatorType, InitProducerId
from dualwrite.protocol.values import NEVER_MS

logger = logging.getLogger("dualwrite.kafka.producer")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.1
_NO_IDS: Final = (-1, -1)
_REPEATED: Final = frozenset({Meaning.AGAIN, Meaning.MOVED})
_BY_WEIGHT: Final = (Meaning.DONE, Meaning.AGAIN, Meaning.MOVED, Meaning.ABORT, Meaning.NOT_OPEN, Meaning.END)
_Coordinator: TypeAlias = tuple[CoordinatorType, str]


class Answered(NamedTuple):
    """A coordinator's answer."""

    code: int
    ids: tuple[int, int] = _NO_IDS  # the new producer's, or those of the transaction after the one that ended
    late: bool = False  # another copy of the request was not answered: it may still arrive


class CoordinatorRequests:
    """Asks the coordinators of one producer. Used by one thread at a time."""

    def __init__(self, brokers: Connections, kafka_id: str) -> None:
        self._brokers = brokers
        self._id = kafka_id
        self._nodes: dict[_Coordinator, int] = {}

    def init_producer_id(self, timeout_ms: int, deadline: Deadline, *, two_phase: bool = False) -> Answered | None:
        """Get a producer id and an epoch; aborts what is open under the transactional id.

        A late copy would abort what the producer has begun meanwhile. So the request is repeated only after an answer, with
        which the broker is done with it: never after silence.

        Returns the last answer at the deadline, and ``UNSUPPORTED_VERSION`` if the broker does not offer the version that
        is needed. None if there was no answer: a request may still arrive.
        """
        return self._answered(
            Request.INIT_PRODUCER_ID,
            (CoordinatorType.TRANSACTION, self._id),
            partial(InitProducerId, self._id, timeout_ms, two_phase=two_phase),
            _read_ids,
            deadline,
            after_silence=False,
        )

    def end(self, ids: tuple[int, int], deadline: Deadline, *, committed: bool) -> Answered | None:
        """Commit or abort the transaction of this producer id and epoch, and no other. Source: KIP-890.

        Repeated until it is answered: a copy that comes late finds that its transaction has ended. None at the deadline:
        the transaction may have ended.
        """
        return self._answered(
            Request.END_TXN,
            (CoordinatorType.TRANSACTION, self._id),
            partial(EndTxn, self._id, ids, committed=committed),
            _read_ids,
            deadline,
        )

    def commit_offsets(
        self,
        ids: tuple[int, int],
        group: Group,
        offsets: Mapping[Partition, Offset],
        deadline: Deadline,
        *,
        topic_ids: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Answered | None:
        """Commit consumed offsets as a part of the transaction of this producer id and epoch.

        ``topic_ids`` are the ids of their topics. Names are sent if one is missing, or if the broker takes no ids.

        Repeated until it is answered: a copy that comes after the transaction has ended is refused. Returns the gravest of
        the partitions' answers, at the deadline of the last attempt; None if there was none.
        """
        return self._answered(
            Request.TXN_OFFSET_COMMIT,
            (CoordinatorType.GROUP, group.group_id),
            partial(TxnOffsetCommit, self._id, ids, group, offsets, topic_ids),
            _read_partitions,
            deadline,
        )

    def _answered(
        self,
        request: Request,
        coordinator: _Coordinator,
        build: Callable[[], WireRequest | Message],
        read: Callable[[Message], Answered],
        deadline: Deadline,
        *,
        after_silence: bool = True,
    ) -> Answered | None:
        pausing: GrowingPause | None = None
        last: Answered | NotYet | None = None
        late = False
        while not deadline.expired:
            found: int | Answered | NotYet | None = self._nodes.get(coordinator) if after_silence else None
            if found is None:
                found = self._find(coordinator, deadline) if after_silence else self._reach(coordinator, deadline)
            answer = found if isinstance(found, NotYet | Answered) else self._sent(found, build, read, deadline)
            if isinstance(answer, Answered):
                if late:
                    answer = answer._replace(late=True)
                if not answer.code:
                    return answer
                meaning = meaning_of(request, answer.code)
                if meaning not in _REPEATED:
                    return answer
                moved = meaning is Meaning.MOVED
            else:
                if isinstance(found, int) and not after_silence:
                    logger.debug("%s: %s has no answer: %s", self._id, request.value, answer)
                    return None
                moved = answer.moved
                late |= isinstance(found, int)
            if moved:
                self._nodes.pop(coordinator, None)
            last = answer
            pausing = pausing or GrowingPause(_FIRST_WAIT_S, _LONGEST_WAIT_S)
            pausing.wait(deadline)
        logger.debug("%s: %s was not answered in time: %s", self._id, request.value, last)
        # While a transaction is being ended, no answer says how; the other requests have not succeeded: it says why.
        return last if isinstance(last, Answered) and request is not Request.END_TXN else None

    def _find(self, coordinator: _Coordinator, deadline: Deadline) -> int | Answered | NotYet:
        if coordinator in self._nodes:
            return self._nodes[coordinator]
        kind, key = coordinator
        try:
            code, node = find_coordinators(self._brokers, kind, [key], deadline)[key]
        except NotYet as reason:
            return reason
        if code != Code.NONE:
            return Answered(code)
        self._nodes[coordinator] = node
        return node

    def _reach(self, coordinator: _Coordinator, deadline: Deadline) -> int | Answered | NotYet:
        """Find a coordinator that answers: silence then no longer means that there is no connection to it."""
        found = self._find(coordinator, deadline)
        if isinstance(found, int) and not self._brokers.has_just_answered(found):
            try:
                self._brokers.metadata((), deadline, node=found)
            except NotYet as reason:
                return reason
        return found

    def _sent(
        self,
        node: int,
        build: Callable[[], WireRequest | Message],
        read: Callable[[Message], Answered],
        deadline: Deadline,
    ) -> Answered | NotYet:
        try:
            answer = self._brokers.ask(node, build(), deadline)
        except NotYet as reason:
            return reason
        except ConfigurationError as error:
            if isinstance(error.__cause__, NotOffered):
                return Answered(Code.UNSUPPORTED_VERSION)
            raise
        return answer if isinstance(answer, NotYet) else read(answer)


def _read_ids(response: Message) -> Answered:
    return Answered(response.error_code, (response.producer_id, response.producer_epoch))


def _read_partitions(codes: Mapping[Partition, int]) -> Answered:
    return Answered(max(codes.values(), key=lambda code: _BY_WEIGHT.index(meaning_of(Request.TXN_OFFSET_COMMIT, code))))


# Gets a producer its id under the longest time limit that the broker grants to a transaction.
#
# A transaction that the database has decided waits for its completion, and the broker must not abort it meanwhile. The
# attempts, in this order:
#
# 1. Two-phase commit (KIP-939): no time limit, whatever `transaction.max.timeout.ms` is. Only brokers with unstable versions
#    enabled offer the request. They refuse it where `transaction.two.phase.commit.enable` is off, or the user lacks the right
#    TwoPhaseCommit on the transactional id.
# 2. The timeout 2147483647 ms, which never expires (KIP-939), if `transaction.max.timeout.ms` allows it or cannot be read.
# 3. The greatest timeout that the brokers allow, with a warning.
#
# The user's own `transaction.timeout.ms` overrides all of them; `transaction.two.phase.commit.enable` makes the first
# the only one, or leaves it out. A refusal is an answer: the broker has done nothing, and the next attempt is safe.

_REFUSED: Final = frozenset(
    {Code.UNSUPPORTED_VERSION, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Code.INVALID_TRANSACTION_TIMEOUT}
)
"""Answers after which the next attempt may succeed. If a right is missing altogether, the last attempt is answered so, too."""


@dataclass(frozen=True)
class Attempt:
    """One way to ask for a producer id. ``NEVER_MS`` is no time limit."""

    timeout_ms: int
    two_phase: bool = False


_TWO_PHASE: Final = Attempt(NEVER_MS, two_phase=True)


@dataclass(frozen=True)
class Initialised:
    """The result of the last attempt. Where ``answered`` is None, the request may still arrive."""

    answered: Answered | None
    granted: Attempt


def attempts(
    requested_ms: int | None, broker_maximum_ms: int | None, *, two_phase_commit: bool | None = None
) -> Sequence[Attempt]:
    """The attempts, in their order. ``broker_maximum_ms`` is None if it cannot be read.

    ``two_phase_commit`` is True if the user requires it, False if the user forbids it. A timeout together with it is refused.
    """
    if two_phase_commit:
        if requested_ms is not None:
            raise ConfigurationError(
                f"a transaction timeout has no effect together with {TWO_PHASE_COMMIT}=true",
                next_step="leave one of them out",
            )
        return [_TWO_PHASE]
    chosen = Attempt(choose_transaction_timeout_ms(requested_ms, broker_maximum_ms, greatest_ms=NEVER_MS))
    if requested_ms is not None:
        return [chosen]
    two_phase = [_TWO_PHASE] if two_phase_commit is None else []
    return [*two_phase, *([Attempt(NEVER_MS)] if broker_maximum_ms is None else []), chosen]


def refusal_of_two_phase(initialised: Initialised, transactional_id: str) -> ConfigurationError | None:
    """The error if the user requires two-phase commit and the broker refuses it; None for any other answer."""
    answered = initialised.answered
    if not initialised.granted.two_phase or answered is None or answered.code not in _REFUSED:
        return None
    said = (
        "the brokers do not offer it: set unstable.api.versions.enable=true on them"
        if answered.code == Code.UNSUPPORTED_VERSION
        else f"grant Write and TwoPhaseCommit on this transactional id, and set {TWO_PHASE_COMMIT}=true on the brokers"
    )
    return ConfigurationError(
        "the brokers refuse two-phase commit, which the settings require",
        transactional_id=transactional_id,
        next_step=said,
    )


def initialise(requests: CoordinatorRequests, ways: Sequence[Attempt], deadline: Deadline) -> Initialised:
    """Get a producer id; aborts what is open under the transactional id."""
    for way in ways:
        answered = requests.init_producer_id(way.timeout_ms, deadline, two_phase=way.two_phase)
        if answered is None or answered.code not in _REFUSED:
            break
    return Initialised(answered, way)


def log_time_limit(
    granted: Attempt, requested_ms: int | None, broker_maximum_ms: int | None, *, servers: str, transactional_id: str
) -> None:
    """Log, once per process and bootstrap servers, whether transactions have a time limit that the user has not asked for."""
    named = {"servers": servers, "transactional_id": transactional_id}
    if granted.timeout_ms == NEVER_MS:
        how = "two-phase commit" if granted.two_phase else f"transaction.timeout.ms={NEVER_MS}"
        log_that_unlimited(how, **named)
    else:
        warn_if_bounded(requested_ms, broker_maximum_ms, granted.timeout_ms, **named)


# Consumed offsets, and the consumer group that commits them as a part of a transaction.

_MAGIC: Final = b"CGMDv2:"
"""How librdkafka marks its serialised group metadata: generation, group id, member id, and the instance id if there is one."""
_GENERATION: Final = struct.Struct("=i")
_NO_INSTANCE: Final = b"\1"
_NO_EPOCH: Final = -1


class ConsumedOffset(Protocol):
    """The attributes of ``confluent_kafka.TopicPartition`` that matter here."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int | None
    metadata: str | None


def group_of(metadata: object) -> Group:
    """The group of a consumer, from confluent-kafka's ``consumer_group_metadata()`` or kafka-python's ``group_metadata()``."""
    if isinstance(metadata, bytes) and metadata.startswith(_MAGIC):
        return _of_librdkafka(metadata[len(_MAGIC) :])
    group_id = getattr(metadata, "group_id", None)
    if not isinstance(group_id, str):
        raise TypeError(f"group_metadata must be what Consumer.consumer_group_metadata() returns, not {metadata!r}")
    return Group(
        group_id,
        getattr(metadata, "generation_id", -1),
        getattr(metadata, "member_id", "") or "",
        getattr(metadata, "group_instance_id", None),
    )


def offsets_of(consumed: Iterable[ConsumedOffset]) -> dict[Partition, Offset]:
    """By partition, the offset to commit. Leaves out what has no offset, as librdkafka does."""
    return {
        (one.topic, one.partition): Offset(
            one.offset,
            _NO_EPOCH if one.leader_epoch is None else one.leader_epoch,
            one.metadata or "",
        )
        for one in consumed
        if one.offset >= 0
    }


def _of_librdkafka(serialised: bytes) -> Group:
    try:
        (generation,) = _GENERATION.unpack_from(serialised)
        group_id, member_id, instance = serialised[_GENERATION.size :].split(b"\0", 2)
        if instance == _NO_INSTANCE:
            return Group(group_id.decode(), generation, member_id.decode())
        present, instance_id, end = instance.split(b"\0")
        if present or end:
            raise ValueError(instance)
        return Group(group_id.decode(), generation, member_id.decode(), instance_id.decode())
    except (ValueError, struct.error) as error:
        raise TypeError("the consumer's group metadata is not as librdkafka 2 serialises it") from error
