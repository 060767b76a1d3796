"""The id of a dead member, taken over: what it has left is settled, and nothing can come under the id."""

import pytest
from harness.served import SETTINGS

from dualwrite import DualWriter, Fenced, WriterLimits, failpoints
from dualwrite.clock import Deadline
from dualwrite.failpoints import FailpointError
from dualwrite.interfaces import NO_OBSERVER
from dualwrite.recovery.operator import take_over


@pytest.fixture
def owner(shop):
    with DualWriter("orders", kafka=SETTINGS, database=shop.engine, limits=WriterLimits(timeout_s=10.0)) as writer:
        yield writer


def put(shop, writer, number):
    with writer.transaction() as tx:
        shop.put(tx, number)


def taken_over(writer):
    return take_over(
        "orders",
        kafka=SETTINGS,
        database=writer._database,
        deadline=Deadline(10.0),
        owner="a member",
        observer=NO_OBSERVER,
    )


def test_an_owner_that_has_nothing_open_is_fenced(shop, owner):
    put(shop, owner, 1)
    report = taken_over(owner)
    assert report.settled == ["orders", "orders#1", "orders#2"]  # with all its lanes
    assert report.planned == report.losses == report.went_back == []
    with pytest.raises(Fenced):
        put(shop, owner, 2)
    assert shop.both_have(1)


def test_what_is_decided_is_committed(shop, owner):
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        put(shop, owner, 1)
    failpoints.arm("")
    taken_over(owner)
    assert shop.both_have(1)


def test_an_id_without_a_row_is_nobodys(shop, owner):
    report = take_over(
        "unknown", kafka=SETTINGS, database=owner._database, deadline=Deadline(10.0), owner=None, observer=NO_OBSERVER
    )
    assert report.settled == []
