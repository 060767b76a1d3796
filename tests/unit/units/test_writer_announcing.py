"""Batches of many producers and their units, on the simulated servers: drivers die at any step, and readers store positions."""

from collections import Counter

import pytest
from harness.simulated import TOPIC
from harness.simulated_units import SCHEDULES, UNIT_TOPIC, AskedLogs, LaneWriter, scheduled
from hypothesis import given, settings
from hypothesis import strategies as some

from dualwrite import ConfigurationError, Unavailable
from dualwrite.units import BatchReader, writer
from dualwrite.units.writer import Written, announce_batch

TASKS = 3
BATCHES = 3


class Job:
    """A sink's driver, which runs the tasks of a batch one after the other; a row of the database for each that is done."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.noted = 0
        self.position = None
        self.read = []

    def work(self, here):
        """Go on with the first batch that no driver has noted as announced, as a stream does from its checkpoint."""
        for number in range(self.noted, BATCHES):
            for task in range(TASKS):
                tasks = LaneWriter(here, f"sink#{task}")
                tasks.open()  # settles what a dead driver's task has left
                if f"{number}:{task}" not in self.schedule.servers.rows:
                    with tasks.transaction() as tx:
                        tx._transaction.connection.insert(f"{number}:{task}")
                        for message in range(task + 1):
                            tx.produce(TOPIC, f"{number}:{task}:{message}".encode(), partition=(task + message) % 2)
                tasks.close()
            announce_batch(
                str(number), TOPIC, unit_topic=UNIT_TOPIC, kafka={}, database="", schema=None, timeout_s=60.0,
                written=lambda number=number: self.written(number),
            )  # fmt: skip
            self.noted = max(self.noted, number + 1)

    def written(self, number):
        """As the sink's driver knows it: the newest batch and decisions, unless another batch is written in part."""
        database = self.schedule.servers.database
        written = Counter(row.split(":")[0] for row in self.schedule.servers.rows)
        if any(count < TASKS for batch, count in written.items() if batch != str(number)):
            raise Unavailable("another batch is written in part")
        decisions = {name: row.prepared for name, row in database.rows.items() if name.startswith("sink#")}
        return Written(self.newest(), decisions)

    def newest(self):
        return self.schedule.servers.rows[-1].split(":")[0]

    def look(self):
        """Now and then, read on from the stored position, and store the next one."""
        if self.schedule.chance.random() < 0.05:
            with BatchReader(UNIT_TOPIC, kafka={}, position=self.position) as reader:
                while (batch := reader.next_batch(0.0)) is not None:
                    self._take(batch)
                    if self.schedule.chance.random() < 0.3:
                        break  # the rest is read again by the next one

    def _take(self, batch):
        parts = [record.value.decode().split(":") for record in batch.records()]
        of_batch = Counter(number for number, _, _ in parts)
        size = sum(range(1, TASKS + 1))
        assert set(of_batch.values()) == {size}, f"{batch} holds {of_batch}"
        assert batch.name == max(of_batch), f"{batch} holds {of_batch}"
        self.read += sorted(map(int, of_batch))
        assert self.read == list(range(len(self.read))), f"batches {self.read}"
        self.position = batch.position


def play(seed):
    with scheduled(seed, forever=True) as schedule:
        job = Job(schedule)
        schedule.play(job.work, job.look, steps=600)
        while len(job.read) < BATCHES:
            before = len(job.read)
            for _ in range(200):
                job.look()
            assert len(job.read) > before, f"only {job.read} can be read"
        return schedule.happened + Counter(batches=len(job.read))


@given(some.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_readers_get_each_batch_whole_and_once_in_their_order_whenever_drivers_die(seed):
    play(seed)


@pytest.mark.thorough
def test_the_same_for_many_schedules():
    happened = sum((play(seed) for seed in range(SCHEDULES)), Counter())
    print(f"{SCHEDULES} schedules of jobs: {dict(happened)}")  # noqa: T201 - `-rP` shows it


@pytest.mark.parametrize("seed", [200])
def test_a_batch_that_is_run_again_is_not_announced_again_for_the_markers_of_its_attempts(seed):
    play(seed)


@pytest.mark.parametrize("seed", [265])
def test_a_driver_that_was_paused_announces_a_later_batch_by_its_own_name(seed):
    play(seed)


def found(seeds=60):
    """The seed of the first schedule in which a planted mistake shows."""
    for seed in range(seeds):
        try:
            play(seed)
        except (AssertionError, ConfigurationError):
            return seed
    return None


def test_a_batch_that_begins_at_the_beginning_of_the_topic_is_found(monkeypatch):
    """Not where the last unit ended."""
    monkeypatch.setattr(writer, "last_ranges", lambda *_: None)
    assert found() is not None


def test_a_driver_that_does_not_see_the_tasks_of_another_one_is_found(monkeypatch):
    """One that was paused before it announces, and goes on when the next one has begun another batch."""
    monkeypatch.setattr(Job, "written", lambda self, _: Written(self.newest(), None))
    assert found() is not None


def test_a_driver_that_names_a_later_batch_after_its_own_is_found(monkeypatch):
    """One whose batch was run again meanwhile, when the driver of the later batch has died before it announces it."""
    monkeypatch.setattr(writer, "_require_new", lambda *_: None)
    real = Job.written
    monkeypatch.setattr(Job, "written", lambda self, number: real(self, number)._replace(newest=str(number)))
    with pytest.raises(AssertionError, match="Batch 0 in 2 partitions> holds"):
        play(265)


def test_a_batch_that_ends_where_open_transactions_begin_is_found(monkeypatch):
    """Not where they end: what is committed behind an open one would be left out."""
    monkeypatch.setattr(AskedLogs, "settled_offsets", AskedLogs.offsets)
    assert found() is not None


def test_a_driver_that_announces_before_all_tasks_have_written_is_found(monkeypatch):
    real = Job.work

    def early(self, here):
        announce_batch(
            "early", TOPIC, unit_topic=UNIT_TOPIC, kafka={}, database="", schema=None, timeout_s=60.0,
            written=lambda: Written("early", None),
        )  # fmt: skip
        real(self, here)

    monkeypatch.setattr(Job, "work", early)
    assert found() is not None
