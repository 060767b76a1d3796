"""Schedules as text: what a run has done, in lines that can be read aloud, and run again. ``README.md`` lists them all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from simulator.database import Kind
from simulator.process import Server

from dualwrite.failpoints import FAILPOINTS
from model.consuming import reader_of
from model.owners import TOPIC
from model.world import ENDINGS, FAILING, Cluster, World, kafka_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from simulator.process import Process
    from simulator.requests import TopicPartition
    from simulator.scheduler import Held

    from dualwrite.kafka.config import EngineName

_FAILING = {said: fails for fails, said in FAILING.items()}
_ENDINGS = {said: ending for ending, said in ENDINGS.items()}
_GIVEN = "given "
_CLUSTERS = {cluster.value: cluster for cluster in Cluster}
_FAR = 500
"""So many steps are enough to come to any request."""


class Impossible(Exception):
    """The line cannot happen now: its process is not there, or is elsewhere."""


def lines_of(trace: Sequence[str | tuple[str, str, list[str] | None]]) -> list[str]:
    """A trace as lines: steps of one process in a row are one line."""
    lines: list[str] = []
    steps: list[tuple[str, str, list[str] | None]] = []

    def flush() -> None:
        if steps:
            lines.append(_steps_line(steps))
            steps.clear()

    for item in trace:
        if isinstance(item, tuple):
            if steps and steps[-1][0] != item[0]:
                flush()
            steps.append(item)
        else:
            flush()
            lines.append(item)
    flush()
    return lines


def _steps_line(steps: Sequence[tuple[str, str, list[str] | None]]) -> str:
    name = steps[0][0]
    passed = steps[-1][2]
    before = {point for step in steps[:-1] for point in step[2] or ()}
    comment = ", ".join(label for _, label, _ in steps)
    if passed is None:
        comment += ": waits for a lock"
    elif passed and passed[-1] not in before:
        return f"{name} runs to {passed[-1]}  # {comment}"
    return f"{name} steps{'' if len(steps) == 1 else f' {len(steps)} times'}  # {comment}"


def fine_lines_of(trace: Iterable[str | tuple[str, str, list[str] | None]]) -> list[str]:
    """A trace as lines, each step its own: to be shrunk."""
    return [f"{item[0]} steps" if isinstance(item, tuple) else item for item in trace]


class Performer:
    """Performs lines in a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def perform(self, line: str) -> None:
        """Let it happen.

        Raises:
            Impossible: It cannot happen now.
            ValueError: It is no line of the language.
            Finding: The promise is broken.
        """
        for pattern, method in _LINES:
            match = pattern.fullmatch(line)
            if match:
                method(self, **match.groupdict())
                return
        raise ValueError(f"not a line of a schedule: {line!r}")

    # Finding one's way

    def _process(self, name: str) -> Process:
        process = self._world.simulation.processes.get(name)
        if process is None or process.call is None:
            raise Impossible(f"there is no {name}")
        return process

    def _require_none(self, name: str) -> None:
        process = self._world.simulation.processes.get(name)
        if process is not None and process.call is not None:
            raise Impossible(f"{name} is there already")

    def _commanded(self, name: str) -> Process:
        process = self._process(name)
        if process.call.server is not Server.COMMAND:
            raise Impossible(f"{name} is busy")
        return process

    def _can_step(self, process: Process) -> bool:
        return process.call is not None and self._world.simulation.can_step(process)

    def _may_ask(self, process: Process) -> bool:
        """Whether it can send its request, even to a server that does not answer."""
        return self._can_step(process) or not (process.call.session or process.call.held or process.call.lost)

    def _before(self, name: str, label: str) -> Process:
        """The process, which runs until it stands before that call."""
        process = self._process(name)
        for _ in range(_FAR):
            if process.call is not None and process.call.label == label and self._may_ask(process):
                return process
            if not self._can_step(process):
                break
            self._world.do_step(process)
        raise Impossible(f"{name} does not come to {label}")

    def _held(self, name: str, spoken: str) -> Held:
        label, _, number = spoken.partition(" ")
        alike = [held for held in self._world.simulation.held if (held.owner, held.label) == (name, label)]
        if len(alike) < int(number or 1):
            raise Impossible(f"no {spoken} of {name} is held")
        return alike[int(number or 1) - 1]

    def _known(self, name: str, incarnation: str, among: Sequence[str]) -> str:
        found = kafka_id(name, int(incarnation))
        if found not in among:
            raise Impossible(f"{found} is not in that state")
        return found

    # Lines

    def opens(self, name: str, lanes: str | None, early: str | None, native: str | None) -> None:
        self._require_none(name)
        self._world.do_open(name, lanes=int(lanes or 1), eager=early is not None, engine=_engine(native))

    def joins(self, name: str, lanes: str | None, early: str | None, native: str | None) -> None:
        self._require_none(name)
        self._world.do_join(name, lanes=int(lanes or 1), eager=early is not None, engine=_engine(native))

    def beats(self, name: str) -> None:
        self._world.do_beat(self._commanded(name))

    def consumes(self, name: str, number: str, rows: str | None, early: str | None, native: str | None) -> None:
        self._require_none(name)
        self._world.do_consume(
            name, int(number), keeps_rows=rows is not None, eager=early is not None, engine=_engine(native)
        )

    def input_comes(self, count: str, partition: str) -> None:
        self._world.do_feed(int(partition), int(count))

    def polls(self, name: str) -> None:
        self._world.do_poll(self._commanded(name))

    def takes_unit(self, name: str, fails: str | None) -> None:
        process = self._commanded(name)
        if not self._world.members[reader_of(name)].has_work:
            raise Impossible(f"there is no work for {name}")
        self._world.do_unit(process, _FAILING[fails or ""])

    def expels(self, name: str) -> None:
        if name not in self._world.members:
            raise Impossible(f"there is no {name}")
        self._world.do_expel(name)

    def last_consumer(self) -> None:
        self._world.do_last_consumer()

    def seconds_pass(self, seconds: str) -> None:
        self._world.do_pass(float(seconds))

    def last_member(self) -> None:
        self._world.do_last_member()

    def recovers(self, name: str) -> None:
        self._world.do_recover(name)

    def works(self, name: str, slot: str, early: str | None, native: str | None) -> None:
        self._require_none(name)
        self._world.do_work(name, slot, eager=early is not None, engine=_engine(native))

    def decides(self, name: str, workers: str) -> None:
        self._require_none(name)
        names = workers.split(" and ")
        if missing := sorted(set(names) - self._world.inbox.keys()):
            raise Impossible(f"{missing} have handed nothing over")
        self._world.do_decide(name, names)

    def settles(self, name: str, slots: str) -> None:
        self._require_none(name)
        self._world.do_settle(name, slots.split(" and "))

    def writes(self, name: str, where: str, without: str | None, fails: str | None, over: str | None) -> None:
        process = self._commanded(name)
        partitions = tuple(int(number) for number in re.findall(r"to partition (\d+)", where))
        self._world.do_write(
            process, partitions, rows=without is None, fails=_FAILING[fails or ""], ending=_ENDINGS[over or ""]
        )

    def is_given(self, name: str, where: str, key: str, fails: str | None) -> None:
        process = self._commanded(name)
        partitions = tuple(int(number) for number in re.findall(r"to partition (\d+)", where))
        self._world.do_submit(process, partitions, key, fails=_FAILING[fails or ""])

    def runs_units(self, name: str, units: str) -> None:
        self._world.do_group(self._commanded(name), int(units))

    def closes(self, name: str) -> None:
        self._world.do_close(self._commanded(name))

    def keeps_house(self, name: str) -> None:
        self._world.do_keep_house(self._commanded(name))

    def steps(self, name: str, times: str | None) -> None:
        process = self._process(name)
        for _ in range(int(times or 1)):
            if not self._can_step(process):
                raise Impossible(f"{name} cannot go on")
            self._world.do_step(process)

    def runs(self, name: str) -> None:
        process = self._process(name)
        for _ in range(_FAR):
            if not self._can_step(process):
                return
            self._world.do_step(process)
        raise Impossible(f"{name} does not come to an end")

    def runs_to(self, name: str, point: str) -> None:
        if point not in FAILPOINTS:
            raise ValueError(f"there is no fail point {point}")
        process = self._process(name)
        for _ in range(_FAR):
            if not self._can_step(process):
                break
            self._world.do_step(process)
            if point in process.passed:
                return
        raise Impossible(f"{name} does not come to {point}")

    def is_killed(self, name: str) -> None:
        self._world.do_kill(self._process(name))

    def holds(self, name: str, label: str) -> None:
        self._world.do_hold(self._before(name, label))

    def loses(self, answer: str | None, name: str, label: str) -> None:
        process = self._before(name, label)
        (self._world.do_lose_answer if answer else self._world.do_lose_request)(process)

    def waits(self, name: str, seconds: str) -> None:
        process = self._process(name)
        if not self._world.simulation.waits_for_an_answer(process):
            raise Impossible(f"{name} waits for nothing")
        self._world.do_wait_in_vain(process, float(seconds))

    def arrives(self, label: str, name: str, lost: str | None) -> None:
        held = self._held(name, label)
        if not self._world.simulation.can_arrive(held):
            raise Impossible("nobody is there to take it")
        self._world.do_arrive(held, answered=lost is None)

    def held_is_lost(self, label: str, name: str) -> None:
        self._world.do_drop(self._held(name, label))

    def connection_breaks(self, name: str, how: str, label: str) -> None:
        self._world.do_break_connection(self._before(name, label), how)

    def sessions_end(self, name: str) -> None:
        self._world.do_end_session(self._process(name))

    def orphan_ends(self, does: str, number: str) -> None:
        orphans = self._world.simulation.database.orphans
        index = int(number) - 1
        if index >= len(orphans) or (does == "commits" and not orphans[index].committing):
            raise Impossible("there is no such session")
        self._world.do_end_orphan(index, committed=does == "commits")

    def lock_times_out(self, name: str) -> None:
        process = self._process(name)
        session = process.call.session
        if session is None or not self._world.simulation.database.is_blocked(session):
            raise Impossible(f"{name} waits for no lock")
        self._world.do_time_out_lock(process)

    def database_stops(self) -> None:
        self._world.do_stop_database()

    def broker_restarts(self) -> None:
        self._world.do_restart_broker()

    def markers_are_delayed(self) -> None:
        self._world.do_delay_markers()

    def markers_are_written(self) -> None:
        self._world.do_write_markers()

    def one_marker(self, name: str, incarnation: str) -> None:
        self._world.do_write_one_marker(self._known(name, incarnation, self._world.prepared()))

    def forgets_marker(self, name: str, incarnation: str, partition: str) -> None:
        self._world.do_forget_marker(self._known(name, incarnation, self._world.prepared()), int(partition))

    def leader_is_suspended(self, partition: str) -> None:
        self._require_leader(partition, among=())
        self._world.do_suspend(int(partition))

    def leader_is_lost(self, partition: str) -> None:
        broker = self._world.simulation.broker
        self._require_leader(partition, among=set(broker.suspended) - set(broker.leaderless))
        self._world.do_lose_leader(int(partition))

    def leader_goes_on(self, partition: str) -> None:
        self._require_leader(partition, among=self._world.simulation.broker.suspended)
        self._world.do_resume(int(partition))

    def _require_leader(self, partition: str, *, among: Collection[TopicPartition]) -> None:
        place = (TOPIC, int(partition))
        if place not in (among or {place} - set(self._world.simulation.broker.suspended)):
            raise Impossible(f"the leader of partition {partition} is in another state")

    def times_out(self, name: str, incarnation: str) -> None:
        self._world.do_time_out(self._known(name, incarnation, self._world.limited()))

    def forgets(self, name: str, incarnation: str) -> None:
        self._world.do_expire(self._known(name, incarnation, self._world.at_rest()))

    def terminates(self, name: str, incarnation: str) -> None:
        self._world.do_force_terminate(self._known(name, incarnation, self._world.ongoing()))

    def aborts_on(self, name: str, incarnation: str, partition: str) -> None:
        if (TOPIC, int(partition)) in self._world.simulation.broker.suspended:
            raise Impossible("nobody is there to take it")
        self._world.do_abort_on_partition(self._known(name, incarnation, self._world.ongoing()), int(partition))

    def heals(self, lost: str | None) -> None:
        self._world.do_heal(deliver=lost is None)

    def last_owner(self) -> None:
        self._world.do_last_owner()

    def last_worker(self) -> None:
        self._world.do_last_batch()


_NAME = r"(?P<name>[A-Z]\d*)"
_LABEL = r"(?P<label>\w+(?: \w+)*)"
_OF = r"(?P<name>[a-z#0-9/-]+), incarnation (?P<incarnation>\d+)"
_LINES: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(pattern), method)
    for pattern, method in [
        (
            rf"{_NAME} opens(?: \((?:(?P<lanes>\d+) lanes)?(?:, )?(?P<early>sends early)?(?:, )?(?P<native>native)?\))?",
            Performer.opens,
        ),
        (
            rf"{_NAME} joins(?: \((?:(?P<lanes>\d+) lanes)?(?:, )?(?P<early>sends early)?(?:, )?(?P<native>native)?\))?",
            Performer.joins,
        ),
        (rf"{_NAME} sends a heartbeat", Performer.beats),
        (
            rf"{_NAME} consumes as (?P<number>\d+)(?: \((?P<rows>offsets in the database)?(?:, )?(?P<early>sends early)?"
            r"(?:, )?(?P<native>native)?\))?",
            Performer.consumes,
        ),
        (r"(?P<count>\d+) messages come to input (?P<partition>\d+)", Performer.input_comes),
        (rf"{_NAME} polls", Performer.polls),
        (rf"{_NAME} takes a unit(?P<fails>, and .*)?", Performer.takes_unit),
        (rf"the group expels {_NAME}", Performer.expels),
        (r"a last consumer settles for all and reads the rest", Performer.last_consumer),
        (r"(?P<seconds>[0-9.]+) s pass", Performer.seconds_pass),
        (r"a last member joins and settles for all", Performer.last_member),
        (rf"{_NAME} recovers", Performer.recovers),
        (
            rf"{_NAME} works on (?P<slot>slot#\d+)(?: \((?P<early>sends early)?(?:, )?(?P<native>native)?\))?",
            Performer.works,
        ),
        (rf"{_NAME} decides on the work of (?P<workers>W\d+(?: and W\d+)*)", Performer.decides),
        (rf"{_NAME} settles (?P<slots>slot#\d+(?: and slot#\d+)*)", Performer.settles),
        (
            rf"{_NAME} writes (?P<where>rows alone|m\d+ to partition \d+(?: and m\d+ to partition \d+)*)"
            r"(?P<without>, without rows)?(?P<fails>, and its code fails|, and a statement fails)?(?P<over>, to hand over(?: prepared)?)?",
            Performer.writes,
        ),
        (
            rf"{_NAME} is given (?P<where>m\d+ to partition \d+(?: and m\d+ to partition \d+)*) by (?P<key>\w+)"
            r"(?P<fails>, and .*)?",
            Performer.is_given,
        ),
        (rf"{_NAME} runs its units, (?P<units>\d+) at most in a group", Performer.runs_units),
        (rf"{_NAME} closes", Performer.closes),
        (rf"{_NAME} keeps house", Performer.keeps_house),
        (rf"{_NAME} steps(?: (?P<times>\d+) times)?", Performer.steps),
        (rf"{_NAME} runs", Performer.runs),
        (rf"{_NAME} runs to (?P<point>[a-z_.]+)", Performer.runs_to),
        (rf"{_NAME} is killed", Performer.is_killed),
        (rf"the network holds {_NAME}'s {_LABEL}", Performer.holds),
        (rf"the network loses (?P<answer>the answer to )?{_NAME}'s {_LABEL}", Performer.loses),
        (rf"{_NAME} waits (?P<seconds>[0-9.]+) s in vain", Performer.waits),
        (rf"the held {_LABEL} of {_NAME} arrives(?P<lost>, its answer is lost)?", Performer.arrives),
        (rf"the held {_LABEL} of {_NAME} is lost", Performer.held_is_lost),
        (rf"{_NAME}'s connection breaks (?P<how>before|after|during) {_LABEL}", Performer.connection_breaks),
        (rf"the database ends {_NAME}'s sessions", Performer.sessions_end),
        (r"the database (?P<does>commits|rolls back) orphaned session (?P<number>\d+)", Performer.orphan_ends),
        (rf"{_NAME} waits too long for a lock", Performer.lock_times_out),
        (r"the database is stopped at once and started", Performer.database_stops),
        (r"the broker is restarted", Performer.broker_restarts),
        (r"the broker delays its markers", Performer.markers_are_delayed),
        (r"the broker writes its markers", Performer.markers_are_written),
        (rf"the broker writes one marker of {_OF}", Performer.one_marker),
        (
            rf"the broker forgets the marker of {_OF} on partition (?P<partition>\d+)",
            Performer.forgets_marker,
        ),
        (r"the leader of partition (?P<partition>\d+) is suspended", Performer.leader_is_suspended),
        (r"partition (?P<partition>\d+) has no leader any more", Performer.leader_is_lost),
        (r"the leader of partition (?P<partition>\d+) goes on", Performer.leader_goes_on),
        (rf"the broker times out {_OF}", Performer.times_out),
        (rf"the broker forgets {_OF}", Performer.forgets),
        (rf"an operator terminates {_OF}", Performer.terminates),
        (rf"an operator aborts {_OF} on partition (?P<partition>\d+)", Performer.aborts_on),
        (r"(?P<lost>everything held is lost, and )?everything heals", Performer.heals),
        (r"a last owner opens and writes", Performer.last_owner),
        (r"a last worker hands over and goes on", Performer.last_worker),
    ]
]


def world_of(lines: Sequence[str]) -> World:
    """The world that a schedule asks for in its first lines."""
    kind, cluster = Kind.READ_COMMITTED, Cluster.FIRST
    for line in lines:
        given = line.removeprefix(_GIVEN)
        if given == line:
            break
        if given in _CLUSTERS:
            cluster = _CLUSTERS[given]
        else:
            kind = Kind(given)
    return World(kind, cluster)


def _engine(native: str | None) -> EngineName:
    return "librdkafka" if native is None else "native"


def text_lines(text: str) -> list[str]:
    """The lines of a schedule's text, without comments."""
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in stripped if line]


def run_lines(lines: Sequence[str], *, lenient: bool = False) -> World:
    """Run a schedule.

    Args:
        lines: Its lines.
        lenient: Leave out what cannot happen.

    Raises:
        Finding: The promise is broken. Its ``world`` is where.
        Impossible: A line cannot happen, and ``lenient`` is not set.
    """
    world = world_of(lines)
    performer = Performer(world)
    try:
        with world.running():
            for line in lines:
                if line.startswith(_GIVEN):
                    continue
                try:
                    performer.perform(line)
                except Impossible:
                    if not lenient:
                        raise
    except Exception as error:
        error.world = world  # type: ignore[attr-defined] # for the shrinker
        raise
    return world
