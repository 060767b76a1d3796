"""Runs of a batch, on every database: the token of the current run, and the tasks that it admits."""

from __future__ import annotations

import pytest
from harness.databases import Database

from dualwrite.errors import Fenced
from dualwrite.protocol.values import owner_prefix, pool_of_sink
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import Run, Runs
from dualwrite.stores.sql.operators import Forgetting, before


@pytest.fixture
def runs(database: Database) -> Runs:
    return Runs(database.engine(), database.schema)


def begun(runs: Runs, name: str = "batch") -> Run:
    run = runs.replace("sink", name)
    assert run is not None
    return run


def test_the_present_run_is_let_through_and_no_other(database: Database, runs: Runs) -> None:
    former, other = begun(runs), begun(runs, "another batch")
    assert runs.present("sink", "batch") == former
    present = begun(runs)
    with database.engine().begin() as connection:
        runs.require(connection, present)
        runs.require(connection, other)
        with pytest.raises(Fenced, match="was given up, or another one has begun"):
            runs.require(connection, former)


def test_a_run_that_nobody_has_begun_begins_when_it_is_asked_for(runs: Runs) -> None:
    assert runs.present("sink", "stream") == runs.present("sink", "stream")


def test_nothing_is_leased_for_a_run_that_was_given_up(database: Database, runs: Runs) -> None:
    former = begun(runs)
    present = begun(runs)
    pool = SlotPool(database.engine(), "pool", schema=database.schema)
    with pytest.raises(Fenced):
        pool.lease("late", 60, require=lambda connection: runs.require(connection, former))
    assert not pool.held_by("")
    assert pool.lease("in time", 60, require=lambda connection: runs.require(connection, present))


@pytest.mark.postgresql
def test_a_run_is_replaced_when_no_transaction_that_was_let_through_stands(postgres: Database) -> None:
    """Also none that is prepared: its lock outlives its session."""
    runs = Runs(postgres.engine(), postgres.schema)
    run = begun(runs)
    with postgres.engine().connect() as connection:
        runs.require(connection, run)
        assert runs.replace("sink", "batch") is None
        connection.exec_driver_sql("PREPARE TRANSACTION 'of a task'")
        connection.rollback()
    assert runs.replace("sink", "batch") is None
    with postgres.engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ROLLBACK PREPARED 'of a task'")
    assert begun(runs) != run


def test_whoever_settles_takes_leases_over_from_those_that_hold_them(database: Database) -> None:
    pool = SlotPool(database.engine(), "pool", schema=database.schema)
    held, gone = pool.lease("task", 60), pool.lease("task", 60)
    pool.release({gone.transactional_id: "task"})
    another = pool.lease("another task", 60)
    assert another.transactional_id == gone.transactional_id
    taken = pool.take_over([gone, held], "settler", 60)
    assert [(one.transactional_id, one.owner) for one in taken] == [(held.transactional_id, "settler")]
    with pytest.raises(Fenced):
        pool.renew(held, 60)
    pool.renew(another, 60)


def begun_long_ago(database: Database, *names: str) -> None:
    run = database.tables.run
    engine = database.engine()
    with engine.begin() as connection:
        when = before(Forgetting(engine, database.schema).now(), 40 * 86400)
        connection.execute(run.update().where(run.c.name.in_(names)).values(begun_at=when))


def test_runs_that_are_long_over_are_forgotten_and_the_next_ones_begin(database: Database, runs: Runs) -> None:
    old = begun(runs, "old")
    begun(runs, "leased")
    begun(runs, "young")
    elsewhere = runs.replace("another sink", "old")
    begun_long_ago(database, "old", "leased")
    SlotPool(database.engine(), pool_of_sink("sink"), schema=database.schema).lease(owner_prefix("leased") + "x", 600)
    forgetting = Forgetting(database.engine(), database.schema)
    limit = before(forgetting.now(), 30 * 86400)
    assert forgetting.forget_runs("sink", limit, dry_run=True) == 1
    assert forgetting.forget_runs("sink", limit, dry_run=False) == 1
    assert forgetting.forget_runs("", limit, dry_run=True, name="sink.spark") == 0
    with database.engine().connect() as connection:
        left = {tuple(row) for row in connection.execute(database.tables.run.select())}
    assert {(row[0], row[1]) for row in left} == {("sink", "leased"), ("sink", "young"), ("another sink", "old")}
    with database.engine().begin() as connection:
        assert elsewhere is not None
        runs.require(connection, elsewhere)
        with pytest.raises(Fenced):
            runs.require(connection, old)
    assert runs.present("sink", "old").token != old.token


@pytest.mark.postgresql
def test_a_run_whose_task_has_handed_over_is_not_forgotten(postgres: Database) -> None:
    runs = Runs(postgres.engine(), postgres.schema)
    run = begun(runs)
    begun_long_ago(postgres, "batch")
    forgetting = Forgetting(postgres.engine(), postgres.schema)
    with postgres.engine().connect() as connection:
        runs.require(connection, run)
        assert forgetting.forget_runs("", forgetting.now(), dry_run=False) == 0
        connection.rollback()
    assert forgetting.forget_runs("", forgetting.now(), dry_run=False) == 1
