"""The plan of the kill -9 run: drawn from the seed alone, and every fail point that is not Spark's comes in it."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from chaos.conductor import MEMBER_LEASE_S
from chaos.plan import (
    FLEETS,
    GROUPING,
    LEASING,
    SENDING,
    SETTLING,
    SQLITE_EVERY,
    TASK,
    WAITING,
    WRITING,
    Way,
    make_round,
    outage_id,
)


def armed(numbers, seed=1):
    return Counter(
        step.failpoint.partition(":")[0]
        for number in numbers
        for episodes in make_round(seed, number).episodes.values()
        for episode in episodes
        for step in episode.steps
    )


def steps_of(rounds):
    for round_ in rounds:
        for episode in itertools.chain.from_iterable(round_.episodes.values()):
            yield from episode.steps


def test_a_seed_draws_the_same_round_each_time_and_another_seed_another_one():
    assert make_round(1, 3) == make_round(1, 3)
    assert make_round(1, 3) != make_round(2, 3)
    assert make_round(1, 3) != make_round(1, 4)


@pytest.mark.parametrize("numbers", [[0, 1], [SQLITE_EVERY - 1, 2 * SQLITE_EVERY - 1]], ids=["postgresql", "sqlite"])
def test_two_rounds_arm_every_fail_point_of_writing_claiming_settling_slots_and_ledger(numbers):
    assert {*WRITING, *SETTLING, *TASK} <= set(armed(numbers))


def test_a_few_rounds_arm_every_fail_point_of_group_commit_and_of_leases():
    assert {*GROUPING, *LEASING} <= set(armed([0, 1, 3, 4]))
    assert {*GROUPING, *LEASING} <= set(armed([2, 5, 8, 11]))


def test_groups_are_those_of_threads_and_of_tasks_and_some_die_while_their_units_run_again():
    rounds = [make_round(1, number) for number in (0, 1, 3, 4)]
    groups = {way.runs for round_ in rounds for way in round_.ways.values() if way.writes == "group"}
    assert groups == {"threads", "tasks"}
    spoiled = [step for step in steps_of(rounds) if step.spoils is not None]
    assert len(spoiled) > 10
    assert not any(step.spoils in step.abort for step in spoiled)


def test_outages_are_of_both_kinds_and_of_seconds_to_minutes_and_leave_the_rest_of_the_plan_as_it_is():
    rounds = [make_round(1, number, outages=True) for number in range(6)]
    outages = [outage for round_ in rounds for outage in round_.outages]
    assert {outage.how for outage in outages} == {"killed", "suspended"}
    assert min(outage.seconds for outage in outages) < 10
    assert max(outage.seconds for outage in outages) > 60
    assert {setting for round_ in rounds for setting in round_.outboxes.values()} == {"fallback", "always", "never"}
    assert [replace(round_, outages=[], outboxes={}) for round_ in rounds] == [make_round(1, n) for n in range(6)]


@pytest.mark.parametrize("number", [0, SQLITE_EVERY - 1], ids=["postgresql", "sqlite"])
def test_in_outages_processes_die_at_every_fail_point_of_messages_that_wait_and_of_their_sending(number):
    round_ = make_round(1, number, outages=True)
    assert {outage.meets.failpoint.partition(":")[0] for outage in round_.outages} == {*WAITING}
    senders = [(outage.sends.kind, outage.sends.steps[0].failpoint.partition(":")[0]) for outage in round_.outages]
    kinds = {"killed", "zombie"} if round_.database == "postgresql" else {"killed"}
    assert {*senders} == {(kind, point) for kind in kinds for point in SENDING}
    assert round_.outboxes[outage_id(number)] == "fallback"


def test_members_of_a_fleet_are_killed_and_paused_beyond_their_lease_and_a_last_one_settles():
    rounds = [make_round(1, number) for number in range(3)]
    members = [step for step in steps_of(rounds) if step.do == "member"]
    assert sum(step.resumed_after_ms > 1000 * MEMBER_LEASE_S for step in members) >= 3
    assert sum(step.failpoint != "" for step in members) > 10
    for round_ in rounds:
        for fleet in range(FLEETS):
            assert round_.episodes[f"r{round_.number}-fleet{fleet}"][-1].steps[0].do == "last member"


def test_a_tenth_of_the_killed_processes_is_planned_as_zombies():
    kinds = Counter(
        episode.kind
        for number in range(6)
        for episodes in make_round(1, number).episodes.values()
        for episode in episodes
    )
    assert kinds["zombie"] >= 6 * 240 / 10
    assert kinds["rivals"] > 0


def test_writers_use_blocks_sessions_and_groups_in_threads_and_in_tasks():
    ways = Counter(way for number in range(12) for way in make_round(1, number).ways.values())
    assert ways.keys() == {
        Way(runs, writes) for runs in ("threads", "tasks") for writes in ("blocks", "sessions", "group")
    }
    assert min(ways.values()) >= 4
