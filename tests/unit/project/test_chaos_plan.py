"""The plan of the kill -9 run: drawn from the seed alone, and every fail point that is not Spark's comes in it."""

from collections import Counter

import pytest
from chaos.plan import SETTLING, SQLITE_EVERY, TASK, WRITING, make_round


def armed(numbers, seed=1):
    return Counter(
        step.failpoint.partition(":")[0]
        for number in numbers
        for episodes in make_round(seed, number).episodes.values()
        for episode in episodes
        for step in episode.steps
    )


def test_a_seed_draws_the_same_round_each_time_and_another_seed_another_one():
    assert make_round(1, 3) == make_round(1, 3)
    assert make_round(1, 3) != make_round(2, 3)
    assert make_round(1, 3) != make_round(1, 4)


@pytest.mark.parametrize("numbers", [[0, 1], [SQLITE_EVERY - 1, 2 * SQLITE_EVERY - 1]], ids=["postgresql", "sqlite"])
def test_two_rounds_arm_every_fail_point_of_writing_claiming_settling_slots_and_ledger(numbers):
    assert {*WRITING, *SETTLING, *TASK} <= set(armed(numbers))


def test_a_tenth_of_the_killed_processes_is_planned_as_zombies():
    kinds = Counter(
        episode.kind
        for number in range(6)
        for episodes in make_round(1, number).episodes.values()
        for episode in episodes
    )
    assert kinds["zombie"] >= 6 * 240 / 10
    assert kinds["rivals"] > 0


def test_of_four_writers_one_uses_blocks_in_tasks_and_one_sessions():
    kinds = Counter(kind for number in range(4) for kind in make_round(1, number).tasks.values())
    writers = sum(len(make_round(1, number).threads) - 1 for number in range(4))
    assert all(kinds[kind] >= writers // 5 for kind in ("blocks", "sessions"))
