"""Consumers in the model: members of a group, by the product's own thread that reads and its own workers.

A member is two processes, as it is two threads: the one that reads, and its worker. The schedule says when each of them does the
next thing: a poll, a unit of work. Both run :mod:`dualwrite.consumer` as it stands, on a simulated consumer.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from simulator.broker import handle
from simulator.connection import SimulatedConnection
from simulator.consumed import SimulatedConsumedOffsets, consumed_key
from simulator.consumer import ReadMessage, SimulatedConsumer
from simulator.outside import SimulatedCoordinator
from simulator.process import Server, Unanswered
from simulator.requests import DescribeGroup, DescribeGroupResponse, OffsetFetch
from simulator.store import SimulatedStore

from dualwrite.clock import Deadline, pause
from dualwrite.consumer.consumer import CurrentWriter, Working
from dualwrite.consumer.partitions import KafkaOffsets, Offsets, Partitions, Peers, Reading, RowOffsets
from dualwrite.errors import DualWriteError, Unavailable
from dualwrite.protocol.members import Step, consumer_member_id, member_prefix
from dualwrite.recovery.claim import OwnerContext, claim_lanes
from dualwrite.recovery.recover import inspect_rows, recover_rows
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.lane import Lane, Losses
from model.checker import Finding, decided_writes
from model.owners import OF_THE_USERS_STATEMENT, TIMEOUT_S, TOPIC, CodeFailed, Told, Write, make_producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from simulator.process import Process
    from simulator.scheduler import Simulation

    from dualwrite.kafka.config import EngineName
    from dualwrite.recovery.recover import IdStatus, RecoveryReport
    from dualwrite.writing.transaction import Transaction

GROUP: Final = "group"
INPUT: Final = "input"
INPUTS: Final = 2
POLL: Final = "poll"
WORK: Final = "work"
_UNIT: Final = 3
_ATTEMPTS: Final = 2
_ANSWER_S: Final = 30.0


class WorkFails(Exception):
    """The handler's own error, which may be a message's fault."""


@dataclass
class Consumed(Write):
    """The dual write of a unit.

    Attributes:
        inputs: The messages that it has read: the number of the partition, and the offset.
    """

    inputs: tuple[tuple[int, int], ...] = ()


@dataclass
class Plans:
    """The plans of the units of a run, and their dual writes.

    Attributes:
        writes: All dual writes of the run.
        fails: How the next units fail, one after the other; None where one does not.
    """

    writes: list[Write]
    fails: list[str | None] = field(default_factory=list)


class _Stop:
    """In place of the event by which a member is told to end."""

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        pause(seconds)


class _Writer:
    """The writer of a member, of one lane."""

    def __init__(self, member: ConsumingMember) -> None:
        self._member = member
        self.transactional_id = member.id
        self._context = member.context()
        self._lane = Lane(
            member.id,
            self._context,
            make_producer(member.simulation, self._context, eager=member.eager, engine=member.engine),
            losses=Losses(member.told.note),
        )

    def open(self) -> None:
        rows = claim_lanes(self._context, self.transactional_id, 1, Deadline(TIMEOUT_S))
        self._lane.adopt(rows[self.transactional_id])
        self._lane.ready(Deadline(TIMEOUT_S))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        self._lane.ready(Deadline(TIMEOUT_S))
        connection = SimulatedConnection(self._member.simulation)
        try:
            with DualWrite(self._lane, self._context, connection, margin_s=10.0, timeout_s=TIMEOUT_S) as transaction:
                yield transaction
        except Exception:  # of a process that is killed, the server learns nothing
            connection.close()
            raise
        connection.close()

    def close(self) -> None:
        try:
            self._lane.know_end(Deadline(10.0))
            if self._lane.needs_settling:
                self._lane.settle(Deadline(10.0))
            self._lane.record_completed()
        except DualWriteError as error:
            self._member.told.note(error)


class _Peers(Peers):
    """The peers, on the simulated servers."""

    def __init__(self, member: ConsumingMember) -> None:
        super().__init__(GROUP, member.id, kafka={}, database=cast("Any", None))
        self._member = member

    def settle(self) -> list[str]:
        settled = super().settle()
        self._member.told.counts["peers settled"] += len(settled)
        return settled

    def _status(self) -> list[IdStatus]:
        context = self._member.context()
        rows = context.store.find(member_prefix(GROUP))
        return list(inspect_rows(rows, context.store, context.coordinator, Deadline(_ANSWER_S)))

    def _recover(self, name: str) -> RecoveryReport:
        context = self._member.context()
        report = recover_rows(
            lambda: [row for row in context.store.find(name) if row.transactional_id == name],
            store=context.store,
            connect=lambda: nullcontext(context.coordinator),
            deadline=Deadline(_ANSWER_S),
            owner=context.owner,
        )
        self._member.told.losses.update(str(loss.row.prepared) for loss in report.losses)
        return report

    def _members(self) -> set[str]:
        try:
            answer = self._member.simulation.ask(DescribeGroup(GROUP))
        except Unanswered as error:
            raise Unavailable("the group coordinator does not answer") from error
        return set(cast("DescribeGroupResponse", answer).client_ids)


class _Working(Working):
    """Also notes what becomes of each unit's dual write; dead letters are messages like others, without rows."""

    writing: Callable[[Transaction, Sequence[ReadMessage], bool], None]
    newest: Consumed | None = None
    plans: Plans

    def _attempt(self, unit: Any, part: Any) -> Step:
        self.newest = None
        step = super()._attempt(unit, part)
        if step is Step.DONE and self.newest is not None:
            self.newest.told = "decided"
        return step

    def _set_aside(self, tx: Transaction, part: Any) -> None:
        self.writing(tx, part.messages, True)


class ConsumingMember:
    """A member: its two processes share it.

    Args:
        name: Of the process that reads.
        number: The member's name in the group, which it keeps when it starts again.
        keeps_rows: Whether the offsets are rows.
    """

    def __init__(
        self,
        name: str,
        number: int,
        simulation: Simulation,
        told: Told,
        plans: Plans,
        *,
        keeps_rows: bool,
        eager: bool,
        engine: EngineName,
    ) -> None:
        self.name, self.simulation, self.told, self.plans = name, simulation, told, plans
        self.eager, self.engine, self.keeps_rows = eager, engine, keeps_rows
        self.id = consumer_member_id(GROUP, str(number))
        self.partitions = Partitions(_UNIT, 0.0, 1)
        self.consumer: SimulatedConsumer | None = None
        self.worker: Process | None = None
        self._reader: Process | None = None
        self._writer = CurrentWriter(cast("Any", lambda: _Writer(self)))
        self._working = _Working(
            GROUP,
            cast("Any", partial(self._write, dead=False)),
            self._writer,
            cast("Offsets", None),
            self.partitions,
            _ATTEMPTS,
            TOPIC,
            (CodeFailed, *OF_THE_USERS_STATEMENT),
        )
        self._working.writing = self._write

    @property
    def worker_name(self) -> str:
        """The name of the worker's process."""
        return f"H{self.name[1:]}"

    @property
    def has_work(self) -> bool:
        """Whether a unit is due."""
        return any(one.is_due for one in self.partitions.all())

    def context(self) -> OwnerContext:
        """The servers, for the process that asks."""
        process = self.simulation.inside()
        return OwnerContext(
            cast("Any", SimulatedCoordinator(self.simulation)), SimulatedStore(self.simulation, process), self.name
        )

    # The process that reads

    def read(self, process: Process) -> None:
        """Open the writer, join the group, and poll on command."""
        self._reader = process
        try:
            self._writer.get()
            self._working.offsets = offsets = self._offsets()
            settings = {"group.id": GROUP, "client.id": self.id}
            reading = Reading(
                settings,
                self.partitions,
                offsets,
                _Peers(self),
                cast("Any", _Stop()),
                make_consumer=cast("Any", self._connected),
            )
            reading.subscribe([INPUT])
            self.told.opened[self.name] = "open"
            while process.await_command() == POLL and not self.partitions.closed:
                reading.poll()
            self.partitions.close()
            while self.worker is not None and not self._rests(self.worker):
                pause(1.0)
            reading.close()
            self._writer.close()
        except DualWriteError as error:
            self.partitions.close()
            self.told.note(error)
            self.told.opened[self.name] = type(error).__name__

    def _connected(self, settings: dict[str, object]) -> SimulatedConsumer:
        self.consumer = SimulatedConsumer(self.simulation, settings)
        return self.consumer

    def _offsets(self) -> Offsets:
        if not self.keeps_rows:
            return KafkaOffsets()
        context = self.context()
        rows = SimulatedConsumedOffsets(cast("SimulatedStore", context.store), GROUP)
        return RowOffsets(cast("Any", rows), cast("Any", context.coordinator))

    @staticmethod
    def _rests(worker: Process) -> bool:
        return worker.call is None or worker.call.server is Server.COMMAND

    # Its worker

    def work(self, process: Process) -> None:
        """Perform a unit on each command, as :meth:`dualwrite.consumer.consumer.Member._work` does."""
        while process.await_command() == WORK and not self.partitions.closed:
            unit = self.partitions.take()
            if unit is None:
                return
            rewind = True
            try:
                rewind = self._working.perform(unit)
            except CodeFailed:
                self.partitions.close()
            except DualWriteError as error:
                self.partitions.close()
                self.told.note(error)
            finally:
                self.partitions.give_back(unit, rewind=rewind)

    def _write(self, tx: Transaction, messages: Sequence[ReadMessage], dead: bool) -> None:
        """The handler: a row and a message for each of the messages that were read; for a dead letter no row."""
        writes = self.plans.writes
        number = len(writes) + 1
        fails = self.plans.fails.pop(0) if self.plans.fails and not dead else None
        named = tuple((f"{one.value()}/{number}", one.partition()) for one in messages)
        inputs = tuple((one.partition(), one.offset()) for one in messages)
        write = Consumed(number, self.name, named, rows=not dead, fails=fails, lane=tx.transactional_id, inputs=inputs)
        writes.append(write)
        self._working.newest = write
        connection = cast("SimulatedConnection", tx.connection)
        connection.about(write)
        for name, partition in named:
            if write.rows:
                connection.insert(name)
            tx.produce(TOPIC, name, partition=partition)
        if fails == "statement":
            connection.fail()
        if fails == "code":
            raise CodeFailed
        if fails == "work":
            raise WorkFails


def reader_of(name: str) -> str:
    """The name of the process that reads, by its own or its worker's."""
    return f"C{name[1:]}" if name.startswith("H") else name


def check_consumed(
    simulation: Simulation, writes: Sequence[Write], losses: set[str], excused: set[int], *, keeps_rows: bool
) -> None:
    """Raise :class:`Finding` unless each input counts once on both sides, in order, and the offsets stand behind the last one.

    Args:
        simulation: At rest.
        writes: All dual writes of the run.
        losses: The states that were lost.
        excused: Numbers of the writes whose Kafka transaction was ended by the environment. If its abort was skipped in all
            partitions of the messages, settling commits these, but not the offsets: the input is handled again, as
            docs/limits.md says.
        keeps_rows: Whether the offsets are rows. If not, a lost transaction's messages are handled again, as the manual says,
            unless the loss is found after a later transaction has moved the offset.
    """
    newest: dict[int, int] = {}
    lost_at: set[int] = set()
    lost: dict[int, set[int]] = defaultdict(set)
    for write, rows in decided_writes(simulation):
        if not isinstance(write, Consumed):
            continue
        is_lost = bool({str(row.prepared) for row in rows} & losses)
        for number, offset in write.inputs:
            if not keeps_rows and is_lost:
                lost_at.add(number)
                lost[number].add(offset)
                continue
            before = newest.get(number, -1)
            if not keeps_rows and write.number in excused:
                lost_at.add(number)
            is_next = offset > before and lost[number].issuperset(range(before + 1, offset))
            if not is_next and not (number in lost_at and offset <= before):
                raise Finding(f"write {write.number}: input {number} at {offset} is handled after {before}")
            newest[number] = offset
    for number in range(INPUTS):
        offset = committed_offset(simulation, number, keeps_rows=keeps_rows)
        if offset - 1 != newest.get(number, -1) and number not in lost_at:
            raise Finding(f"input {number} is handled up to {newest.get(number, -1)}, and the next offset is {offset}")


def committed_offset(simulation: Simulation, number: int, *, keeps_rows: bool) -> int:
    """The group's next offset in a partition of the input. Not a call."""
    at = (INPUT, number)
    if keeps_rows:
        row = simulation.database.consumed.get(consumed_key(GROUP, at))
        return max(row.next_offset, 0) if row is not None else 0
    _, answer = handle(simulation.broker, OffsetFetch(GROUP, at))
    return max(answer.committed_offset, 0)
