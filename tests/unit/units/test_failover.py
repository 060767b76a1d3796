"""Writers of units over the library's own lanes, on the simulated servers: killed, cut off and fenced at any step."""

from collections import Counter

import pytest
from harness.simulated import TOPIC
from harness.simulated_units import SCHEDULES, SeenLogs, scheduled
from harness.unit_worker import WholeUnits
from hypothesis import given, settings
from hypothesis import strategies as some

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.protocol.lives import Machine
from dualwrite.units import Follower, UnitWriter, writer
from dualwrite.units.records import UNIT_WRITER_LIFE, Offsets, UnitState, UnitWriterEvent, UnitWriterState

LONGEST = 7


class Dropped(Exception):
    """The error of a block whose unit is aborted."""


class Story:
    """Writes units by one process after the other, and follows the log."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.ended, self.aborted = set(), set()
        self.image = WholeUnits()
        self.follower = Follower(self.image)
        self.logs = SeenLogs(schedule.simulation)
        self.next = 0
        self.numbers = iter(range(1_000_000))

    def work(self, _):
        chance = self.schedule.chance
        with UnitWriter(TOPIC, kafka={}, database="", part_records=2, timeout_s=60.0) as units:
            for _ in range(3):
                name, size, drops = f"u{next(self.numbers)}", chance.randint(1, LONGEST), chance.random() < 0.3
                try:
                    with units.unit(name) as unit:
                        for number in range(size):
                            unit.produce(f"{name} {size}".encode(), f"{number}".encode())
                        if drops:
                            raise Dropped
                except Dropped:
                    self.aborted.add(name)
                except TransactionAborted:
                    self.aborted.add(name)
                    raise
                else:
                    self.ended.add(name)

    def look(self):
        for _, offset, record in self.logs.read({(TOPIC, 0): Offsets(self.next, 1 << 60)}, timeout_s=0):
            self.follower.read(offset, record)
            self.next = offset + 1
        assert not self.image.wrong
        assert not self.image.contents() & self.aborted


def play(seed, version):
    with scheduled(seed, transaction_version=version) as schedule:
        story = Story(schedule)
        schedule.play(story.work, story.look)
        assert story.follower.state is UnitState.OUTSIDE
        assert story.ended <= story.image.contents()
        return schedule.happened + Counter(units=len(story.image.contents()), aborted=len(story.aborted))


@pytest.mark.parametrize("version", [1, 2])
@given(some.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_readers_see_whole_units_whatever_becomes_of_their_writers(version, seed):
    play(seed, version)


@pytest.mark.thorough
@pytest.mark.parametrize("version", [1, 2])
def test_the_same_for_many_schedules(version):
    happened = sum((play(seed, version) for seed in range(SCHEDULES)), Counter())
    print(f"{SCHEDULES} schedules of writers, transaction version {version}: {dict(happened)}")  # noqa: T201 - `-rP` shows it
    assert happened["units"] > SCHEDULES
    assert happened["aborted"] > SCHEDULES / 2


def found(version=2, seeds=60):
    """The seed of the first schedule in which a planted mistake shows."""
    for seed in range(seeds):
        try:
            play(seed, version)
        except (AssertionError, ConfigurationError):
            return seed
    return None


def test_a_writer_that_does_not_look_for_an_unfinished_unit_is_found(monkeypatch):
    monkeypatch.setattr(writer, "found_at_the_end", lambda _: UnitWriterEvent.FIND_ENDED)
    assert found() is not None


def test_a_writer_that_looks_before_its_claim_is_found(monkeypatch):
    """It does not see the records that a former writer adds between the look and the claim."""
    seen = []
    real = writer.found_at_the_end

    def late(last):
        seen.append(last)
        return real(seen[-2] if len(seen) > 1 else None)

    monkeypatch.setattr(writer, "found_at_the_end", late)
    assert found() is not None


def test_a_writer_that_goes_on_when_a_part_may_be_in_the_log_is_found(monkeypatch):
    real = UnitWriter._append

    def append(self, records, event, work=None):
        try:
            real(self, records, event, work)
        except Exception:
            self._machine = Machine("writer of units", UNIT_WRITER_LIFE, UnitWriterState.BETWEEN)
            raise

    monkeypatch.setattr(UnitWriter, "_append", append)
    assert found() is not None
