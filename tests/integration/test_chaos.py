"""A short run of the kill -9 harness: processes die, a zombie wakes up, both servers die under them; nothing is wrong."""

from collections import Counter

import pytest
from chaos import fleets
from chaos.conductor import Conductor
from chaos.jobs import prepare
from chaos.plan import MEMBER_OPERATIONS, PAUSED_MEMBER_MS, Episode, Round, Step, Way
from chaos.processes import Forks
from chaos.results import Results
from chaos.servers import Servers
from chaos.states import States
from harness.mistakes import planted
from harness.worker import DECISIONS

from dualwrite.stores.sql.leases import Leases

pytestmark = pytest.mark.slow

ZOMBIE = Episode("zombie", (Step(failpoint="write.prepared:2:stop"), Step(failpoint="write.decided:2")))
PAUSED_CLAIM = Episode("zombie", (Step(failpoint="claim.settled:1:stop"), Step(failpoint="write.completed:1")))
SUSPENDED = Episode("suspended", (Step(failpoint="write.recorded:2:stop", resumed_after_ms=800),))
KILLED_TWICE = Episode(
    "killed",
    (Step(failpoint="write.decided:2"), Step(failpoint="settle.before_commit"), Step("settle", "settle.retired")),
)
RIVALS = Episode("rivals", (Step(failpoint="write.decided:1"), Step("settle"), Step(failpoint="settle.looked"), Step()))
UNITS = Episode(
    "killed",
    (
        Step(failpoint="group.unit_kept:3", operations=6, abort=(2,)),
        Step(failpoint="group.unit_begun:2", operations=6, spoils=1),
        Step(failpoint="group.committed:1", operations=6),
    ),
)
MEMBERS = Episode(
    "members",
    (
        Step("member", "write.decided:2"),
        Step("member", "lease.heartbeat:2", operations=40),
        Step("member", "write.completed:2:stop", operations=40, resumed_after_ms=4500),
        Step("member", operations=60),
    ),
)
LAST_MEMBER = Episode("killed", (Step("last member", operations=2),))
ANY_MOMENT = Episode("killed", (Step(after_ms=400, operations=50),))
TASKS = [
    Episode("killed", (Step("task", f"{point}:1", operations=3),))
    for point in ("slot.leased", "ledger.checked", "ledger.inserted", "write.decided", "slot.released")
]


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with Servers() as servers, Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield servers, forks


def play(arena, directory, round_):
    directory.mkdir()
    results = Results("", 0)
    Conductor(*arena, round_, directory, results).run()
    arena[0].forget_logs()  # as a run does after each round
    assert results.findings == []
    return results


def test_both_sides_are_equal_after_killed_processes_and_killed_servers(arena, tmp_path):
    episodes = {
        "r0-w0": [ZOMBIE, KILLED_TWICE, SUSPENDED, RIVALS],
        "r0-w1": [KILLED_TWICE, ANY_MOMENT, PAUSED_CLAIM, ANY_MOMENT],
        "r0-w2": [UNITS],
        "r0-w3": [UNITS],
        "r0-pool": TASKS,
        "r0-fleet": [MEMBERS, LAST_MEMBER],
    }
    round_ = Round(
        0,
        "postgresql",
        2,
        episodes,
        {"r0-w0": 1, "r0-w1": 3, "r0-w2": 3, "r0-w3": 3, "r0-pool": 1, "r0-fleet": 1},
        {"r0-w2": Way("threads", "group"), "r0-w3": Way("tasks", "group"), "r0-w1": Way("tasks", "sessions")},
        broker_kills=[2],
        database_stops=[1, 4],
        broker_suspensions=[3],
        database_suspensions=[5],
    )
    results = play(arena, tmp_path / "round", round_)
    assert results.broker_kills == 1
    assert results.database_stops == 2
    assert results.broker_suspensions == 1
    assert results.database_suspensions == 1
    assert results.suspended["postgresql"]["write.recorded"] == 1
    assert results.zombie_count >= 1
    assert results.kills >= 14
    assert results.members >= 1
    assert results.operations["decided_by_members"] > 0
    assert results.ways["sessions in tasks"] >= 1
    assert results.spoiled >= 1
    assert results.operations["present"] > 0
    assert not (tmp_path / "round").exists(), "the evidence of a clean round is kept"


@pytest.mark.thorough
def test_both_sides_are_equal_with_sqlite(arena, tmp_path):
    episodes = {"r1-w0": [KILLED_TWICE, PAUSED_CLAIM], "r1-w1": [ANY_MOMENT, RIVALS], "r1-pool": TASKS[:3]}
    round_ = Round(1, "sqlite", 2, episodes, dict.fromkeys(episodes, 1))
    results = play(arena, tmp_path / "round", round_)
    assert results.zombie_count >= 1
    assert results.kills >= 5


@pytest.mark.parametrize(
    ("number", "mistake", "database"),
    [
        pytest.param(2, "retire_before_complete", "sqlite", marks=pytest.mark.thorough),
        (3, "state_without_first_offsets", "postgresql"),
    ],
)
def test_a_mistaken_product_is_found_out(arena, tmp_path, number, mistake, database):
    """The negative control: the same harness, the same plan, one rule of the protocol broken."""
    servers, _ = arena
    name = f"r{number}-w0"
    steps = (Step(failpoint="write.prepared:2"), Step(failpoint="write.decided:2"), Step())
    directory, results = tmp_path / "round", Results("", 0)
    directory.mkdir()
    with Forks(tmp_path, mistake) as forks:
        Conductor(
            servers,
            forks,
            Round(number, database, 2, {name: [Episode("killed", steps)]}, {name: 1}),
            directory,
            results,
        ).run()
    assert {finding["kind"] for finding in results.findings} & {"lost", "torn", "twice", "undone"}
    assert (directory / "journal").exists(), "the evidence is gone"


@pytest.mark.thorough
def test_a_fleet_that_leases_the_ids_of_living_members_is_found_out(arena, tmp_path):
    servers, _ = arena
    directory, results = tmp_path / "round", Results("", 0)
    paused = Step("member", "write.begun:2:stop", operations=40, resumed_after_ms=PAUSED_MEMBER_MS)
    members = Episode("members", (paused, Step("member", operations=MEMBER_OPERATIONS)))
    directory.mkdir()
    round_ = Round(5, "postgresql", 2, {"r5-fleet": [members]}, {"r5-fleet": 1})
    with Forks(tmp_path, "leased_while_its_holder_lives") as forks:
        Conductor(servers, forks, round_, directory, results).run()
    assert "leased twice" in {finding["kind"] for finding in results.findings}


def test_the_database_sees_a_lease_that_is_taken_too_early_and_a_decision_under_a_free_id(arena):
    engine = prepare(arena[0].postgres.create_database("fleets"))

    def decide(operation, name):
        with engine.begin() as connection:
            values = {"operation": operation, "transactional_id": name, "incarnation": 1, "member": "A"}
            connection.execute(DECISIONS.insert().values(values))

    try:
        leases = Leases(engine, "orders")
        name = leases.take("A", 30)
        leases.renew(name, "A", 30, wait_s=5)
        decide("one", name)
        assert fleets.find(engine) == []
        with planted("leased_while_its_holder_lives"):
            assert leases.take("B", 30) == name
        [found] = fleets.find(engine)
        assert (found["kind"], found["detail"]) == ("leased twice", "B has taken it while the lease of A went on")
        leases.give_back(name, "B", settled=True)
        decide("two", name)
        assert [one["kind"] for one in fleets.find(engine)] == ["leased twice", "not fenced"]
    finally:
        engine.dispose()


@pytest.mark.parametrize("mistake", [pytest.param("", marks=pytest.mark.thorough), "deletions_not_logged"])
def test_state_stores_equal_their_changelogs_unless_the_product_is_mistaken(arena, tmp_path, mistake):
    servers, _ = arena
    results = Results("", 0, states={"rounds": Counter(done=len(mistake))})  # each with topics of its own
    with Forks(tmp_path, mistake) as forks:
        States(servers, forks, tmp_path, results).run(8)
    if mistake:
        assert {finding["kind"] for finding in results.findings} == {"differs"}
    else:
        assert results.findings == []
        assert results.states["counted"]["inputs"] > 0
        assert results.states["compared"]["copies"] >= 8
