"""Units of work made of the partitions of a member: in order, one at a time, never of partitions that are not its own."""

import threading

import pytest

from dualwrite.consumer.partitions import Partitions

from .messages import read


def made(max_messages=10, linger_s=0.0, workers=1, partitions=1):
    found = Partitions(max_messages, linger_s, workers)
    found.add([("input", number) for number in range(partitions)])
    return found


def offsets(unit):
    return [(message.partition(), message.offset()) for message in unit.messages]


def test_a_partition_is_worked_on_by_one_unit_at_a_time_and_in_order():
    partitions = made(workers=2)
    partitions.put(read(25))
    first = partitions.take()
    assert offsets(first) == [(0, number) for number in range(10)]
    partitions.close()
    assert partitions.take() is None, "taken by two units"
    partitions = made()
    partitions.put(read(25))
    found = []
    for _ in range(3):
        unit = partitions.take()
        found += offsets(unit)
        partitions.give_back(unit, rewind=False)
    assert found == [(0, number) for number in range(25)]


def test_each_worker_finds_partitions():
    partitions = made(workers=2, partitions=4)
    for number in range(4):
        partitions.put(read(3, partition=number))
    units = [partitions.take(), partitions.take()]
    assert sorted(len(unit.partitions) for unit in units) == [2, 2]
    assert not set(units[0].partitions) & set(units[1].partitions)


def test_one_worker_takes_from_all_partitions():
    partitions = made(partitions=4)
    for number in range(4):
        partitions.put(read(2, partition=number))
    assert len(partitions.take().messages) == 8


def test_messages_of_partitions_that_are_not_ours_are_dropped():
    partitions = made()
    partitions.put([*read(1, partition=7), *read(1)])
    assert offsets(partitions.take()) == [(0, 0)]


def test_a_revoked_partition_waits_for_its_unit():
    partitions = made()
    partitions.put(read(1))
    unit = partitions.take()
    revoked = threading.Thread(target=partitions.remove, args=([("input", 0)], 60))
    revoked.start()
    partitions.wait(unit, 60)  # a pause before another attempt ends at once
    assert unit.must_end
    assert not unit.is_lost, "the transaction under way may still commit"
    partitions.give_back(unit, rewind=False)
    revoked.join()
    assert unit.is_lost
    assert partitions.all() == []


def test_a_lost_partition_waits_for_nobody():
    partitions = made()
    partitions.put(read(1))
    unit = partitions.take()
    partitions.remove([("input", 0)], 0)
    assert unit.is_lost
    partitions.add([("input", 0)])
    assert unit.is_lost, "a later assignment must not revive it"


def test_an_aborted_unit_is_read_again_and_nothing_else_meanwhile():
    partitions = made()
    partitions.put(read(5))
    partitions.give_back(partitions.take(), rewind=True)
    partitions.put(read(5, begin=5))
    [partition] = partitions.all()
    assert not partition.is_due
    assert not partition.waiting
    partitions.rewound(partition, 0)
    partitions.put(read(2))
    assert offsets(partitions.take()) == [(0, 0), (0, 1)]


def test_a_unit_lingers_until_it_is_full_or_old():
    partitions = made(max_messages=4, linger_s=3600)
    partitions.put(read(3))
    taken = []
    thread = threading.Thread(target=lambda: taken.append(partitions.take()))
    thread.start()
    partitions.put(read(1, begin=3))
    thread.join()
    assert len(taken[0].messages) == 4
    partitions.give_back(taken[0], rewind=False)
    quick = made(max_messages=4, linger_s=0.001)
    quick.put(read(1))
    assert len(quick.take().messages) == 1


def test_full_partitions_pause_and_go_on_when_they_are_low():
    partitions = made(max_messages=10)
    [partition] = partitions.all()
    partitions.put(read(80))
    assert partitions.to_pause() == [partition]
    partition.paused = True
    for _ in range(8):
        assert partitions.to_resume() == []
        partitions.give_back(partitions.take(), rewind=False)
    assert partitions.to_resume() == [partition]


def test_no_partition_is_paused_if_a_unit_soon_takes_of_it():
    partitions = made(max_messages=10)
    partitions.put(read(80))
    taking = threading.Timer(0.05, partitions.take)
    taking.start()
    assert partitions.to_pause(within_s=60) == []
    taking.join()


@pytest.mark.parametrize("busy", [False, True])
def test_idle_is_only_what_has_written_all(busy):
    partitions = made()
    assert partitions.is_idle
    partitions.put(read(1))
    assert not partitions.is_idle
    unit = partitions.take()
    assert not partitions.is_idle
    partitions.give_back(unit, rewind=busy)
    assert partitions.is_idle is not busy


def test_many_partitions_together_are_bounded_too():
    partitions = made(max_messages=10, partitions=100)
    for number in range(100):
        partitions.put(read(7 if number else 12, partition=number))
    assert [one.name for one in partitions.to_pause()] == [("input", 0)]
