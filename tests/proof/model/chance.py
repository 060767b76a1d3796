"""Random schedules: what happens next is drawn from a seed. The same seed makes the same schedule."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulator.database import Kind
from simulator.process import Server

from dualwrite.writing.dual_write import Ending
from model.consuming import INPUTS, reader_of
from model.owners import TOPIC
from model.world import PARTITIONS, Cluster, World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.process import Process

    from dualwrite.kafka.config import EngineName

HANDED_OVER_FROM = 1_000_000_000_000
NATIVE_FROM = 2 * HANDED_OVER_FROM
NATIVE_HANDED_OVER_FROM = 3 * HANDED_OVER_FROM
GROUPS_FROM = 4 * HANDED_OVER_FROM
FLEETS_FROM = 5 * HANDED_OVER_FROM
CONSUMERS_FROM = 6 * HANDED_OVER_FROM
_CLUSTERS = (Cluster.UNLIMITED, Cluster.UNLIMITED, Cluster.LIMITED)
_ENGINES: tuple[tuple[EngineName, ...], ...] = (("native",), ("native",), ("native", "librdkafka"))
_KINDS = [Kind.READ_COMMITTED] * 6 + [Kind.REPEATABLE_READ, Kind.SQLITE]
_WAYS_TO_HAND_OVER = ([Ending.HAND_OVER], [Ending.PREPARE], [Ending.HAND_OVER, Ending.PREPARE])
_WAITS_S = [0.0, 1.0, 1.0, 1.0, 1.0, 40.0, 100.0]
_WORK_FAILS = ("code", "statement", "work", "work")
_UNITS_FAIL = ("code", "statement", "once", "connection", "transaction")
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Schedule:
    """One random schedule.

    Args:
        seed: Makes it what it is.

    Attributes:
        world: Where it runs.
    """

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        self.world = World(random.choice(_KINDS))
        self._length = random.choice((20, 40, 40, 80))
        self._stays = random.choice((0.5, 0.8, 0.95))
        self._faults = random.choice((0.02, 0.05, 0.05, 0.12))
        self._environment = random.choice((0.0, 0.0, 0.01, 0.04))
        self._most_alive = random.choice((1, 2, 2, 3, 4))
        self._lanes = random.choice((1, 1, 1, 2))
        self._suspends = random.choice((0.0, 0.0, 0.01, 0.04))
        self._leader_goes_on = random.choice((0.02, 0.1))
        self._opens, self._arrives = 0.06, 0.06
        self._opened = 0
        self._recoverers = 0
        self._current: Process | None = None

    def run(self) -> World:
        """Run it to its end, and check. Raises ``Finding``."""
        with self.world.running():
            for _ in range(self._length):
                self.act()
            if self._random.random() < 0.2:
                self.world.do_heal(deliver=self._random.random() < 0.6)
                for _ in range(self._length // 2):
                    self.act()
            self.world.do_heal(deliver=self._random.random() < 0.6)
            if self._random.random() < 0.25:
                self._end()
        return self.world

    def act(self) -> None:
        """One thing happens."""
        random, world = self._random, self.world
        alive = self._awake()
        if not alive or (len(alive) < self._most_alive and random.random() < self._opens):
            self._open()
            return
        if random.random() < self._environment and self._disturb():
            return
        if random.random() < self._suspends and self._suspend():
            return
        if world.simulation.broker.suspended and random.random() < self._leader_goes_on:
            self._go_on_leading()
            return
        if world.simulation.held and random.random() < self._arrives:
            held = random.choice(world.simulation.held)
            if world.simulation.can_arrive(held) and random.random() < 0.8:
                world.do_arrive(held, answered=random.random() < 0.7)
            else:
                world.do_drop(held)
            return
        if world.simulation.markers_delayed and random.random() < 0.1:
            self._markers()
            return
        if world.simulation.database.orphans and random.random() < 0.1:
            self._end_orphan()
            return
        process = self._current
        if process is None or process.call is None or random.random() > self._stays:
            process = self._current = random.choice(alive)
        self._go_on(process)

    def _awake(self) -> list[Process]:
        """The processes that may go on."""
        return self.world.alive

    def _open(self) -> None:
        random, world = self._random, self.world
        if self._opened and random.random() < 0.25:
            self._recoverers += 1
            world.do_recover(f"R{self._recoverers}")
            return
        name = _NAMES[self._opened] if self._opened < len(_NAMES) else f"Z{self._opened}"
        self._opened += 1
        self._current = world.do_open(
            name, lanes=self._lanes, eager=random.random() < 0.3, engine=self._engine_of_the_next()
        )

    def _engine_of_the_next(self) -> EngineName:
        return "librdkafka"

    def _go_on(self, process: Process) -> None:
        random, world = self._random, self.world
        call = process.call
        if call.server is Server.COMMAND:
            self._command(process)
        elif world.simulation.waits_for_an_answer(process):
            held = next((held for held in world.simulation.held if held.call is call), None)
            if held is not None and world.simulation.can_arrive(held) and random.random() < 0.3:
                world.do_arrive(held, answered=random.random() < 0.6)
            else:
                world.do_wait_in_vain(process, random.choice(_WAITS_S))
        elif not world.simulation.can_step(process):
            self._unblock(process)
        elif random.random() < self._chance_of_a_fault(process):
            self._fault(process)
        else:
            world.do_step(process)

    def _command(self, process: Process) -> None:
        draw = self._random.random()
        if draw < 0.04:
            self.world.do_close(process)
        elif draw < 0.07:
            self.world.do_keep_house(process)
        else:
            self._write(process)

    def _chance_of_a_fault(self, process: Process) -> float:
        del process
        return self._faults

    def _end(self) -> None:
        self.world.do_last_owner()

    def _write(self, process: Process) -> None:
        random = self._random
        draw = random.random()
        fails = "code" if draw < 0.05 else "statement" if draw < 0.1 else None
        partitions = tuple(random.randrange(PARTITIONS) for _ in range(random.choice((1, 1, 2, 2, 3))))
        draw = random.random()
        if draw < 0.05:
            self.world.do_write(process, (), fails=fails)
        else:
            self.world.do_write(process, partitions, rows=draw > 0.1, fails=fails)

    def _unblock(self, process: Process) -> None:
        if self._random.random() < 0.1:
            self.world.do_time_out_lock(process)
        elif self.world.simulation.database.orphans:
            self._end_orphan()
        else:
            self._current = None

    def _end_orphan(self) -> None:
        database = self.world.simulation.database
        index = self._random.randrange(len(database.orphans))
        committed = database.orphans[index].committing and self._random.random() < 0.6
        self.world.do_end_orphan(index, committed=committed)

    def _markers(self) -> None:
        world = self.world
        prepared = world.prepared()
        if prepared and self._random.random() < 0.5:
            world.do_write_one_marker(self._random.choice(prepared))
        else:
            world.do_write_markers()

    def _suspend(self) -> bool:
        """The leader of a partition is suspended, or has been for so long that its session has ended."""
        broker = self.world.simulation.broker
        partition = self._random.randrange(PARTITIONS)
        if (TOPIC, partition) not in broker.suspended:
            self.world.do_suspend(partition)
        elif (TOPIC, partition) not in broker.leaderless and self._may_lose_leader():
            self.world.do_lose_leader(partition)
        else:
            return False
        return True

    def _go_on_leading(self) -> None:
        broker = self.world.simulation.broker
        _, partition = place = self._random.choice(broker.suspended)
        if place not in broker.leaderless and self._random.random() < 0.6 and self._may_lose_leader():
            self.world.do_lose_leader(partition)
        else:
            self.world.do_resume(partition)

    def _fault(self, process: Process) -> None:
        random, world = self._random, self.world
        call = process.call
        if random.random() < 0.3:
            world.do_kill(process)
        elif call.server is Server.KAFKA:
            draw = random.random()
            if call.changes and draw < 0.6:
                world.do_hold(process)
            elif draw < 0.8:
                world.do_lose_answer(process)
            else:
                world.do_lose_request(process)
        elif call.server is Server.DATABASE and world.kind is not Kind.SQLITE:
            how = random.choice(("before", "after", "during") if call.label == "COMMIT" else ("before", "after"))
            world.do_break_connection(process, how)
        else:
            world.do_step(process)

    def _disturb(self) -> bool:
        """Something happens to a server; False where it cannot."""
        return self._random.choice((self._disturb_broker, self._disturb_database, self._disturb_transaction))()

    def _disturb_broker(self) -> bool:
        draw = self._random.random()
        if draw < 0.4:
            self.world.do_restart_broker()
        elif draw < 0.8:
            self.world.do_delay_markers()
        elif at_rest := self.world.at_rest(everywhere=True):
            self.world.do_expire(self._random.choice(at_rest))
        else:
            return False
        return True

    def _disturb_database(self) -> bool:
        if self.world.kind is Kind.SQLITE:  # it is no server
            return False
        if self._random.random() < 0.5 and self.world.alive:
            self.world.do_end_session(self._random.choice(self.world.alive))
        else:
            self.world.do_stop_database()
        return True

    def _time_out(self, kafka_id: str) -> None:
        self.world.do_time_out(kafka_id)

    def _may_lose_leader(self) -> bool:
        return True

    def _disturb_transaction(self) -> bool:
        ongoing = self.world.ongoing()
        if not ongoing:
            return False
        chosen = self._random.choice(ongoing)
        draw = self._random.random()
        if draw < 0.5:
            self._time_out(chosen)
        elif draw < 0.85:
            self.world.do_force_terminate(chosen)
        elif all(process.name.startswith("R") for process in self.world.alive):
            # The tool is for transactions whose producer is gone.
            partition = self._random.randrange(PARTITIONS)
            if (TOPIC, partition) in self.world.simulation.broker.suspended:
                return False
            self.world.do_abort_on_partition(chosen, partition)
        else:
            return False
        return True


class HandedOverSchedule(Schedule):
    """One random schedule of workers that hand over, and of drivers that decide."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._length = self._random.choice((40, 80, 80, 160))
        self._slots = [f"slot#{number + 1}" for number in range(self._random.choice((1, 1, 2, 3)))]
        self._most_alive = self._random.choice((2, 3, 4, 5))
        self._opens = self._random.choice((0.01, 0.02, 0.05))
        self._arrives = self._random.choice((0.01, 0.02, 0.06))
        self._end_is_struck = self._random.choice((0.0, 0.2, 0.5))
        self._waits_for_drivers = self._random.choice((0.0, 0.5, 0.9))
        self._endings = self._random.choice(_WAYS_TO_HAND_OVER[: 1 if self.world.kind is Kind.SQLITE else 3])
        self._workers = 0
        self._drivers = 0

    def _open(self) -> None:
        random, world = self._random, self.world
        draw = random.random()
        if not world.alive or self._workers < len(self._slots) or draw < 0.2:
            slot = self._slots[self._workers % len(self._slots)]
            self._workers += 1
            self._current = world.do_work(
                f"W{self._workers}", slot, eager=random.random() < 0.3, engine=self._engine_of_the_next()
            )
        elif world.inbox and draw < 0.7:
            self._decide()
        elif draw < 0.9:
            self._current = world.do_settle(self._next_driver(), self._some(self._slots))
        else:
            self._recoverers += 1
            world.do_recover(f"R{self._recoverers}")

    def _next_driver(self) -> str:
        self._drivers += 1
        return f"D{self._drivers}"

    def _some(self, names: Sequence[str], *always: str) -> list[str]:
        """One of them or more."""
        chosen = [name for name in names if name in always or self._random.random() < 0.7]
        return chosen or [self._random.choice(names)]

    def _decide(self, *always: str) -> None:
        self._current = self.world.do_decide(self._next_driver(), self._some(list(self.world.inbox), *always))

    def _command(self, process: Process) -> None:
        draw = self._random.random()
        drivers = [other for other in self.world.alive if other.name.startswith("D")]
        if drivers and self._random.random() < self._waits_for_drivers:
            self._current = self._random.choice(drivers)
            self._go_on(self._current)
        elif draw < 0.02:
            self.world.do_close(process)
        elif process.name in self.world.inbox and draw < 0.8:
            self._decide(process.name)
        else:
            self._write(process)

    def _write(self, process: Process) -> None:
        random = self._random
        draw = random.random()
        fails = "code" if draw < 0.03 else "statement" if draw < 0.06 else None
        partitions = tuple(random.randrange(PARTITIONS) for _ in range(random.choice((1, 1, 2, 2, 3))))
        ending = Ending.COMMIT if random.random() < 0.1 else random.choice(self._endings)
        self.world.do_write(process, partitions, rows=random.random() > 0.05, fails=fails, ending=ending)

    def _chance_of_a_fault(self, process: Process) -> float:
        decided = process.name.startswith("D") and process.call.label == "EndTxn"
        return max(self._faults, self._end_is_struck) if decided else self._faults

    def _fault(self, process: Process) -> None:
        if process.name.startswith("D") and process.call.label == "EndTxn" and self._random.random() < 0.5:
            self.world.do_hold(process)
        else:
            super()._fault(process)

    def _end(self) -> None:
        self.world.do_last_batch()


class _OnNewBrokers(Schedule):
    """On brokers of transaction version 2: all processes have the native engine, or each has one of both, as in an upgrade."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world = World(self.world.kind, self._random.choice(_CLUSTERS))
        self._engines = self._random.choice(_ENGINES)

    def _engine_of_the_next(self) -> EngineName:
        return self._random.choice(self._engines)

    def _time_out(self, kafka_id: str) -> None:
        if kafka_id in self.world.limited():
            self.world.do_time_out(kafka_id)
        else:
            self.world.do_force_terminate(kafka_id)

    def _may_lose_leader(self) -> bool:
        # A skipped marker is written by hand where the repair could time out: an operator's work.
        return self.world.cluster is Cluster.UNLIMITED


class NativeSchedule(_OnNewBrokers):
    """One random schedule of owners on brokers of transaction version 2."""


class NativeHandedOverSchedule(_OnNewBrokers, HandedOverSchedule):
    """One random schedule of workers and drivers on brokers of transaction version 2."""


class GroupSchedule(_OnNewBrokers):
    """One random schedule of owners whose callers submit units, on old or new brokers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._length = self._random.choice((40, 80, 80, 160))
        if self._random.random() < 0.5:
            self.world = World(self.world.kind)
            self._engines = ("librdkafka",)
        self._callers = self._random.choice((1, 2, 3))
        self._most_units = self._random.choice((1, 2, 3, 3, 5))

    def _may_lose_leader(self) -> bool:
        return self.world.cluster is not Cluster.LIMITED

    def _command(self, process: Process) -> None:
        random = self._random
        if random.random() < 0.25:
            super()._command(process)
            return
        for _ in range(random.choice((1, 2, 3, 3, 4, 6))):
            fails = random.choice(_UNITS_FAIL) if random.random() < 0.15 else None
            partitions = tuple(random.randrange(PARTITIONS) for _ in range(random.choice((1, 1, 2))))
            self.world.do_submit(process, partitions, f"c{random.randrange(self._callers) + 1}", fails=fails)
        self.world.do_group(process, self._most_units)


class FleetSchedule(GroupSchedule):
    """One random schedule of the members of a fleet."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._length = self._random.choice((20, 40, 40, 80))
        self._most_alive = self._random.choice((2, 2, 3))
        self._passes = self._random.choice((0.005, 0.02, 0.05))
        self._joined = 0

    def act(self) -> None:
        if self._random.random() < self._passes:
            self.world.do_pass(self._random.choice((5.0, 10.0, 31.0)))
        else:
            super().act()

    def run(self) -> World:
        """Run it to its end. In half of them no recovery runs: a last member settles for all others."""
        if self._random.random() < 0.5:
            return super().run()
        with self.world.running():
            for _ in range(self._length):
                self.act()
            self.world.do_last_member()
        return self.world

    def _open(self) -> None:
        random, world = self._random, self.world
        if self._joined and random.random() < 0.1:
            self._recoverers += 1
            world.do_recover(f"R{self._recoverers}")
            return
        self._joined += 1
        self._current = world.do_join(
            f"M{self._joined}", lanes=self._lanes, eager=random.random() < 0.3, engine=self._engine_of_the_next()
        )

    def _command(self, process: Process) -> None:
        if self._random.random() < 0.3:
            self.world.do_beat(process)
        else:
            super()._command(process)

    def _end(self) -> None:
        self.world.do_last_member()


class ConsumerSchedule(_OnNewBrokers):
    """One random schedule of the members of a consumer group, on old or new brokers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._length = self._random.choice((100, 200, 400, 400))
        self._opens = self._random.choice((0.005, 0.01, 0.04))
        if self._random.random() < 0.4:
            self.world = World(self.world.kind)
            self._engines = ("librdkafka",)
        self._most_alive = self._random.choice((2, 4, 4, 6))
        self._names = self._random.choice((2, 3, 3))
        self._keeps_rows = self._random.random() < 0.5
        self._expels = self._random.choice((0.0, 0.002, 0.01))
        self._comes = self._random.choice((0.05, 0.1))
        self._falls_asleep = self._random.choice((0.0, 0.01, 0.03))
        self._asleep: dict[str, int] = {}
        self._acts = 0
        self._consumers = 0

    def _may_lose_leader(self) -> bool:
        return self.world.cluster is not Cluster.LIMITED

    def _awake(self) -> list[Process]:
        """Without the members that stand still."""
        alive = super()._awake()
        return [one for one in alive if self._asleep.get(reader_of(one.name), 0) < self._acts] or alive

    def _fall_asleep(self) -> None:
        """A member stands still while others go on, best with work to do."""
        random, world = self._random, self.world
        members = [name for name, member in world.members.items() if member.has_work] or list(world.members)
        self._asleep[random.choice(members)] = self._acts + random.choice((10, 30, 60, 100))
        self._current = None

    def act(self) -> None:
        random, world = self._random, self.world
        self._acts += 1
        if world.members and random.random() < self._falls_asleep:
            self._fall_asleep()
        if random.random() < self._comes:
            world.do_feed(random.randrange(INPUTS), random.choice((1, 1, 2, 5)))
        elif world.members and random.random() < self._expels:
            world.do_expel(random.choice(list(world.members)))
        elif random.random() < 0.05 and (silent := self._silent()):
            world.do_expel(random.choice(silent))
        elif random.random() < 0.003:
            world.do_pass(random.choice((5.0, 31.0)))
        else:
            super().act()

    def _silent(self) -> list[str]:
        """The members that the group does not hear of."""
        return [*self.world.dead_members(), *(name for name, until in self._asleep.items() if until > self._acts)]

    def run(self) -> World:
        """Run it to its end. In half of them no recovery runs: a last consumer settles for all others."""
        if self._random.random() < 0.5:
            return super().run()
        with self.world.running():
            for _ in range(self._length):
                self.act()
            self.world.do_last_consumer()
        return self.world

    def _open(self) -> None:
        random, world = self._random, self.world
        if self._consumers and random.random() < 0.05:
            self._recoverers += 1
            world.do_recover(f"R{self._recoverers}")
            return
        self._consumers += 1
        self._current = world.do_consume(
            f"C{self._consumers}",
            (self._consumers - 1) % self._names,
            keeps_rows=self._keeps_rows,
            eager=random.random() < 0.3,
            engine=self._engine_of_the_next(),
        )

    def _command(self, process: Process) -> None:
        random, world = self._random, self.world
        member = world.members[reader_of(process.name)]
        reader, worker = (world.simulation.processes.get(name) for name in (member.name, member.worker_name))
        # A worker that has raised an error for people has ended, and its reader hears of it at its next poll.
        if worker is not None and member.has_work and worker in world.idle() and random.random() < 0.8:
            self._current = worker
            world.do_unit(worker, random.choice(_WORK_FAILS) if random.random() < 0.1 else None)
        elif reader not in world.idle():
            self._current = reader
        elif random.random() < 0.01:
            world.do_close(reader)
        else:
            self._current = reader
            world.do_poll(reader)

    def _end(self) -> None:
        self.world.do_last_consumer()


_FROM: tuple[tuple[int, type[Schedule]], ...] = (
    (CONSUMERS_FROM, ConsumerSchedule),
    (FLEETS_FROM, FleetSchedule),
    (GROUPS_FROM, GroupSchedule),
    (NATIVE_HANDED_OVER_FROM, NativeHandedOverSchedule),
    (NATIVE_FROM, NativeSchedule),
    (HANDED_OVER_FROM, HandedOverSchedule),
)


def schedule_of(seed: int) -> Schedule:
    """The random schedule of a seed: of the kind that begins at or below it, else of owners that send with librdkafka."""
    return next((kind for first, kind in _FROM if seed >= first), Schedule)(seed)
