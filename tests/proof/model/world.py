"""The world of the model: what can happen, by name, and what must hold when it has come to rest.

Every method that begins with ``do_`` is one thing that happens, and leaves one line in :attr:`World.trace`;
``tests/proof/model/README.md`` explains the lines. The hypothesis machine, the random runs and the scenario files all go
through these methods, so what one of them finds, the others can do again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from simulator import environment
from simulator.broker import handle
from simulator.database import Database, Kind
from simulator.groups import expel, group_of
from simulator.partition import ended_values, producer
from simulator.process import Process, Server
from simulator.requests import NEVER_MS, ErrorCode, InitProducerId, Produce, WriteTxnMarkers
from simulator.scheduler import Held, Simulation
from simulator.state import create_topic, new_broker, transaction

from dualwrite import WriterLimits
from dualwrite.protocol.values import parsed
from dualwrite.writing.dual_write import Ending
from model.checker import Finding, check, decided_writes
from model.consuming import (
    GROUP,
    INPUT,
    INPUTS,
    POLL,
    WORK,
    ConsumingMember,
    Plans,
    check_consumed,
    committed_offset,
    reader_of,
)
from model.fleet import BEAT, FLEET, TIMING, Fleet, Member
from model.grouped import GroupingOwner
from model.handing_over import Decided, Driver, HandedOver, Settler, Worker
from model.owners import TOPIC, Operator, Owner, Recoverer, Told, Write

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from simulator.coordinator import TransactionMetadata
    from simulator.partition import Partition, ProducerEntry
    from simulator.state import Broker

    from dualwrite.kafka.config import EngineName

PARTITIONS = 2
ENDINGS = {Ending.COMMIT: "", Ending.HAND_OVER: ", to hand over", Ending.PREPARE: ", to hand over prepared"}
FAILING = {
    None: "",
    "code": ", and its code fails",
    "statement": ", and a statement fails",
    "once": ", and it has a conflict once",
    "connection": ", and it loses the connection",
    "transaction": ", and it rolls back",
    "work": ", and its work fails",
}
NAMESPACE = "n"


class Cluster(Enum):
    """The brokers, as far as producers can tell; the words are those of schedules."""

    FIRST = "transaction version 1"
    LIMITED = "transaction version 2, with a time limit"
    UNLIMITED = "transaction version 2"


_MOST_STEPS = 20_000


class World:
    """One run.

    Attributes:
        simulation: The servers and the processes.
        writes: All dual writes that were begun.
        told: What processes were told.
        inbox: The newest undecided transaction that each worker has handed over.
        engines: The engines of the owners and workers.
        fleet: The members of the fleet that has been here.
        members: The members of the consumer group, by the process that reads; the dead ones, too.
        excused: Numbers of writes whose Kafka transaction the environment has ended.
        trace: What happened: a line, or for a step its process, its call and the fail points passed (None: it waits).
        counts: How often each kind of thing happened.
        places: For what happened to a process or its request: before which call, by kind.
        passed: How often each fail point was passed.
    """

    def __init__(self, kind: Kind = Kind.READ_COMMITTED, cluster: Cluster = Cluster.FIRST) -> None:
        self.kind = kind
        self.cluster = cluster
        self.simulation = Simulation(_broker(cluster), Database(kind))
        self.writes: list[Write] = []
        self.told = Told()
        self.inbox: dict[str, HandedOver] = {}
        self.decisions = 0
        self.engines: set[EngineName] = set()
        self.excused: set[int] = set()
        self.fleet = Fleet()
        self.members: dict[str, ConsumingMember] = {}
        self.plans = Plans(self.writes)
        self._next_offsets: dict[int, int] = {}
        self.trace: list[str | tuple[str, str, list[str] | None]] = []
        self.counts: Counter[str] = Counter()
        self.places: dict[str, Counter[str]] = defaultdict(Counter)
        self.passed: Counter[str] = Counter()
        self.owners: dict[str, Process] = {}
        self.recoverers = 0
        self.messages = 0
        if kind is not Kind.READ_COMMITTED:
            self.trace.append(f"given {kind.value}")
        if cluster is not Cluster.FIRST:
            self.trace.append(f"given {cluster.value}")

    @contextmanager
    def running(self) -> Iterator[World]:
        """Around all that happens."""
        with self.simulation.clock_and_points():
            yield self

    def _happened(self, kind: str, line: str, before: str | None = None) -> None:
        self.counts[kind] += 1
        if before is not None:
            self.places[kind][before] += 1
        self.trace.append(line)

    def _check_process(self, process: Process) -> None:
        if process.error is not None:
            raise Finding(f"{process.name} ended with {process.error!r}") from process.error
        if self.told.alarms:
            raise Finding(f"a false alarm: {self.told.alarms[0]!r}") from self.told.alarms[0]

    # Processes

    @property
    def alive(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self.simulation.processes.values() if process.call is not None]

    def idle(self) -> list[Process]:
        """The owners that wait for something to do."""
        return [process for process in self.alive if process.call.server is Server.COMMAND]

    def do_open(self, name: str, *, lanes: int = 1, eager: bool = False, engine: EngineName = "librdkafka") -> Process:
        self._happened("opens", f"{name} opens" + self._how([f"{lanes} lanes"] * (lanes > 1), engine, eager=eager))
        owner = GroupingOwner(self.simulation, self.told, lanes=lanes, eager=eager, engine=engine)
        process = self.simulation.spawn(name, owner.run)
        self._check_process(process)
        return process

    def do_join(self, name: str, *, lanes: int = 1, eager: bool = False, engine: EngineName = "librdkafka") -> Process:
        """A member of the fleet opens: it takes the lowest id that nobody holds."""
        self._happened("members", f"{name} joins" + self._how([f"{lanes} lanes"] * (lanes > 1), engine, eager=eager))
        return self._spawn(
            name, Member(self.fleet, self.simulation, self.told, lanes=lanes, eager=eager, engine=engine)
        )

    def do_beat(self, process: Process) -> None:
        self._happened("heartbeats", f"{process.name} sends a heartbeat")
        self.simulation.command(process, BEAT)
        self._check_process(process)

    def do_pass(self, seconds: float) -> None:
        self._happened("times that seconds pass", f"{seconds:g} s pass")
        self.simulation.now_s += seconds

    def _how(self, words: list[str], engine: EngineName, *, eager: bool) -> str:
        self.engines.add(engine)
        words = words + ["sends early"] * eager + ["native"] * (engine == "native")
        return f" ({', '.join(words)})" if words else ""

    def do_recover(self, name: str) -> Recoverer:
        self._happened("recoveries", f"{name} recovers")
        recoverer = Recoverer(self.simulation, self.told)
        process = self.simulation.spawn(name, recoverer.run)
        self._check_process(process)
        return recoverer

    def do_write(
        self,
        process: Process,
        partitions: tuple[int, ...],
        *,
        rows: bool = True,
        fails: str | None = None,
        ending: Ending = Ending.COMMIT,
    ) -> Write:
        write = self._new_write(process, partitions, rows=rows, fails=fails, ending=ending)
        self._happened(
            "writes",
            f"{process.name} writes {_where(write)}{'' if rows else ', without rows'}{FAILING[fails]}"
            + ENDINGS[ending],
        )
        self.writes.append(write)
        self.simulation.command(process, write)
        self._check_process(process)
        return write

    def _new_write(self, process: Process, partitions: tuple[int, ...], **more: Any) -> Write:
        messages = []
        for partition in partitions:
            self.messages += 1
            messages.append((f"m{self.messages}", partition))
        return Write(len(self.writes) + 1, process.name, tuple(messages), **more)

    def do_submit(self, process: Process, partitions: tuple[int, ...], key: str, *, fails: str | None = None) -> None:
        """A caller of the owner's group commit submits a unit, which waits."""
        write = self._new_write(process, partitions, fails=fails, key=key)
        self._happened("units", f"{process.name} is given {_where(write)} by {key}{FAILING[fails]}")
        self.writes.append(write)
        self.simulation.command(process, write)
        self._check_process(process)

    def do_group(self, process: Process, units: int) -> None:
        self._happened("times that units run", f"{process.name} runs its units, {units} at most in a group")
        self.simulation.command(process, WriterLimits(group_units=units, group_open_s=1e9))
        self._check_process(process)

    def do_close(self, process: Process) -> None:
        self._happened("closes", f"{process.name} closes")
        self.simulation.command(process, None)
        self._check_process(process)

    def do_work(self, name: str, slot: str, *, eager: bool = False, engine: EngineName = "librdkafka") -> Process:
        self._happened("workers", f"{name} works on {slot}" + self._how([], engine, eager=eager))
        return self._spawn(name, Worker(self.simulation, self.told, self.inbox, slot, eager=eager, engine=engine))

    def do_decide(self, name: str, workers: Iterable[str]) -> Process:
        """A driver decides on the newest of what these workers have handed over."""
        names = sorted(workers)
        self._happened("drivers", f"{name} decides on the work of {' and '.join(names)}")
        handed_over = [self.inbox.pop(worker) for worker in names]
        self.decisions += 1
        decision = Decided(self.decisions, [one.write for one in handed_over])
        return self._spawn(name, Driver(self.simulation, self.told, decision, handed_over))

    def do_settle(self, name: str, slots: Iterable[str]) -> Process:
        names = sorted(slots)
        self._happened("settlers", f"{name} settles {' and '.join(names)}")
        return self._spawn(name, Settler(self.simulation, self.told, names))

    def _spawn(self, name: str, body: Worker | Driver | Settler) -> Process:
        process = self.simulation.spawn(name, body.run)
        self._check_process(process)
        return process

    def do_step(self, process: Process) -> bool:
        call = process.call
        gone_on = self.simulation.step(process)
        self.trace.append((process.name, call.label, process.passed if gone_on else None))
        if gone_on and process.passed:
            self.passed.update(process.passed)
        if process.error is not None or self.told.alarms:
            self._check_process(process)
        if self.members:
            self._after_a_step(process)
        return gone_on

    def _after_a_step(self, process: Process) -> None:
        """A consumer whose thread that reads has ended is over."""
        self._check_offsets()
        if process.call is None and process.name in self.members and (worker := self._partner(process)) is not None:
            self.simulation.kill(worker)

    def do_kill(self, process: Process) -> None:
        self._happened("kills", f"{process.name} is killed", process.call.label or "its next command")
        partner = self._partner(process)
        self.simulation.kill(process)
        if partner is not None:
            self.simulation.kill(partner)
        if self.kind is Kind.SQLITE:  # no server is left to end its transaction later
            for session in self.simulation.database.orphans:
                self.simulation.database.end_orphan(session)

    # The network

    def do_hold(self, process: Process) -> None:
        self._happened("held", f"the network holds {process.name}'s {process.call.label}", process.call.label)
        self.simulation.hold(process)

    def do_lose_request(self, process: Process) -> None:
        self._happened("lost requests", f"the network loses {process.name}'s {process.call.label}", process.call.label)
        self.simulation.lose_request(process)

    def do_lose_answer(self, process: Process) -> None:
        self._happened(
            "lost answers", f"the network loses the answer to {process.name}'s {process.call.label}", process.call.label
        )
        self.simulation.lose_answer(process)

    def do_wait_in_vain(self, process: Process, seconds: float) -> None:
        self._happened("waits", f"{process.name} waits {seconds:g} s in vain")
        self.simulation.wait_in_vain(process, seconds)
        self._check_process(process)

    def do_arrive(self, held: Held, *, answered: bool = True) -> None:
        ending = "" if answered else ", its answer is lost"
        self._happened("late requests", f"the held {self._spoken_held(held)} arrives{ending}", held.label)
        self._arrive(held, answered=answered)
        self._check_process(held.call.process)

    def _arrive(self, held: Held, *, answered: bool = True) -> None:
        """A late ``InitProducerId`` aborts what it finds open, whoever sent it: docs/limits.md.

        It may not cost what an owner has decided, only what a settler is about to end under a later epoch of its own.
        """
        for request in held.call.requests:
            if isinstance(request, InitProducerId):
                known = transaction(self.simulation.broker, request.transactional_id)
                if known is not None and self._is_begun_by_a_settler(known):
                    self._excuse(request.transactional_id)
        self.simulation.arrive(held, answered=answered)

    def _spoken_held(self, held: Held) -> str:
        """A held request as lines say it: numbered from the second of its kind on."""
        alike = [one for one in self.simulation.held if (one.owner, one.label) == (held.owner, held.label)]
        number = alike.index(held) + 1
        return f"{held.label}{'' if number == 1 else f' {number}'} of {held.owner}"

    def do_drop(self, held: Held) -> None:
        self._happened("lost requests", f"the held {self._spoken_held(held)} is lost", held.label)
        self.simulation.drop(held)

    # The database

    def do_break_connection(self, process: Process, how: str) -> None:
        label = process.call.label
        self._happened(f"connections broken {how}", f"{process.name}'s connection breaks {how} {label}", label)
        self.simulation.break_connection(process, executed=how == "after", under_way=how == "during")
        self._check_process(process)

    def do_end_session(self, process: Process) -> None:
        self._happened("sessions ended", f"the database ends {process.name}'s sessions")
        self.simulation.end_sessions(process)

    # Consumers

    @property
    def keeps_rows(self) -> bool:
        """Whether the group's offsets are rows."""
        return any(member.keeps_rows for member in self.members.values())

    def do_consume(
        self,
        name: str,
        number: int,
        *,
        keeps_rows: bool = False,
        eager: bool = False,
        engine: EngineName = "librdkafka",
    ) -> Process:
        """A member of the group starts. All members keep their offsets in the same place."""
        how = self._how(["offsets in the database"] * keeps_rows, engine, eager=eager)
        self._happened("consumers", f"{name} consumes as {number}{how}")
        self._require_input()
        member = ConsumingMember(
            name, number, self.simulation, self.told, self.plans, keeps_rows=keeps_rows, eager=eager, engine=engine
        )
        self.members[name] = member
        member.worker = self.simulation.spawn(member.worker_name, member.work)
        process = self.simulation.spawn(name, member.read)
        self._check_process(process)
        return process

    def _require_input(self) -> None:
        if not self.simulation.broker.group_topic:
            broker = create_topic(self.simulation.broker, INPUT, INPUTS)
            self.simulation.broker = broker._replace(group_topic=INPUT)

    def do_feed(self, partition: int, count: int) -> None:
        self._happened("times that input comes", f"{count} messages come to input {partition}")
        self._require_input()
        for _ in range(count):
            self.messages += 1
            request = Produce(None, -1, -1, (INPUT, partition), -1, (f"i{self.messages}",))
            self.simulation.broker, _ = handle(self.simulation.broker, request)

    def do_poll(self, process: Process) -> None:
        self._happened("polls", f"{process.name} polls")
        self.simulation.command(process, POLL)
        self._check_process(process)

    def do_unit(self, process: Process, fails: str | None = None) -> None:
        self._happened("units of consumers", f"{process.name} takes a unit{FAILING[fails]}")
        if fails is not None:
            self.plans.fails.append(fails)
        self.simulation.command(process, WORK)
        self._check_process(process)

    def do_expel(self, name: str) -> None:
        """The group has not heard of a member for too long: it is dead, or paused."""
        self._happened("members expelled", f"the group expels {name}")
        consumer = self.members[name].consumer
        if consumer is not None and consumer.member_id:
            self.simulation.broker = expel(self.simulation.broker, GROUP, consumer.member_id)

    def dead_members(self) -> list[str]:
        """The dead members that the group does not know to be dead."""
        known = {one.member_id for one in group_of(self.simulation.broker, GROUP).members}
        alive = {process.name for process in self.alive}
        return [
            name
            for name, member in self.members.items()
            if name not in alive and member.consumer is not None and member.consumer.member_id in known
        ]

    def _partner(self, process: Process) -> Process | None:
        """The other process of a consumer's two."""
        member = self.members.get(reader_of(process.name))
        if member is None:
            return None
        name = member.name if process.name != member.name else member.worker_name
        return self.simulation.processes.get(name)

    def _check_offsets(self) -> None:
        for number in range(INPUTS if self.members else 0):
            offset = committed_offset(self.simulation, number, keeps_rows=self.keeps_rows)
            if offset < self._next_offsets.get(number, 0):
                raise Finding(f"the offset of input {number} moves back to {offset} from {self._next_offsets[number]}")
            self._next_offsets[number] = offset

    def _check_all(self) -> None:
        check(self.simulation, self.writes, self.told, self.excused)
        if self.members:
            self._check_offsets()
            losses = self.told.losses | {state for _, state in self.simulation.database.incidents}
            check_consumed(self.simulation, self.writes, losses, self.excused, keeps_rows=self.keeps_rows)

    def do_last_consumer(self) -> None:
        """All members die; a last one settles for them, and consumes the rest. No recovery finds more to do."""
        self._happened("last consumers", "a last consumer settles for all and reads the rest")
        for process in self.alive:
            self.simulation.kill(process)
        self._come_to_rest()
        self._end_what_hangs()
        for member in group_of(self.simulation.broker, GROUP).members:
            self.simulation.broker = expel(self.simulation.broker, GROUP, member.member_id)
        keeps_rows, name = self.keeps_rows, f"C{len(self.members) + 1}"
        for _ in range(len(self.members) + 1):  # each loss that one is told of ends it
            member = ConsumingMember(
                name,
                9,
                self.simulation,
                self.told,
                self.plans,
                keeps_rows=keeps_rows,
                eager=False,
                engine=self._newest_engine,
            )
            self.plans.fails.clear()
            self.members[name] = member
            member.worker = self.simulation.spawn(member.worker_name, member.work)
            process = self.simulation.spawn(name, member.read)
            self._run_all()
            if self._read_the_rest(member, process):
                break
            self.simulation.kill(process)
            self.simulation.kill(member.worker)
            for left in group_of(self.simulation.broker, GROUP).members:
                self.simulation.broker = expel(self.simulation.broker, GROUP, left.member_id)
        else:
            raise Finding(f"the last consumer does not come to the end: {self.told.opened}")
        if self._recover() != 0:
            raise Finding("the members have left something for a recovery")
        self._check_all()

    def _read_the_rest(self, member: ConsumingMember, process: Process) -> bool:
        for _ in range(200):
            if process.call is None or member.partitions.closed:
                return False
            self.simulation.command(process, POLL)
            self._run_all()
            while process.call is not None and member.has_work and not member.partitions.closed:
                assert member.worker is not None
                self.simulation.command(member.worker, WORK)
                self._run_all()
            ends = {found.topic_partition: found.log_end for found in self.simulation.broker.partitions}
            if all(
                committed_offset(self.simulation, number, keeps_rows=self.keeps_rows) == ends[INPUT, number]
                for number in range(INPUTS)
            ):
                return True
            self.simulation.now_s += 5.0
        return False

    def do_keep_house(self, process: Process) -> None:
        self._happened("housekeeping", f"{process.name} keeps house")
        self.simulation.command(process, "keep house")
        self._check_process(process)

    def do_end_orphan(self, index: int, *, committed: bool) -> None:
        session = self.simulation.database.orphans[index]
        self._happened(
            "orphans", f"the database {'commits' if committed else 'rolls back'} orphaned session {index + 1}"
        )
        self.simulation.database.end_orphan(session, committed=committed)

    def do_time_out_lock(self, process: Process) -> None:
        self._happened("lock timeouts", f"{process.name} waits too long for a lock")
        error = self.simulation.database.time_out_lock(process.call.session)
        process.resume(error=error)
        self._check_process(process)

    def do_stop_database(self) -> None:
        self._happened("database stops", "the database is stopped at once and started")
        self.simulation.stop_database()

    # The broker

    def do_restart_broker(self) -> None:
        self._happened("broker restarts", "the broker is restarted")
        self.simulation.restart_broker(environment.restart(self.simulation.broker))

    def do_delay_markers(self) -> None:
        self._happened("markers delayed", "the broker delays its markers")
        self.simulation.markers_delayed = True

    def do_write_markers(self) -> None:
        self._happened("markers written", "the broker writes its markers")
        self.simulation.markers_delayed = False
        self.simulation.write_markers()

    def do_write_one_marker(self, kafka_id: str) -> None:
        self._happened("single markers", f"the broker writes one marker of {spoken(kafka_id)}")
        self.simulation.broker = environment.write_marker(self.simulation.broker, kafka_id)

    def do_forget_marker(self, kafka_id: str, partition: int) -> None:
        self._happened(
            "markers forgotten", f"the broker forgets the marker of {spoken(kafka_id)} on partition {partition}"
        )
        self.simulation.outages += 1
        self.simulation.broker = environment.forget_marker(self.simulation.broker, kafka_id, (TOPIC, partition))

    def do_suspend(self, partition: int) -> None:
        self._happened("leaders suspended", f"the leader of partition {partition} is suspended")
        self.simulation.broker = environment.suspend(self.simulation.broker, (TOPIC, partition))

    def do_lose_leader(self, partition: int) -> None:
        """No connection breaks: no error shows."""
        self._happened("leaders lost", f"partition {partition} has no leader any more")
        self.simulation.broker = environment.lose_leader(self.simulation.broker, (TOPIC, partition))
        self._markers_of_the_environment()

    def do_resume(self, partition: int) -> None:
        self._happened("leaders resumed", f"the leader of partition {partition} goes on")
        self.simulation.broker = environment.resume(self.simulation.broker, (TOPIC, partition))
        self._markers_of_the_environment()

    def do_time_out(self, kafka_id: str) -> None:
        self._happened("time-outs", f"the broker times out {spoken(kafka_id)}")
        self._excuse(kafka_id)
        self.simulation.broker = environment.time_out(self.simulation.broker, kafka_id)
        self._markers_of_the_environment()

    def do_force_terminate(self, kafka_id: str) -> None:
        self._happened("operator aborts", f"an operator terminates {spoken(kafka_id)}")
        self._excuse(kafka_id)
        self.simulation.broker, _ = handle(self.simulation.broker, InitProducerId(kafka_id, 60_000))
        self._markers_of_the_environment()

    def do_abort_on_partition(self, kafka_id: str, partition: int) -> None:
        self._happened("operator aborts", f"an operator aborts {spoken(kafka_id)} on partition {partition}")
        self._excuse(kafka_id)
        known = transaction(self.simulation.broker, kafka_id)
        request = WriteTxnMarkers(
            known.producer_id,
            known.producer_epoch,
            False,
            ((TOPIC, partition),),
            self.simulation.broker.coordinator_epoch,
        )
        self.simulation.broker, answer = handle(self.simulation.broker, request)
        assert answer.error_codes == (ErrorCode.NONE,)

    def _markers_of_the_environment(self) -> None:
        if not self.simulation.markers_delayed:
            self.simulation.write_markers()

    def _excuse(self, kafka_id: str) -> None:
        """Whatever is open under this id is the environment's doing from now on."""
        known = transaction(self.simulation.broker, kafka_id)
        names = set()
        for found in self.simulation.broker.partitions:
            for entry in found.producers:
                if entry.producer_id == known.producer_id and entry.txn_start >= 0:
                    names |= set(_open_values(found, entry))
        self.excused |= {write.number for write in self.writes if names & {name for name, _ in write.messages}}

    def do_expire(self, kafka_id: str) -> None:
        self._happened("expired ids", f"the broker forgets {spoken(kafka_id)}")
        self.simulation.broker = environment.expire_transactional_id(self.simulation.broker, kafka_id)

    # Rest

    def do_heal(self, *, deliver: bool = True) -> None:
        """Everything that is held arrives, or never does; every process ends or becomes idle; then all is checked."""
        self._happened(
            "quiet points", "everything heals" if deliver else "everything held is lost, and everything heals"
        )
        self._come_to_rest(deliver=deliver)
        self._recover()
        self._end_what_hangs()
        before = self._shown()
        if self._recover() != 0:
            raise Finding("the second recovery found something to do")
        if self._shown() != before:
            raise Finding("the second recovery changed something")
        self._check_all()

    def _come_to_rest(self, *, deliver: bool = True) -> None:
        for _, partition in self.simulation.broker.suspended:
            self.simulation.broker = environment.resume(self.simulation.broker, (TOPIC, partition))
        for held in list(self.simulation.held):
            if held in self.simulation.held:
                (self._arrive if deliver else self.simulation.drop)(held)
        self.simulation.markers_delayed = False
        self.simulation.write_markers()
        database = self.simulation.database
        for session in database.orphans:
            database.end_orphan(session, committed=deliver)
        self._run_all()

    def _end_what_hangs(self) -> None:
        """As an operator does (docs/limits.md): end undecided transactions whose abort was skipped unnoticed.

        They are named nowhere. What the database has decided must never need it.
        """
        for kafka_id in self._begun_by_settlers():
            self.counts["undecided transactions ended by an operator"] += 1
            self.simulation.spawn(f"operator of {kafka_id}", Operator(self.simulation, kafka_id).run)
            self._run_all()
        broker = self.simulation.broker
        open_ids = {known.producer_id for known in broker.transactions if known.state == "Ongoing"}
        # A unit that ran again has sent the same messages twice: first in the transaction whose abort was skipped.
        ended = {value for found in broker.partitions for value in ended_values(found)}
        decided = {name for write, _ in decided_writes(self.simulation) for name, _ in write.messages} - ended
        for found in broker.partitions:
            for entry in found.producers:
                if entry.txn_start < 0 or entry.producer_id in open_ids or decided & set(_open_values(found, entry)):
                    continue
                self.counts["undecided transactions ended by an operator"] += 1
                marker = WriteTxnMarkers(
                    entry.producer_id, entry.producer_epoch, False, (found.topic_partition,), broker.coordinator_epoch
                )
                self.simulation.broker, answer = handle(self.simulation.broker, marker)
                assert answer.error_codes == (ErrorCode.NONE,)

    def _begun_by_settlers(self) -> list[str]:
        """The ids under which a settler has begun to end what was forgotten, and died once another one had settled the row."""
        begun = []
        for known in self.simulation.broker.transactions:
            named = parsed(known.transactional_id)
            row = None if named is None else self.simulation.database.rows.get(named[0])
            if named is None or row is None or named[2] > row.settled_incarnation:
                continue
            if self._is_begun_by_a_settler(known):
                begun.append(known.transactional_id)
        return begun

    def _is_begun_by_a_settler(self, known: TransactionMetadata) -> bool:
        """Whether a transaction has a later epoch than what is open in the partitions, which an owner's never has."""
        entries = [producer(found, known.producer_id) for found in self.simulation.broker.partitions]
        return known.state == "Ongoing" and all(
            entry.producer_epoch < known.producer_epoch for entry in entries if entry and entry.txn_start >= 0
        )

    def _recover(self) -> int:
        self.recoverers += 1
        recoverer = Recoverer(self.simulation, self.told)
        process = self.simulation.spawn(f"recoverer {self.recoverers}", recoverer.run)
        self._run_all()
        if recoverer.planned is None:
            raise Finding(f"recovery failed: {self.told.opened[process.name]}")
        return recoverer.planned

    def _run_all(self) -> None:
        simulation = self.simulation
        for _ in range(_MOST_STEPS):
            moved = False
            for process in list(simulation.processes.values()):
                call = process.call
                if call is None or call.server is Server.COMMAND:
                    self._forget(process)
                elif simulation.waits_for_an_answer(process):
                    simulation.wait_in_vain(process, 0.0)
                    moved = True
                elif simulation.can_step(process):
                    simulation.step(process)
                    moved = True
                self._check_process(process)
                if self.members:
                    self._after_a_step(process)
            for session in simulation.database.orphans:  # of connections that were discarded meanwhile
                simulation.database.end_orphan(session)
                moved = True
            if not moved:
                break
        stuck = [process for process in self.alive if process.call.server is not Server.COMMAND]
        if stuck:
            raise Finding(f"{stuck} hang")

    def _forget(self, process: Process) -> None:
        if process.call is None and process.error is None:
            del self.simulation.processes[process.name]

    def _shown(self):
        return (
            self.simulation.broker.partitions,
            self.simulation.broker.transactions,
            dict(self.simulation.database.rows),
            dict(self.simulation.database.prepared),
        )

    def do_last_owner(self) -> None:
        """After rest: a last owner opens, settling what there may be, and writes; all is checked once more."""
        self._happened("last owners", "a last owner opens and writes")
        for process in self.idle():
            self.simulation.kill(process)
        owner = self._open_last("last")
        if owner is None:
            owner = self._open_last("very last")  # the first one was told of a loss
        if owner is None:
            raise Finding(f"nobody can open any more: {self.told.opened}")
        write = self._write_last(owner)
        if write.told != "committed":
            raise Finding(f"the last write was told {write.told}")
        check(self.simulation, self.writes, self.told, self.excused)

    @property
    def _newest_engine(self) -> EngineName:
        return "librdkafka" if self.cluster is Cluster.FIRST else "native"

    def _open_last(self, name: str) -> Process | None:
        process = self.simulation.spawn(
            name, Owner(self.simulation, self.told, lanes=2, eager=False, engine=self._newest_engine).run
        )
        self._run_all()
        return process if self.told.opened[name] == "open" else None

    def _write_last(self, owner: Process) -> Write:
        self.messages += 1
        write = Write(len(self.writes) + 1, owner.name, ((f"m{self.messages}", 0),))
        self.writes.append(write)
        self.simulation.command(owner, write)
        self._run_all()
        return write

    def do_last_member(self) -> None:
        """All members die, and their leases expire; a last one settles for all, and writes. No recovery finds more to do."""
        self._happened("last members", "a last member joins and settles for all")
        for process in self.alive:
            self.simulation.kill(process)
        self._come_to_rest()
        self.simulation.now_s += TIMING.timeout_s
        last = Member(self.fleet, self.simulation, self.told, lanes=1, eager=False, engine=self._newest_engine)
        process = self.simulation.spawn("last", last.run)
        self._run_all()
        if self.told.opened["last"] != "open":
            process = self.simulation.spawn("last", last.run)  # it was told of a loss
            self._run_all()
        self.simulation.command(process, BEAT)
        self._run_all()
        left = {name: owner for name, (owner, _) in self.simulation.database.leases.items() if owner is not None}
        if list(left) != [last.id] or last.id != f"{FLEET}-0":
            raise Finding(f"the last member is {last.id}, and not free are {left}")
        self._end_what_hangs()
        if self._recover() != 0:
            raise Finding("the members have left something for a recovery")
        write = self._write_last(process)
        if write.told != "committed":
            raise Finding(f"the last write was told {write.told}")
        check(self.simulation, self.writes, self.told, self.excused)

    def do_last_batch(self) -> None:
        """After rest: a last worker hands over three times, and goes on with its producer; all is checked once more."""
        self._happened("last workers", "a last worker hands over and goes on")
        for process in self.idle():
            self.simulation.kill(process)
        last = Worker(self.simulation, self.told, self.inbox, "slot#1", eager=False, engine=self._newest_engine)
        worker = self.simulation.spawn("last", last.run)
        before = self.told.counts["workers go on"]
        for _ in range(3):
            self._last_decision(worker)
        if self.told.counts["workers go on"] != before + 2:
            raise Finding("the last worker did not go on with its producer")
        check(self.simulation, self.writes, self.told, self.excused)

    def _last_decision(self, worker: Process) -> None:
        self.messages += 1
        write = Write(len(self.writes) + 1, worker.name, ((f"m{self.messages}", 0),), ending=Ending.HAND_OVER)
        self.writes.append(write)
        self.simulation.command(worker, write)
        self._run_all()
        if write.told != "handed over":
            raise Finding(f"the last worker was told {write.told}")
        self.decisions += 1
        driver = Driver(self.simulation, self.told, Decided(self.decisions, [write]), [self.inbox.pop(worker.name)])
        self.simulation.spawn("last driver", driver.run)
        self._run_all()
        if write.told != "completed":
            raise Finding(f"the last driver was told {write.told}")

    # What can be chosen from

    def ongoing(self) -> list[str]:
        """The Kafka ids with an open transaction."""
        return [known.transactional_id for known in self.simulation.broker.transactions if known.state == "Ongoing"]

    def limited(self) -> list[str]:
        """The Kafka ids with an open transaction that the broker may time out."""
        known = self.simulation.broker.transactions
        return [one.transactional_id for one in known if one.state == "Ongoing" and one.timeout_ms != NEVER_MS]

    def prepared(self) -> list[str]:
        """The Kafka ids whose markers are still to come."""
        return list(environment.prepared_ids(self.simulation.broker))

    def at_rest(self, *, everywhere: bool = False) -> list[str]:
        """The Kafka ids that the coordinator may forget.

        Args:
            everywhere: Only those that have nothing open in any partition: before an id is forgotten, after a week, an operator ends them.
        """
        return [
            known.transactional_id
            for known in self.simulation.broker.transactions
            if known.state in {"Empty", "CompleteCommit", "CompleteAbort"}
            and not (everywhere and self._is_open(known.producer_id))
        ]

    def _is_open(self, producer_id: int) -> bool:
        entries = (producer(found, producer_id) for found in self.simulation.broker.partitions)
        return any(entry is not None and entry.txn_start >= 0 for entry in entries)


def _broker(cluster: Cluster) -> Broker:
    if cluster is Cluster.FIRST:
        return new_broker({TOPIC: PARTITIONS})
    limit = {"max_timeout_ms": NEVER_MS} if cluster is Cluster.UNLIMITED else {}
    return new_broker({TOPIC: PARTITIONS}, transaction_version=2, **limit)


def _open_values(found: Partition, entry: ProducerEntry) -> Iterator[Hashable]:
    """The messages that a producer has written to a partition in a transaction that is still open there."""
    for batch in found.batches:
        if batch.producer_id == entry.producer_id and batch.base_offset >= entry.txn_start:
            yield from batch.values


def _where(write: Write) -> str:
    return " and ".join(f"{name} to partition {partition}" for name, partition in write.messages) or "rows alone"


def spoken(kafka_id: str) -> str:
    """A Kafka id as scenarios say it."""
    name, _, incarnation = kafka_id.rpartition(".")
    return f"{name.removesuffix('.' + NAMESPACE)}, incarnation {incarnation}"


def kafka_id(name: str, incarnation: int) -> str:
    """The Kafka id of an incarnation in this world."""
    return f"{name}.{NAMESPACE}.{incarnation}"
