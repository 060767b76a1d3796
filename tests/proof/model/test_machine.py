"""The model as a hypothesis state machine: what it finds is shrunk, and printed as a schedule."""

from __future__ import annotations

import functools
import logging

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulator.database import Kind
from simulator.process import Server

from model.checker import Finding
from model.schedule import lines_of
from model.world import PARTITIONS, Cluster, World

INDEX = st.integers(0, 7)
MOST_ALIVE = 4


def at(items, index):
    return items[index % len(items)]


def telling(method):
    """A rule that prints the schedule where it finds something."""

    @functools.wraps(method)
    def tell(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Finding:
            self.found = True
            note("\n".join(lines_of(self.world.trace)))
            raise

    return tell


class Model(RuleBasedStateMachine):
    """Anything may happen at any time; whenever all has come to rest, both sides agree."""

    world: World | None = None
    found = False

    @initialize(kind=st.sampled_from(Kind), cluster=st.sampled_from((Cluster.FIRST, Cluster.UNLIMITED)))
    def start(self, kind, cluster):
        self.world = World(kind, cluster)
        self.opened = 0
        self.recoverers = 0
        self.running = self.world.running()
        self.running.__enter__()

    # What there is to choose from

    def standing(self, test):
        return [process for process in self.world.alive if test(process)]

    def steppable(self):
        return self.standing(self.world.simulation.can_step)

    def waiting(self):
        return self.standing(self.world.simulation.waits_for_an_answer)

    def asking(self, server):
        return [process for process in self.steppable() if process.call.server is server]

    def blocked(self):
        return self.standing(
            lambda p: p.call.session is not None and self.world.simulation.database.is_blocked(p.call.session)
        )

    # Processes

    @precondition(lambda self: len(self.world.alive) < MOST_ALIVE)
    @rule(lanes=st.integers(1, 2), eager=st.booleans(), native=st.booleans())
    @telling
    def an_owner_opens(self, lanes, eager, native):
        name = chr(ord("A") + self.opened) if self.opened < 17 else f"Z{self.opened}"
        self.opened += 1
        engine = "native" if native and self.world.cluster is not Cluster.FIRST else "librdkafka"
        self.world.do_open(name, lanes=lanes, eager=eager, engine=engine)

    @precondition(lambda self: len(self.world.alive) < MOST_ALIVE)
    @rule()
    @telling
    def somebody_recovers(self):
        self.recoverers += 1
        self.world.do_recover(f"R{self.recoverers}")

    @precondition(lambda self: self.world.idle())
    @rule(
        index=INDEX,
        partitions=st.lists(st.integers(0, PARTITIONS - 1), min_size=1, max_size=3),
        rows=st.booleans(),
        fails=st.sampled_from([None, None, "code", "statement"]),
    )
    @telling
    def an_owner_writes(self, index, partitions, rows, fails):
        self.world.do_write(at(self.world.idle(), index), tuple(partitions), rows=rows, fails=fails)

    @precondition(lambda self: self.world.idle())
    @rule(index=INDEX)
    @telling
    def an_owner_writes_rows_alone(self, index):
        self.world.do_write(at(self.world.idle(), index), ())

    @precondition(lambda self: self.world.idle())
    @rule(index=INDEX, closes=st.booleans())
    @telling
    def an_owner_closes_or_keeps_house(self, index, closes):
        process = at(self.world.idle(), index)
        (self.world.do_close if closes else self.world.do_keep_house)(process)

    @precondition(lambda self: self.steppable())
    @rule(index=INDEX, times=st.integers(1, 12))
    @telling
    def a_process_goes_on(self, index, times):
        process = at(self.steppable(), index)
        for _ in range(times):
            if process.call is not None and self.world.simulation.can_step(process):
                self.world.do_step(process)

    @precondition(lambda self: self.world.alive)
    @rule(index=INDEX)
    @telling
    def a_process_is_killed(self, index):
        self.world.do_kill(at(self.world.alive, index))

    # The network

    @precondition(lambda self: any(process.call.changes for process in self.asking(Server.KAFKA)))
    @rule(index=INDEX)
    @telling
    def the_network_holds_a_request(self, index):
        self.world.do_hold(at([process for process in self.asking(Server.KAFKA) if process.call.changes], index))

    @precondition(lambda self: self.asking(Server.KAFKA))
    @rule(index=INDEX, answer=st.booleans())
    @telling
    def the_network_loses_something(self, index, answer):
        process = at(self.asking(Server.KAFKA), index)
        (self.world.do_lose_answer if answer else self.world.do_lose_request)(process)

    @precondition(lambda self: self.waiting())
    @rule(index=INDEX, seconds=st.sampled_from([0.0, 1.0, 40.0, 100.0]))
    @telling
    def a_process_waits_in_vain(self, index, seconds):
        self.world.do_wait_in_vain(at(self.waiting(), index), seconds)

    @precondition(lambda self: self.world.simulation.held)
    @rule(index=INDEX, answered=st.booleans())
    @telling
    def a_held_request_arrives(self, index, answered):
        self.world.do_arrive(at(self.world.simulation.held, index), answered=answered)

    @precondition(lambda self: self.world.simulation.held)
    @rule(index=INDEX)
    @telling
    def a_held_request_is_lost(self, index):
        self.world.do_drop(at(self.world.simulation.held, index))

    # The database

    @precondition(lambda self: self.world.kind is not Kind.SQLITE and self.asking(Server.DATABASE))
    @rule(index=INDEX, how=st.sampled_from(["before", "after", "during"]))
    @telling
    def a_connection_breaks(self, index, how):
        process = at(self.asking(Server.DATABASE), index)
        self.world.do_break_connection(
            process, how if process.call.label == "COMMIT" else how.replace("during", "after")
        )

    @precondition(lambda self: self.world.simulation.database.orphans)
    @rule(index=INDEX, committed=st.booleans())
    @telling
    def an_orphaned_session_ends(self, index, committed):
        orphans = self.world.simulation.database.orphans
        session = at(orphans, index)
        self.world.do_end_orphan(orphans.index(session), committed=committed and session.committing)

    @precondition(lambda self: self.blocked())
    @rule(index=INDEX)
    @telling
    def a_lock_is_not_free_in_time(self, index):
        self.world.do_time_out_lock(at(self.blocked(), index))

    @precondition(lambda self: self.world.kind is not Kind.SQLITE and self.world.alive)
    @rule(index=INDEX)
    @telling
    def the_database_ends_a_session(self, index):
        self.world.do_end_session(at(self.world.alive, index))

    @precondition(lambda self: self.world.kind is not Kind.SQLITE)
    @rule()
    @telling
    def the_database_is_stopped(self):
        self.world.do_stop_database()

    # The broker

    @rule()
    @telling
    def the_broker_is_restarted(self):
        self.world.do_restart_broker()

    @precondition(lambda self: not self.world.simulation.markers_delayed)
    @rule()
    @telling
    def the_broker_delays_its_markers(self):
        self.world.do_delay_markers()

    @precondition(lambda self: self.world.simulation.markers_delayed)
    @rule()
    @telling
    def the_broker_writes_its_markers(self):
        self.world.do_write_markers()

    @precondition(lambda self: self.world.prepared())
    @rule(index=INDEX)
    @telling
    def the_broker_writes_one_marker(self, index):
        self.world.do_write_one_marker(at(self.world.prepared(), index))

    @precondition(lambda self: self.world.limited())
    @rule(index=INDEX)
    @telling
    def the_broker_times_a_transaction_out(self, index):
        self.world.do_time_out(at(self.world.limited(), index))

    @precondition(lambda self: self.world.ongoing())
    @rule(index=INDEX)
    @telling
    def an_operator_terminates_a_transaction(self, index):
        self.world.do_force_terminate(at(self.world.ongoing(), index))

    @precondition(lambda self: self.world.at_rest())
    @rule(index=INDEX)
    @telling
    def the_broker_forgets_an_id(self, index):
        self.world.do_expire(at(self.world.at_rest(), index))

    # Rest

    @rule(deliver=st.booleans())
    @telling
    def everything_heals(self, deliver):
        self.world.do_heal(deliver=deliver)

    @telling
    def teardown(self):
        if self.world is None:
            return
        try:
            if not self.found:
                self.world.do_heal()
                self.world.do_last_owner()
        finally:
            self.running.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
