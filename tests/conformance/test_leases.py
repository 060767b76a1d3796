"""Leases of numbered ids, on every database."""

from __future__ import annotations

import threading
from datetime import date
from itertools import chain

import pytest
from harness.databases import Database, Thread
from sqlalchemy import event, update

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.members import Lease, LeaseState
from dualwrite.stores.sql import leases as module
from dualwrite.stores.sql.leases import Leases, living_members, read_leases
from dualwrite.stores.sql.tables import database_now_plus

F, H, E = LeaseState.FREE, LeaseState.HELD, LeaseState.EXPIRED


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database.engine(), "orders", schema=database.schema)


@pytest.fixture
def there(database: Database):
    """The leases, by id."""
    engine = database.engine()
    return lambda: {lease.transactional_id: lease for lease in read_leases(engine, schema=database.schema)}


def states(found: dict[str, Lease]) -> dict[str, LeaseState]:
    return {name: lease.state for name, lease in found.items()}


def test_members_take_the_lowest_numbers_and_one_that_is_given_back_is_the_next_one_taken(leases, there):
    assert [leases.take(f"member {number}", 60) for number in range(4)] == [f"orders-{number}" for number in range(4)]
    leases.give_back("orders-1", "member 1", settled=True)
    leases.give_back("orders-2", "member 2", settled=True)
    assert states(there()) == {"orders-0": H, "orders-1": F, "orders-2": F, "orders-3": H}
    assert [leases.take(f"another {number}", 60) for number in range(3)] == ["orders-1", "orders-2", "orders-4"]


def test_a_lease_lasts_its_time_from_the_moment_when_it_was_taken_or_renewed(leases, there):
    leases.take("member", 60)
    assert 50 < there()["orders-0"].left_s <= 60
    leases.renew("orders-0", "member", 600, wait_s=5)
    assert 590 < there()["orders-0"].left_s <= 600


def test_an_expired_lease_is_seen_by_others_and_taken_before_a_new_number(leases, there):
    leases.take("dead", -1)
    assert leases.take("alive", 60) == "orders-0"
    assert there()["orders-0"].owner == "alive"


def test_a_heartbeat_shows_the_expired_leases_of_the_fleet_alone(database, leases):
    Leases(database.engine(), "payments", schema=database.schema).take("dead, too", -1)
    leases.take("dead", -1)
    leases.take("paused", 60)
    leases.take("member", 60)
    leases.renew("orders-0", "paused", -5, wait_s=5)
    renewed, expired = leases.renew("orders-1", "member", 60, wait_s=5)
    assert renewed
    assert [(lease.transactional_id, lease.owner, lease.state) for lease in expired] == [("orders-0", "paused", E)]


def test_an_expired_lease_is_renewed_while_nobody_has_taken_it(leases, there):
    leases.take("member", -1)
    assert leases.renew("orders-0", "member", 60, wait_s=5)[0]
    assert states(there()) == {"orders-0": H}


def test_a_lease_that_another_member_has_taken_is_neither_renewed_nor_given_back_by_its_former_owner(leases, there):
    leases.take("former", -1)
    leases.take("present", 60)
    assert not leases.renew("orders-0", "former", 6000, wait_s=5)[0]
    leases.give_back("orders-0", "former", settled=True)
    leases.give_back("orders-0", "former", settled=False)
    found = there()["orders-0"]
    assert (found.owner, found.state) == ("present", H)
    assert found.left_s < 61


def test_of_two_leases_that_one_name_holds_only_the_one_in_use_is_renewed(leases, there):
    """The taking of the other one was committed after its caller had lost the connection, and had asked again."""
    leases.take("member", 60)
    leases.give_back("orders-0", "member", settled=True)
    leases.take("another", 60)
    assert leases.take("member", 30) == "orders-1"
    engine = leases._own._engine
    with engine.begin() as connection:
        connection.execute(update(leases._lease).where(leases._lease.c.number == 0).values(owner="member"))
    assert leases.renew("orders-1", "member", 600, wait_s=5)[0]
    assert [there()[f"orders-{number}"].left_s > 100 for number in range(2)] == [False, True]
    assert leases.take("member", 600) == "orders-0"
    assert len(there()) == 2


def test_a_free_lease_is_not_renewed(leases):
    leases.take("member", 60)
    leases.give_back("orders-0", "member", settled=True)
    assert leases.renew("orders-0", "member", 60, wait_s=5) == (False, [])


def test_a_lease_given_back_unsettled_is_left_to_be_settled_and_taken(leases, there):
    leases.take("member", 60)
    leases.take("another", 60)
    leases.give_back("orders-0", "member", settled=False)
    assert states(there()) == {"orders-0": E, "orders-1": H}
    [expired] = leases.renew("orders-1", "another", 60, wait_s=5)[1]
    assert expired.transactional_id == "orders-0"


def test_one_member_alone_adopts_what_a_dead_one_has_left(leases, there):
    leases.take("dead", 60)
    leases.take("helper", 60)
    leases.renew("orders-0", "dead", -1, wait_s=5)
    [dead] = leases.renew("orders-1", "helper", 60, wait_s=5)[1]
    assert leases.adopt(dead, "helper's help", 60)
    assert leases.adopt(dead, "helper's help", 60), "its answer may have been lost"
    assert not leases.adopt(dead, "another's help", 60)
    assert there()["orders-0"].owner == "helper's help"


def test_nobody_adopts_a_lease_that_was_renewed_meanwhile(leases):
    leases.take("late", 60)
    leases.renew("orders-0", "late", -1, wait_s=5)
    [late] = leases.renew("orders-1", "helper", 60, wait_s=5)[1]
    leases.renew("orders-0", "late", 60, wait_s=5)
    assert not leases.adopt(late, "helper", 60)


def test_a_heartbeat_also_shows_the_leases_of_the_holders_beside_its_own(leases):
    for number, place in enumerate(("boot/1/7", "boot/12/7", "reboot/1/7", "boot/1/8")):
        leases.take(f"member {number} on {place}", 60)
    leases.take("member of no place", 60)
    shown = [lease.transactional_id for lease in leases.renew("orders-0", "member 0 on boot/1/7", 60, wait_s=5)[1]]
    assert sorted(shown) == ["orders-0", "orders-3"]
    assert leases.renew("orders-4", "member of no place", 60, wait_s=5)[1] == []


def test_a_lease_whose_holder_has_died_is_taken_and_adopted_before_it_expires(leases, there):
    for number in range(3):
        leases.take(f"member {number} on boot/1/{number + 1}", 60)
    found = there()
    assert leases.take("newcomer", 60, has_died=lambda lease: lease.number == 1) == "orders-1"
    assert leases.adopt(found["orders-2"], "helper's help", 60)
    assert [there()[f"orders-{number}"].owner for number in range(3)] == [
        "member 0 on boot/1/1",
        "newcomer",
        "helper's help",
    ]


def test_nobody_adopts_the_lease_of_a_dead_holder_that_another_has_taken_over(leases, there):
    leases.take("dead on boot/1/1", 60)
    dead = there()["orders-0"]
    assert leases.take("newcomer", 60, has_died=lambda _: True) == "orders-0"
    assert not leases.adopt(dead, "helper's help", 60)
    assert there()["orders-0"].owner == "newcomer"


def test_a_name_that_holds_a_lease_gets_that_one_again(leases):
    assert leases.take("member", 60) == leases.take("member", 60) == "orders-0"


def test_concurrent_members_never_share_an_id(database, leases):
    leases.take("dead", -1)
    together = threading.Barrier(6)

    def take(number: int) -> list[str]:
        own = Leases(database.engine(), "orders", schema=database.schema)
        together.wait()
        return [own.take(f"member {number}, {position}", 60) for position in range(4)]

    threads = [Thread(lambda number=number: take(number)) for number in range(6)]
    taken = list(chain.from_iterable(thread.result() for thread in threads))
    assert sorted(taken) == sorted(f"orders-{number}" for number in range(24))


def test_no_time_of_this_machine_reaches_the_database(database):
    """A machine whose clock is wrong must neither hold a lease for ever nor lose it at once."""
    engine = database.engine()
    sent: list[object] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_conn, _cursor, statement, parameters, _context, _many):
        if "dualwrite_lease" in statement:
            sent.extend(parameters.values() if isinstance(parameters, dict) else parameters)

    leases = Leases(engine, "orders", schema=database.schema)
    leases.take("dead", -1)
    leases.take("member", 60)
    leases.renew("orders-0", "member", 60, wait_s=5)
    leases.renew("orders-0", "member", -1, wait_s=5)
    [expired] = leases.renew("orders-1", "nobody", 60, wait_s=5)[1]
    leases.adopt(expired, "helper", 60)
    leases.give_back("orders-0", "helper", settled=False)
    assert "member" in sent
    assert not [value for value in sent if isinstance(value, date) or (isinstance(value, str) and ":" in value)]


def test_the_time_that_is_left_is_measured_by_the_databases_clock(leases, there, monkeypatch):
    leases.take("member", 60)
    monkeypatch.setattr(module, "database_now", lambda: database_now_plus(3600.0))
    assert there()["orders-0"].left_s == pytest.approx(-3540, abs=30)


def test_a_heartbeat_that_dies_has_renewed_nothing(leases, there):
    leases.take("member", 60)
    failpoints.arm("lease.heartbeat:1:raise")
    try:
        with pytest.raises(FailpointError):
            leases.renew("orders-0", "member", 600, wait_s=5)
    finally:
        failpoints.arm("")
    assert there()["orders-0"].left_s < 61


def test_whose_members_are_alive(database, leases):
    leases.take("dead", -1)
    leases.take("dead", -1)
    alive = Leases(database.engine(), "payments", schema=database.schema).take("alive", 60)
    names = [alive, f"{alive}#1", "orders-0", "orders-0#1", "no lease", "payments-00"]
    assert living_members(database.engine(), names, schema=database.schema) == {alive, f"{alive}#1"}
    assert living_members(database.engine(), [], schema=database.schema) == set()


def test_leases_are_listed_by_id_or_prefix(database, leases):
    for owner in ("a", "b"):
        leases.take(owner, 60)
    engine = database.engine()

    def listed(*args: str, **kwargs: str) -> list[str]:
        return [one.transactional_id for one in read_leases(engine, *args, schema=database.schema, **kwargs)]

    assert listed("orders-1") == ["orders-1"]
    assert listed(prefix="orders-") == ["orders-0", "orders-1"]
    assert listed(prefix="payments") == listed("orders") == []


@pytest.mark.postgresql
def test_a_lease_that_is_being_taken_is_passed_over(postgres: Database) -> None:
    leases = Leases(postgres.engine(), "orders")
    leases.take("dead", -1)
    with postgres.engine().connect() as other:
        other.exec_driver_sql("SELECT * FROM dualwrite_lease FOR UPDATE")
        assert leases.take("member", 60) == "orders-1"


def test_missing_tables_are_named(database):
    database.execute(f"DROP TABLE {database.state_table.replace('kafka_transaction_state', 'dualwrite_lease')}")
    with pytest.raises(ConfigurationError, match="dualwrite"):
        Leases(database.engine(), "orders", schema=database.schema).take("member", 60)
