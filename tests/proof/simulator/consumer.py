"""A simulated confluent-kafka ``Consumer`` that has subscribed: the classic protocol, eager, ``isolation.level=read_committed``.

It follows librdkafka 2.16 where a member of the library uses it. Each poll serves the group or fetches: requests to join and
heartbeats, which librdkafka's own thread sends, are a part of it, since a consumer learns of a rebalance by its callbacks alone,
and these come in a poll. A partition without a position is fetched only once its committed offset is known, and no open
transaction may still replace that: until then the consumer waits, and does not say so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from dualwrite.clock import Deadline, pause
from simulator.partition import committed_records
from simulator.process import Unanswered
from simulator.requests import (
    READ_COMMITTED,
    ErrorCode,
    ErrorResponse,
    Fetch,
    FetchResponse,
    GroupHeartbeat,
    JoinGroup,
    JoinGroupResponse,
    LeaveGroup,
    ListOffsets,
    ListOffsetsResponse,
    OffsetFetch,
    OffsetFetchResponse,
)

if TYPE_CHECKING:
    from simulator.scheduler import Simulation

_AGAIN_S: Final = 1.0
_FETCHED: Final = 3
"""So many messages come with an answer at most."""
_Callback = Callable[[Any, list[TopicPartition]], None]


class ReadMessage:
    """A message as confluent-kafka gives it, as far as the library uses it."""

    def __init__(self, topic: str, partition: int, offset: int, value: object) -> None:
        self._at = topic, partition, offset
        self._value = value

    def topic(self) -> str:
        """The topic."""
        return self._at[0]

    def partition(self) -> int:
        """The partition."""
        return self._at[1]

    def offset(self) -> int:
        """The offset."""
        return self._at[2]

    def value(self) -> object:
        """The value."""
        return self._value

    def error(self) -> None:
        """No message here stands for an error."""


class SimulatedConsumer:
    """Stands in for ``confluent_kafka.Consumer``.

    Args:
        simulation: The simulation with the broker.
        settings: librdkafka's settings.
    """

    def __init__(self, simulation: Simulation, settings: Mapping[str, object]) -> None:
        self._simulation = simulation
        self._group = str(settings["group.id"])
        self._client_id = str(settings["client.id"])
        self._member_id, self._generation = "", -1
        self._joined = False
        self._callbacks: dict[str, _Callback] = {}
        self._assigned: dict[tuple[str, int], int | None] = {}
        self._is_assigned = False
        self._paused: set[tuple[str, int]] = set()
        self._ends: dict[tuple[str, int], int] = {}
        self._fetched: list[ReadMessage] = []
        self._turn = 0

    @property
    def member_id(self) -> str:
        """The id that it has in the group."""
        return self._member_id

    def subscribe(self, topics: list[str], **callbacks: _Callback) -> None:
        """Join with the next poll."""
        del topics
        self._callbacks = callbacks

    def close(self) -> None:
        """Give the partitions back, and leave."""
        self._leave("on_revoke")
        if self._member_id:
            with suppress(Unanswered):
                self._simulation.ask(LeaveGroup(self._group, self._member_id))
        self._member_id, self._generation = "", -1

    # What the library calls

    def poll(self, timeout_s: float) -> ReadMessage | None:
        """Serve the group, or return a message."""
        del timeout_s
        try:
            if self._joined or self._fetched:
                if self._fetched:
                    return self._fetched.pop(0)
                self._ask_for_news()
            else:
                self._join()
                return None
            if self._joined:
                self._find_positions()
                self._fetch()
        except Unanswered:
            return None
        return self._fetched.pop(0) if self._fetched else None

    def consume(self, count: int, timeout_s: float) -> list[ReadMessage]:
        """The other messages that were fetched."""
        del timeout_s
        found, self._fetched = self._fetched[:count], self._fetched[count:]
        return found

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Begin to read them."""
        self._is_assigned = True
        self._assigned = {
            (one.topic, one.partition): None if one.offset == OFFSET_INVALID else one.offset for one in partitions
        }

    def seek(self, to: TopicPartition) -> None:
        """Read on from there."""
        at = (to.topic, to.partition)
        if at not in self._assigned:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._assigned[at] = to.offset
        self._fetched = [one for one in self._fetched if (one.topic(), one.partition()) != at]

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Fetch nothing from them."""
        self._paused.update((one.topic, one.partition) for one in partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Fetch from them again."""
        self._paused.difference_update((one.topic, one.partition) for one in partitions)

    def position(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """The next offset to read; OFFSET_INVALID if it is not known."""
        found = [(one, self._assigned.get((one.topic, one.partition))) for one in partitions]
        return [TopicPartition(one.topic, one.partition, OFFSET_INVALID if at is None else at) for one, at in found]

    def get_watermark_offsets(
        self, one: TopicPartition, timeout: float = 0.0, *, cached: bool = False
    ) -> tuple[int, int] | None:
        """The beginning and the end of the log."""
        at = (one.topic, one.partition)
        if cached:
            return 0, self._ends.get(at, -1001)
        deadline = Deadline(timeout)
        while not deadline.expired:
            try:
                return 0, cast("ListOffsetsResponse", self._simulation.ask(ListOffsets(at))).offset
            except Unanswered:
                pause(_AGAIN_S)
        return None

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        """The committed offsets, once no open transaction may still replace them."""
        deadline = Deadline(timeout)
        found = []
        for one in partitions:
            while (offset := self._committed((one.topic, one.partition))) is None:
                if deadline.expired:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
                pause(_AGAIN_S)
            found.append(TopicPartition(one.topic, one.partition, offset if offset >= 0 else OFFSET_INVALID))
        return found

    def consumer_group_metadata(self) -> bytes:
        """The membership, as librdkafka serialises it."""
        names = f"{self._group}\0{self._member_id}\0\1".encode()
        return b"CGMDv2:" + struct.pack("=i", self._generation) + names

    # What it does

    def _join(self) -> None:
        answer = cast(
            "JoinGroupResponse", self._simulation.ask(JoinGroup(self._group, self._member_id, self._client_id))
        )
        if answer.error_code is ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id, self._generation = "", -1
            return
        self._member_id = answer.member_id
        if answer.error_code is not ErrorCode.NONE:
            return
        self._generation, self._joined, self._is_assigned = answer.generation, True, False
        given = [TopicPartition(*at) for at in answer.assigned]
        self._callbacks["on_assign"](self, given)
        if not self._is_assigned:
            self.assign([TopicPartition(*at, OFFSET_INVALID) for at in answer.assigned])

    def _ask_for_news(self) -> None:
        request = GroupHeartbeat(self._group, self._member_id, self._generation)
        code = cast("ErrorResponse", self._simulation.ask(request)).error_code
        if code is ErrorCode.REBALANCE_IN_PROGRESS:
            self._leave("on_revoke")
        elif code is not ErrorCode.NONE:
            self._member_id, self._generation = "", -1
            self._leave("on_lost")

    def _leave(self, callback: str) -> None:
        """Stop reading. What was fetched is dropped."""
        given = [TopicPartition(*at) for at in self._assigned]
        if given:
            self._callbacks[callback](self, given)
        self._joined = False
        self._assigned, self._fetched = {}, []

    def _find_positions(self) -> None:
        for at in [at for at, position in self._assigned.items() if position is None]:
            offset = self._committed(at)
            if offset is not None:
                self._assigned[at] = max(offset, 0)  # auto.offset.reset=earliest

    def _committed(self, at: tuple[str, int]) -> int | None:
        """The committed offset, -1 if there is none; None if it is not known now."""
        try:
            answer = self._simulation.ask(OffsetFetch(self._group, at, require_stable=True))
        except Unanswered:
            return None
        found = cast("OffsetFetchResponse", answer)
        return found.committed_offset if found.error_code is ErrorCode.NONE else None

    def _fetch(self) -> None:
        """Fetch from the next partition that can be read."""
        ready = [at for at, position in self._assigned.items() if position is not None and at not in self._paused]
        if not ready:
            return
        at = ready[self._turn % len(ready)]
        self._turn += 1
        position = cast("int", self._assigned[at])
        answer = cast("FetchResponse", self._simulation.ask(Fetch(at, position, READ_COMMITTED)))
        self._ends[at] = answer.high_watermark
        records = [one for one in committed_records(answer) if one[0] >= position][:_FETCHED]
        self._fetched += [ReadMessage(*at, offset, value) for offset, value in records]
        if records:
            self._assigned[at] = records[-1][0] + 1
