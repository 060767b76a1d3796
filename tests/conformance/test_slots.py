"""Leases of slots, on every database."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from harness.databases import Database, Thread

from dualwrite.errors import ConfigurationError, Fenced, Unavailable
from dualwrite.stores.sql import leases as module
from dualwrite.stores.sql.leases import SlotLease, SlotPool, living_leases


@pytest.fixture
def pool(database: Database) -> SlotPool:
    return SlotPool(database.engine(), "job", schema=database.schema)


def names(leases: list[SlotLease] | object) -> list[str]:
    assert isinstance(leases, (list, tuple)) or hasattr(leases, "__iter__")
    return [lease.transactional_id for lease in leases]


def give_back(pool: SlotPool, lease: SlotLease, *, kept: bool = False) -> None:
    pool.release({lease.transactional_id: lease.owner}, kept=kept)


def test_slots_are_numbered_from_one_and_grow_as_needed(pool: SlotPool) -> None:
    leases = [pool.lease(f"worker {number}", 60) for number in range(3)]
    assert names(leases) == ["job#1", "job#2", "job#3"]
    assert {lease.pool for lease in leases} == {"job"}
    assert leases[0].owner == "worker 0"
    assert timedelta(seconds=50) < leases[0].until - datetime.now(timezone.utc) < timedelta(seconds=70)


def test_a_lease_whose_commit_was_not_answered_is_found_again(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work runs again. With a second slot, the first one would stay leased to nobody until its time is over."""
    run = pool._own.run
    monkeypatch.setattr(pool._own, "run", lambda work: (run(work), run(work))[1])
    assert [pool.lease(f"W{number}", 60).transactional_id for number in (1, 2)] == ["job#1", "job#2"]


def test_a_released_slot_is_the_next_one_leased(pool: SlotPool) -> None:
    leases = [pool.lease("worker", 60) for _ in range(3)]
    give_back(pool, leases[1])
    give_back(pool, leases[1])
    assert pool.lease("another", 60).transactional_id == "job#2"
    assert pool.lease("another", 60).transactional_id == "job#4"


def test_a_worker_is_given_the_slots_that_it_prefers_in_that_order(pool: SlotPool) -> None:
    leases = [pool.lease("worker", 60) for _ in range(4)]
    for lease in leases[1:]:
        give_back(pool, lease)
    preferred = ["job#1", "job#9", "job#4", "job#2"]
    assert names([pool.lease("again", 60, preferred=lambda _: preferred) for _ in range(4)]) == [
        "job#4",
        "job#2",
        "job#3",
        "job#5",
    ]


def test_a_slot_that_its_worker_keeps_is_left_to_it_while_the_pool_may_grow(pool: SlotPool) -> None:
    give_back(pool, pool.lease("worker", 60), kept=True)
    assert pool.held_by("worker") == pool.expired() == []
    pool.max_slots = 2
    another = pool.lease("another", 60)
    assert another.transactional_id == "job#2"
    mine = pool.lease("worker", 60, preferred=lambda _: ["job#1"])
    assert mine.transactional_id == "job#1"
    give_back(pool, mine, kept=True)
    assert pool.lease("a third", 60).transactional_id == "job#1", "better than to fail"


def test_a_slot_that_was_kept_for_long_is_anybodys(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    give_back(pool, pool.lease("worker", 60), kept=True)
    assert pool.lease("another", 60).transactional_id == "job#1"


def test_slots_are_given_back_together_by_who_holds_them(pool: SlotPool) -> None:
    leases = [pool.lease(f"worker {number}", 60) for number in range(3)]
    pool.release({"job#1": "worker 0", "job#2": "another worker", "job#3": "worker 2"})
    assert pool.held_by("worker") == [leases[1]]
    pool.release({})


def test_a_lease_that_is_over_is_free(pool: SlotPool) -> None:
    first = pool.lease("dead", -1)
    assert names(pool.expired()) == ["job#1"]
    second = pool.lease("alive", 60)
    assert second.transactional_id == first.transactional_id
    assert pool.expired() == []
    with pytest.raises(Fenced, match="dead") as caught:
        pool.renew(first, 60)
    assert caught.value.transactional_id == "job#1"
    give_back(pool, first)
    assert pool.held_by("alive") == [second]


def test_a_lease_is_renewed_also_late_if_nobody_took_the_slot(pool: SlotPool) -> None:
    lease = pool.lease("worker", -1)
    renewed = pool.renew(lease, 60)
    assert renewed.until > lease.until + timedelta(seconds=50)
    assert pool.expired() == []
    assert pool.held_by("worker") == [renewed]
    give_back(pool, renewed)
    with pytest.raises(Fenced):
        pool.renew(renewed, 60)


def test_leases_are_listed_by_the_beginning_of_the_owners_name(pool: SlotPool) -> None:
    for owner in ("job-1/task-1", "job-1/task-2", "job-10/task-1", "JOB-1/task-1"):
        pool.lease(owner, 60)
    assert names(pool.held_by("job-1/")) == ["job#1", "job#2"]
    assert names(pool.held_by("job-1/task-2")) == ["job#2"]
    assert names(pool.held_by("")) == ["job#1", "job#2", "job#3", "job#4"]


def test_pools_do_not_see_each_other(database: Database, pool: SlotPool) -> None:
    other = SlotPool(database.engine(), "job2", schema=database.schema)
    pool.lease("worker", -1)
    assert other.lease("worker", 60).transactional_id == "job2#1"
    assert names(other.held_by("worker")) == ["job2#1"]
    assert other.expired() == []


def test_a_pool_grows_to_its_limit_only(database: Database) -> None:
    pool = SlotPool(database.engine(), "job", schema=database.schema, max_slots=2)
    leases = [pool.lease("worker", 60) for _ in range(2)]
    with pytest.raises(Unavailable, match="all 2 slots"):
        pool.lease("worker", 60)
    give_back(pool, leases[0])
    assert pool.lease("worker", 60).transactional_id == "job#1"


def test_concurrent_workers_never_share_a_slot(database: Database, pool: SlotPool) -> None:
    for _ in range(3):
        pool.lease("dead", -1)
    together = threading.Barrier(6)

    def lease(number: int) -> list[SlotLease]:
        own = SlotPool(database.url, "job", schema=database.schema)
        together.wait()
        held = [own.lease(f"worker {number}, lease {one}", 60) for one in range(4)]
        own.close()
        return held

    threads = [Thread(lambda number=number: lease(number)) for number in range(6)]
    leases = [lease for thread in threads for lease in thread.result()]
    assert sorted(names(leases)) == sorted(f"job#{number}" for number in range(1, 25))


def test_whose_leases_live(database: Database, pool: SlotPool) -> None:
    alive, over, free = pool.lease("alive", 60), pool.lease("dead", -1), pool.lease("done", 60)
    give_back(pool, free, kept=True)
    asked = [*names([alive, over, free]), "no slot"]
    assert living_leases(database.engine(), asked, schema=database.schema) == {alive.transactional_id}


@pytest.mark.postgresql
def test_a_slot_that_is_being_leased_is_passed_over(postgres: Database) -> None:
    pool = SlotPool(postgres.engine(), "job")
    for _ in range(2):
        pool.lease("dead", -1)
    with postgres.engine().connect() as observer:
        observer.exec_driver_sql("SELECT * FROM dualwrite_slot WHERE number = 1 FOR UPDATE")
        assert pool.lease("alive", 60).transactional_id == "job#2"


def test_a_missing_table_names_the_command(database: Database, pool: SlotPool) -> None:
    with database.engines[0].begin() as connection:
        database.tables.slot.drop(connection)
    with pytest.raises(ConfigurationError, match="dualwrite migrate"):
        pool.lease("worker", 60)
    with pytest.raises(ConfigurationError, match="dualwrite migrate"):
        living_leases(database.engine(), ["job#1"], schema=database.schema)


@pytest.mark.parametrize("name", ["", "x" * 245, "a\nb"])
def test_a_name_that_leaves_no_room_is_refused(database: Database, name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a pool"):
        SlotPool(database.engine(), name)


def test_the_longest_name_has_room_for_numbers(database: Database) -> None:
    pool = SlotPool(database.engine(), "x" * 244, schema=database.schema)
    assert pool.lease("worker", 60).transactional_id.endswith("x#1")
