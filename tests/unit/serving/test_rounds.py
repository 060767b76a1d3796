"""What a look says of each writer: its lanes together, its owner's signs of life, what waits."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from math import inf

from dualwrite.protocol.members import Lease, LeaseState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.values import OutboxMode, StateRow, TransactionStatus, Waiting
from dualwrite.recovery.recover import IdStatus
from dualwrite.serving.supervisor import every_writer
from dualwrite.writing.left_behind import Waits

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
STATE = PreparedTxnState.from_string("7:0;n;i=1;orders@c2FtcGxl:0=3")


def row(name, ago_s=100.0, owner="app"):
    return StateRow(name, STATE, "n", 1, 0, None, "c", owner, NOW - timedelta(seconds=ago_s))


def item(name, open_for_s, *, decided, left_s=None, **changed):
    found = row(name)
    if not decided:
        found = replace(found, prepared=PreparedTxnState.from_string(""))
    step = SettleStep.COMMIT if decided else SettleStep.RETIRE
    made = IdStatus(found, 1, TransactionStatus.ONGOING, open_for_s, step, needs_recovery=True)
    return replace(made, aborted_in_s=left_s, decided_is_open=decided, **changed)


def waits(writer, rows):
    return Waits(writer, OutboxMode.LATER, Waiting(rows, 10, 70.0, exact=True), 0)


def seen(items, rows, *, leases=(), held=(), waiting=()):
    return {one.writer: one for one in every_writer(items, rows, leases=leases, held=held, waiting=waiting, now=NOW)}


def test_the_lanes_of_a_writer_are_seen_as_one():
    rows = [row("orders", 90.0), row("orders#1", 3.0), row("orders#2", 80.0), row("bills")]
    items = [item("orders", 95.0, decided=True, left_s=805.0), item("orders#2", 40.0, decided=False, left_s=5.0)]
    (orders,) = seen(items, rows).values()
    assert (orders.writer, orders.decided, orders.undecided) == ("orders", True, True)
    assert orders.youngest_s == 40.0
    assert orders.time_left_s == 805.0, "the broker may abort what is undecided"
    assert orders.unchanged_s == 3.0, "another lane is at work"
    assert orders.lease is None


def test_slots_are_seen_one_by_one():
    rows = [row("sink#1"), row("sink#2", 5.0)]
    found = seen([item("sink#1", 95.0, decided=False), item("sink#2", 5.0, decided=False)], rows, held=["sink#2"])
    assert {name: (one.slot_held, one.unchanged_s) for name, one in found.items()} == {
        "sink#1": (False, 100.0),
        "sink#2": (True, 5.0),
    }


def test_the_lease_of_a_fleets_member_is_that_of_all_its_lanes():
    lease = Lease("fleet-0", "fleet", 0, "app", 12.0)
    found = seen([item("fleet-0#1", 95.0, decided=True)], [row("fleet-0"), row("fleet-0#1")], leases=[lease])
    assert (found["fleet-0"].lease, found["fleet-0"].lease_left_s) == (LeaseState.HELD, 12.0)


def test_a_supervisors_own_claim_is_no_sign_of_life():
    owners = {
        "a": "dualwrite-serve 5a33",
        "b": "dualwrite-serve/night watch 5a33",
        "c": "dualwrite-server 5a33",
        "d": "me 5a33",
    }
    rows = [row(name, 1.0, owner) for name, owner in owners.items()]
    found = seen([item(name, 95.0, decided=True) for name in owners], rows)
    assert [one.unchanged_s for one in found.values()] == [inf, inf, 1.0, 1.0]


def test_what_waits_is_seen_of_writers_that_have_rows():
    found = seen([], [row("orders"), row("bills")], waiting=[waits("orders", 3), waits("bills", 0), waits("gone", 5)])
    assert list(found) == ["orders"]
    assert (found["orders"].needs_recovery, found["orders"].waiting, found["orders"].waiting_s) == (False, 3, 70.0)


def test_what_needs_no_recovery_is_not_seen():
    assert seen([item("orders", 1.0, decided=True, needs_recovery=False)], [row("orders")]) == {}


def test_a_lost_claim_is_seen():
    found = seen([item("orders", None, decided=True, claim_lost=True)], [row("orders")])
    assert found["orders"].claim_lost
    assert found["orders"].youngest_s is None
