"""Every scenario file, performed where it says that it runs."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from scenarios.language import ENGINES, STATEMENTS, ScenarioError, load, parse
from scenarios.page import PAGE, render
from scenarios.real import RealStage

SCENARIOS = load(Path(__file__).parent)
BROKERS = {
    # One that looks for timed-out transactions and forgotten ids all the time.
    "a hasty broker": {
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
        "transactional.id.expiration.ms": "2500",
        "producer.id.expiration.ms": "2500",
        "producer.id.expiration.check.interval.ms": "200",
    },
    # Its markers go through the proxy, as they go over the network between the brokers of a cluster.
    "a broker that reaches itself over the network": {"inter.broker.listener.name": "PROXIED"},
    "a broker of its own": {},
}
DATABASES = {
    "a database that commits lazily": {"synchronous_commit": "off", "wal_writer_delay": "10000"},
    # With a setting, it is one that can be killed, even if DUALWRITE_TEST_POSTGRES names a server for all other tests.
    "a database server of its own": {"cluster_name": "of its own"},
}


SHOWN_IN_EVERY_RUN_BY = {
    "caller_changes_its_mind": "test_dual_writer.py::test_block_that_raises_writes_neither_and_the_exception_passes",
    "claim_meets_a_decision_under_way": "test_counterexamples.py::test_claiming_waits_for_a_decision_under_way",
    "commit_answer_lost": "test_counterexamples.py::test_connection_lost_during_commit_is_resolved_by_the_row",
    "commit_lost_on_its_way": "test_counterexamples.py::test_connection_lost_during_commit_is_resolved_by_the_row",
    "database_failed_over_before_the_next_owner": "test_database_went_back.py::test_the_next_owner_finds_out_what_the_database_has_lost_of_the_last_ones",
    "database_fails_over_under_its_owner": "test_database_went_back.py::test_the_next_dual_write_of_the_same_owner_is_refused_and_an_incident_is_recorded",
    "database_restored": "test_database_went_back.py::test_after_a_restore_nothing_stays_open_of_what_is_younger_than_the_backup",
    "decided_owner_dead": "test_kill_at_failpoints.py::test_writer_killed_then_next_start_makes_both_sides_equal",
    "operator_aborts_a_decided_transaction": "test_checker.py::test_a_loss_that_is_on_record_is_lost",
    "owner_dies_after_its_update": "test_kill_at_failpoints.py::test_writer_killed_then_next_start_makes_both_sides_equal",
    "paused_owner_cannot_decide": "test_faults.py::test_owner_paused_anywhere_and_resumed_after_somebody_settled_can_do_nothing",
    "paused_unit_writer_wakes_after_a_claim": "test_units.py::test_a_second_writer_fences_the_first_whose_unit_is_aborted",
    "recoverer_killed": "test_kill_at_failpoints.py::test_settler_killed_then_another_settles",
    "row_deleted_under_its_owner": "test_counterexamples.py::test_a_row_that_was_deleted_and_made_anew_has_another_owner",
    "row_in_doubt_was_overwritten": "test_counterexamples.py::test_in_doubt_row_that_the_next_owner_has_overwritten_is_resolved_by_the_log",
    "tool_aborts_under_a_live_owner": "test_faults.py::test_what_a_tool_aborts_under_a_live_owner_is_recorded_when_it_closes",
    "two_recoverers_at_once": "test_faults.py::test_recoverers_at_once_converge",
    "unit_writer_dies_before_its_end_is_decided": "test_units.py::test_a_writer_that_is_killed_leaves_its_unit_whole_or_not_at_all",
    "unit_writer_dies_within": "test_units.py::test_a_writer_that_is_killed_leaves_its_unit_whole_or_not_at_all",
    "undecided_owner_dead": "test_kill_at_failpoints.py::test_writer_killed_then_next_start_makes_both_sides_equal",
}
"""Hazards that tests in `integration` bring about on real servers, too: their scenarios are left to thorough runs."""
SPECIAL = BROKERS.keys() | DATABASES.keys() | {"short deadlines", "short sessions"}
REAL = [
    pytest.param(
        scenario,
        engine,
        id=scenario.name if engine == "librdkafka" else f"{scenario.name}-{engine}",
        # Those that need servers of their own take minutes; nearly all have been performed through librdkafka already.
        marks=[pytest.mark.thorough]
        if engine == "native" or scenario.given & SPECIAL or scenario.name in SHOWN_IN_EVERY_RUN_BY
        else [],
    )
    for engine in ENGINES
    for scenario in SCENARIOS
    if engine in scenario.engines
]


@pytest.fixture(scope="module")
def special():
    """Servers with settings of their own, each started when the first scenario asks for it."""
    started = {}
    with ExitStack() as stack:

        def get(kind, name, settings):
            if name not in started:
                started[name] = stack.enter_context(kind(settings))
            return started[name]

        yield get


@pytest.fixture
def kafka(request, scenario, special):
    for name in scenario.given & BROKERS.keys():
        return special(EmbeddedKafka, name, BROKERS[name])
    return request.getfixturevalue("dualwrite_kafka")


@pytest.fixture
def postgres(request, scenario, special):
    for name in scenario.given & DATABASES.keys():
        return special(EmbeddedPostgres, name, DATABASES[name])
    return request.getfixturevalue("dualwrite_postgres")


@pytest.mark.parametrize(("scenario", "engine"), REAL)
def test_scenario_on_real_servers(scenario, engine, kafka, postgres, tmp_path):
    with RealStage(scenario, engine, kafka, postgres, tmp_path) as stage:
        for statement in scenario.statements:
            try:
                stage.perform(statement)
            except AssertionError as error:
                where = f"{scenario.name}.txt:{statement.line}: {statement.text}"
                raise AssertionError(f"{where}\n{error}\n{_logs(tmp_path)}") from error


def _logs(directory):
    return "\n".join(
        f"{path.name}: {line}"
        for path in sorted(directory.glob("*.log"))
        for line in path.read_text().splitlines()[-8:]
    )


def test_every_hazard_of_the_readme_is_shown_or_said_to_be_shown_elsewhere():
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|([^|]*)\|([^|\n]*)\|?$", readme, re.MULTILINE)
    facts = {int(number) for number, _, elsewhere in rows if not elsewhere}
    failures = {int(number): elsewhere.strip() for number, _, elsewhere in rows if elsewhere}
    assert facts == frozenset().union(*(scenario.facts for scenario in SCENARIOS))
    shown = frozenset().union(*(scenario.failures for scenario in SCENARIOS))
    assert {number for number, elsewhere in failures.items() if not elsewhere} <= shown <= failures.keys()


def test_what_is_left_to_thorough_runs_is_shown_by_tests_that_exist():
    assert {scenario.name for scenario in SCENARIOS} >= SHOWN_IN_EVERY_RUN_BY.keys()
    for test in SHOWN_IN_EVERY_RUN_BY.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / "integration" / file).read_text(encoding="utf-8"), test


def test_every_statement_of_the_language_is_used_and_in_the_readme():
    used = {statement.verb for scenario in SCENARIOS for statement in scenario.statements}
    assert used == STATEMENTS.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A flies", "not a statement: 'A flies'"),
        ("A opens, up to nowhere", "not a statement"),
    ],
)
def test_a_line_that_is_not_understood_is_named(text, says):
    with pytest.raises(ScenarioError, match=says):
        parse("odd", f"# Title\n# Hazard: none\n\n{text}\n")


@pytest.mark.parametrize(
    "head",
    [
        "# Title",
        "# Title\n# Hazard: one\n# Engine: steam",
        "# Title\n# Hazard: one\n# Engine: librdkafka\n# Natively: other",
    ],
)
def test_a_head_that_is_not_complete_is_refused(head):
    with pytest.raises(ScenarioError):
        parse("odd", f"{head}\n\nA opens\n")


def test_the_page_of_the_documentation_is_made_of_the_files():
    assert PAGE.read_text(encoding="utf-8") == render(SCENARIOS), "run: cd tests && python -m scenarios.page"
