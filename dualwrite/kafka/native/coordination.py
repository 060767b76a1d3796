"""A producer's requests to its coordinators: a new producer id, the end of a transaction, consumed offsets.

They go over the sender's connections, in the thread that uses it. What an answer means stands in
:mod:`dualwrite.kafka.native.error_meanings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import kafka.errors as kafka_errors
from kafka.protocol.metadata import CoordinatorType

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.cluster import find_coordinators
from dualwrite.kafka.native.coordination__kafka_producer_native_coordinating_coordinator_messages import (
    end_txn,
    init_producer_id,
    txn_offset_commit,
)
from dualwrite.kafka.native.coordination__kafka_producer_native_coordinating_offsets import Group, Offset
from dualwrite.kafka.native.error_meanings import Code, Meaning, Request, meaning_of
from dualwrite.kafka.network import Message, NotYet

logger = logging.getLogger("dualwrite.kafka.producer")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.1
_NO_IDS: Final = (-1, -1)
_REPEATED: Final = frozenset({Meaning.AGAIN, Meaning.MOVED})
_BY_WEIGHT: Final = (Meaning.DONE, Meaning.AGAIN, Meaning.MOVED, Meaning.ABORT, Meaning.NOT_OPEN, Meaning.END)
_Coordinator: TypeAlias = tuple[CoordinatorType, str]


@dataclass(frozen=True)
class Answered:
    """A coordinator's answer.

    Attributes:
        code: The error code.
        ids: Producer id and epoch: of the new producer, or of the transaction after the one that ended. -1 for both in
            an answer that names none.
        late: Whether another copy of the request was not answered: it may still arrive.
    """

    code: int
    ids: tuple[int, int] = _NO_IDS
    late: bool = False


class CoordinatorRequests:
    """Asks the coordinators of one producer. Used by one thread at a time.

    Args:
        brokers: The sender's connections.
        kafka_id: The transactional id.
    """

    def __init__(self, brokers: Brokers, kafka_id: str) -> None:
        self._brokers = brokers
        self._id = kafka_id
        self._nodes: dict[_Coordinator, int] = {}

    def init_producer_id(self, timeout_ms: int, deadline: Deadline, *, two_phase: bool = False) -> Answered | None:
        """Get a producer id and an epoch; aborts what is open under the transactional id.

        A late copy would abort what the producer has begun meanwhile. So the request is repeated only after an answer, with
        which the broker is done with it: never after silence.

        Args:
            timeout_ms: The broker's time limit for each transaction.
            deadline: Limits the wait.
            two_phase: Whether to ask for KIP-939's two-phase commit, under which no transaction has a time limit.

        Returns:
            The answer, at the deadline the last one; ``UNSUPPORTED_VERSION`` if the broker does not offer the version that is
            needed. None if there was no answer: a request may still arrive.

        Raises:
            ConfigurationError: The brokers refuse our credentials or our way of connecting.
        """
        return self._answered(
            Request.INIT_PRODUCER_ID,
            (CoordinatorType.TRANSACTION, self._id),
            partial(init_producer_id, self._id, timeout_ms, two_phase=two_phase),
            _read_ids,
            deadline,
            after_silence=False,
        )

    def end(self, ids: tuple[int, int], deadline: Deadline, *, committed: bool) -> Answered | None:
        """Commit or abort the transaction of this producer id and epoch, and no other. Source: KIP-890.

        Repeated until it is answered: a copy that comes late finds that its transaction has ended.

        Args:
            ids: The transaction's producer id and epoch.
            deadline: Limits the wait.
            committed: Whether to commit.

        Returns:
            The answer, with the ids of the next transaction on success. None at the deadline: the transaction may have
            ended.

        Raises:
            ConfigurationError: The brokers refuse our credentials or our way of connecting.
        """
        return self._answered(
            Request.END_TXN,
            (CoordinatorType.TRANSACTION, self._id),
            partial(end_txn, self._id, ids, committed=committed),
            _read_ids,
            deadline,
        )

    def commit_offsets(
        self, ids: tuple[int, int], group: Group, offsets: Mapping[tuple[str, int], Offset], deadline: Deadline
    ) -> Answered | None:
        """Commit consumed offsets as a part of the transaction of this producer id and epoch.

        Repeated until it is answered: a copy that comes after the transaction has ended is refused.

        Args:
            ids: The transaction's producer id and epoch.
            group: The consumer's group.
            offsets: By topic and partition, the next offset to consume; at least one.
            deadline: Limits the wait.

        Returns:
            The answer, at the deadline the last one: the gravest of the partitions' answers. None if there was none.

        Raises:
            ConfigurationError: The brokers refuse our credentials or our way of connecting.
        """
        return self._answered(
            Request.TXN_OFFSET_COMMIT,
            (CoordinatorType.GROUP, group.group_id),
            partial(txn_offset_commit, self._id, ids, group, offsets),
            _read_partitions,
            deadline,
        )

    def _answered(
        self,
        request: Request,
        coordinator: _Coordinator,
        build: Callable[[], Message],
        read: Callable[[Message], Answered],
        deadline: Deadline,
        *,
        after_silence: bool = True,
    ) -> Answered | None:
        pausing = GrowingPause(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        last: Answered | NotYet | None = None
        late = False
        while not deadline.expired:
            found = self._find(coordinator, deadline) if after_silence else self._reach(coordinator, deadline)
            answer = found if isinstance(found, NotYet | Answered) else self._sent(found, build, read, deadline)
            if isinstance(answer, Answered):
                answer = replace(answer, late=late)
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
        if isinstance(found, int):
            try:
                self._brokers.metadata((), deadline, node=found)
            except NotYet as reason:
                return reason
        return found

    def _sent(
        self, node: int, build: Callable[[], Message], read: Callable[[Message], Answered], deadline: Deadline
    ) -> Answered | NotYet:
        try:
            [answer] = self._brokers.exchange([(node, build())], deadline)
        except NotYet as reason:
            return reason
        except ConfigurationError as error:
            if isinstance(error.__cause__, kafka_errors.IncompatibleBrokerVersion):
                return Answered(Code.UNSUPPORTED_VERSION)
            raise
        return answer if isinstance(answer, NotYet) else read(answer)


def _read_ids(response: Message) -> Answered:
    return Answered(response.error_code, (response.producer_id, response.producer_epoch))


def _read_partitions(response: Message) -> Answered:
    codes = [partition.error_code for topic in response.topics for partition in topic.partitions]
    return Answered(max(codes, key=lambda code: _BY_WEIGHT.index(meaning_of(Request.TXN_OFFSET_COMMIT, code))))
