"""Some thousands of random schedules; ``make model N=...`` runs as many as one likes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import broker_mistakes
from simulator import scheduler

from model import run
from model.chance import (
    CONSUMERS_FROM,
    FLEETS_FROM,
    GROUPS_FROM,
    HANDED_OVER_FROM,
    NATIVE_FROM,
    NATIVE_HANDED_OVER_FROM,
)
from model.counterparts import planted
from model.results import Counts
from model.run import chunks, run_chunk
from model.schedule import run_lines, text_lines

CHUNK = 300
FOUND = Path(__file__).parent / "found"


@pytest.mark.parametrize(
    "first",
    [
        1_000_000_000,
        *(pytest.param(1_000_000_000 + more * CHUNK, marks=pytest.mark.thorough) for more in (1, 2)),
    ],
)
def test_both_sides_agree_after_every_random_schedule(first):
    counts = run_chunk(first, CHUNK)
    assert not counts.findings
    assert counts.schedules == CHUNK
    assert counts.happened["kills"] > 100
    assert counts.happened["late requests"] > 20
    assert counts.told["committed"] > 100
    assert counts.happened["leaders lost"] > 5


@pytest.mark.parametrize("first", [HANDED_OVER_FROM])
def test_both_sides_agree_after_every_random_schedule_of_workers_and_drivers(first):
    counts = run_chunk(first, CHUNK)
    assert not counts.findings
    assert counts.schedules == CHUNK
    assert counts.happened["kills"] > 100
    assert counts.places["held"]["EndTxn"] > 20
    assert counts.happened["workers go on"] > 100
    assert counts.happened["completed without a claim"] > 100
    assert counts.told["decided"] > 20


@pytest.mark.parametrize("first", [NATIVE_FROM, NATIVE_HANDED_OVER_FROM])
def test_both_sides_agree_after_every_random_schedule_of_native_engines_and_of_both(first):
    counts = run_chunk(first, CHUNK // 2)
    assert not counts.findings
    assert counts.schedules == CHUNK // 2
    assert counts.happened["schedules with the native engine"] > 50
    assert counts.happened["schedules with both engines"] > 10
    assert counts.happened["leaders lost"] > 10
    assert counts.happened["late requests"] > 5


def test_both_sides_agree_after_every_random_schedule_of_group_commit():
    counts = run_chunk(GROUPS_FROM, CHUNK // 2)
    assert not counts.findings
    assert counts.schedules == CHUNK // 2
    assert counts.passed["group.committed"] > 100
    assert counts.passed["group.unit_dropped"] > 15
    assert counts.happened["units that run again"] > 15
    assert counts.happened["schedules with the native engine"] > 20


def test_both_sides_agree_after_every_random_schedule_of_a_fleet_and_nothing_is_left_to_a_recovery():
    counts = run_chunk(FLEETS_FROM, CHUNK // 2)
    assert not counts.findings
    assert counts.schedules == CHUNK // 2
    assert counts.happened["last members"] > 50
    assert counts.happened["dead members settled for"] > 50
    assert counts.happened["members seen to be dead beside another"] > 2
    assert counts.happened["members go on"] > 5
    assert counts.passed["lease.heartbeat"] > 100


def test_every_input_of_a_consumer_group_counts_once_and_nothing_is_left_to_a_recovery():
    counts = run_chunk(CONSUMERS_FROM, CHUNK // 4)
    assert not counts.findings
    assert counts.schedules == CHUNK // 4
    assert counts.happened["units of consumers"] > 200
    assert counts.happened["members expelled"] > 100
    assert counts.happened["peers settled"] > 10
    assert counts.passed["consume.moved"] > 100
    assert counts.told["decided"] > 500


@pytest.mark.parametrize(
    "mistake",
    [
        "offset_rows_moved_after_the_commit",
        pytest.param("dead_members_left_alone", marks=pytest.mark.thorough),
        pytest.param("generation_not_sent", marks=pytest.mark.thorough),
        pytest.param("nothing_read_again_after_an_abort", marks=pytest.mark.thorough),
        pytest.param("lost_partitions_not_noticed", marks=pytest.mark.thorough),
        pytest.param("offsets_moved_by_an_upsert", marks=pytest.mark.thorough),
        pytest.param("offsets_left_where_they_are", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_mistake_of_a_consumer_is_found_soon(mistake):
    assert run_chunk(CONSUMERS_FROM, 1000, mistake).findings


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mistake", [broker_mistakes.takes_offsets_of_any_generation, broker_mistakes.tells_offsets_that_are_pending]
)
def test_a_group_that_gives_up_a_rule_of_kip_447_is_found(monkeypatch, mistake):
    monkeypatch.setattr(scheduler, "handle", mistake)
    assert run_chunk(CONSUMERS_FROM, 1000).findings


@pytest.mark.parametrize(
    "mistake",
    [
        "leased_while_its_holder_lives",
        "lost_lease_taken_for_renewed",
        "suspended_member_taken_for_dead",
        "dead_members_left_to_newcomers",
        pytest.param("lease_given_back_as_if_settled", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_mistake_about_leases_is_found_soon(mistake):
    assert run_chunk(FLEETS_FROM, 1000, mistake).findings


@pytest.mark.parametrize(
    "mistake",
    [
        "messages_of_a_dropped_unit_sent",
        "callers_told_before_the_commit",
        "a_failed_unit_fails_its_group",
        pytest.param("units_of_a_key_overtaken", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_mistake_of_group_commit_is_found_soon(mistake):
    assert run_chunk(GROUPS_FROM, 1000, mistake).findings


@pytest.mark.parametrize(
    "mistake",
    [
        "decided_by_another_completed_without_a_claim",
        "prepared_known_by_its_incarnation_alone",
        "handed_over_aborted_by_its_owner",
        pytest.param("gone_on_when_decided", marks=pytest.mark.thorough),
        pytest.param("end_of_the_decider_repeated", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_mistake_about_what_was_handed_over_is_found_soon(mistake):
    assert run_chunk(HANDED_OVER_FROM, 1000, mistake).findings


@pytest.mark.parametrize(
    "mistake",
    [
        "unconditional_update",
        "failed_commit_taken_for_committed",
        "lost_commit_answer_taken_for_no",
        "never_retired",
        *(
            pytest.param(mistake, marks=pytest.mark.thorough)
            for mistake in (
                "retire_before_complete",
                "nothing_settled_at_the_start",
                "goes_on_before_the_end_is_known",
            )
        ),
    ],
)
def test_a_planted_mistake_is_found_soon(mistake):
    assert run_chunk(0, 1000, mistake).findings


@pytest.mark.parametrize(
    "mistake",
    [
        "prepared_before_all_acknowledgements",
        "witnesses_of_the_wrong_transaction",
        pytest.param("fence_not_written", marks=pytest.mark.thorough),
        pytest.param("batch_resent_with_another_sequence", marks=pytest.mark.thorough),
    ],
)
def test_a_planted_mistake_of_the_native_engine_is_found_soon(mistake):
    assert run_chunk(NATIVE_FROM, 100, mistake).findings


@pytest.mark.thorough
def test_native_transactions_completed_on_the_coordinators_word_are_found():
    assert run_chunk(NATIVE_HANDED_OVER_FROM, 1000, "native_completed_on_the_coordinators_word").findings


@pytest.mark.parametrize(
    "mistake",
    [
        broker_mistakes.ends_what_is_open,
        broker_mistakes.goes_on_with_the_sequence,
        broker_mistakes.adds_nothing,
        pytest.param(broker_mistakes.keeps_the_epoch, marks=pytest.mark.thorough),
        pytest.param(broker_mistakes.writes_twice, marks=pytest.mark.thorough),
        pytest.param(broker_mistakes.forgets_how_it_ended, marks=pytest.mark.thorough),
        pytest.param(broker_mistakes.commits_nothing, marks=pytest.mark.thorough),
    ],
)
def test_a_broker_that_gives_up_a_rule_of_transaction_version_2_is_found(monkeypatch, mistake):
    monkeypatch.setattr(scheduler, "handle", mistake)
    assert run_chunk(NATIVE_FROM, 1000).findings


@pytest.mark.parametrize(
    ("schedule", "mistake", "shows"),
    [
        ("native_late_copy_of_a_message", broker_mistakes.joins_what_is_open, "twice"),
        ("native_late_copy_of_a_commit", broker_mistakes.ends_what_is_open, "not in the database, and readers see"),
    ],
)
def test_late_copies_are_harmless_by_the_rules_of_the_broker(monkeypatch, schedule, mistake, shows):
    assert not run_lines(lines_of_found(schedule)).simulation.held
    monkeypatch.setattr(scheduler, "handle", mistake)
    with pytest.raises(AssertionError, match=shows):
        run_lines(lines_of_found(schedule))


@pytest.mark.parametrize(
    ("schedule", "mistake", "shows"),
    [
        ("first_init_comes_late", "kept_after_a_repeated_init", "told as lost"),
        ("suspended_leader_then_an_abort", "goes_on_before_the_end_is_known", "told as lost"),
        ("suspended_leader_then_a_commit", "goes_on_before_the_end_is_known", "not in the database, and readers see"),
        ("suspended_leader_and_an_overwritten_row", "goes_on_before_the_end_is_known", "held back"),
        ("suspended_leader_then_closed", "closes_without_the_proof", "held back"),
        ("native_first_init_comes_late", "a_new_producer_asked_for_again_after_silence", "told as lost"),
        ("native_suspended_leader_then_the_next_decision", "begins_on_the_coordinators_word", "told as lost"),
        ("native_skipped_in_the_second_partition", "state_without_a_partition", "nobody was told"),
        ("native_timed_out_before_its_commit", "ended_by_the_time_out_taken_for_a_commit", "nobody was told"),
        (
            "native_abort_of_what_was_not_acknowledged",
            "unacknowledged_batch_not_aborted",
            "not in the database, and readers see",
        ),
        ("native_offsets_of_an_earlier_transaction", "witnesses_of_the_wrong_transaction", "told as lost"),
        ("native_settled_by_two", "native_settled_by_the_request_of_the_other_engine", "told as lost"),
    ],
)
def test_a_schedule_that_has_found_a_mistake_finds_it_when_it_is_planted_again(schedule, mistake, shows):
    with planted(mistake), pytest.raises(AssertionError, match=shows):
        run_lines(lines_of_found(schedule))


def test_what_an_owner_knows_of_its_abort_leaves_nothing_to_an_operator():
    lines = lines_of_found("suspended_leader_then_a_commit")
    assert not run_lines(lines).counts["undecided transactions ended by an operator"]
    with planted("settles_without_what_the_owner_knows"):
        assert run_lines(lines).counts["undecided transactions ended by an operator"] == 1


def lines_of_found(name):
    return text_lines((FOUND / f"{name}.txt").read_text(encoding="utf-8"))


def test_several_processes_run_the_same_schedules_as_one(monkeypatch):
    monkeypatch.setattr(run, "CHUNK", 20)
    one, two = Counts(), Counts()
    for counts in chunks(7, 50, "", 1):
        one.add(counts)
    for counts in chunks(7, 50, "", 2):
        two.add(counts)
    assert one.schedules == 50
    assert one == two


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_says_how_far_it_came(tmp_path, jobs):
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "model", "--schedules", "1000000", "--seed", "5", "--jobs", str(jobs)]
    with subprocess.Popen(
        [*command, "--results", results], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()  # the first schedules are done
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in told
    kept = json.loads(results.read_text(encoding="utf-8"))
    assert not kept["complete"]
    assert 0 < kept["schedules"] < 1_000_000
    assert kept["last_seed"] == 5 + kept["schedules"] - 1
