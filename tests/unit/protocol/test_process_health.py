"""A writer is ready if nothing is wrong, and every thing that is wrong is named."""

import pytest

from dualwrite.types import Health

WRONG = [
    ({"open": False}, "not open"),
    ({"fenced": True}, "taken over"),
    ({"answered": False}, "did not answer"),
    ({"lease_lost": True}, "taking another id"),
    ({"lease_expired": True}, "not renewed"),
    ({"stuck": 2}, "could not be settled: 2"),
    ({"unreported_losses": 3}, "reported: 3"),
]


def test_an_open_writer_is_ready_however_busy_it_is():
    busy = Health("orders", open=True, lanes=8, used=8, max_lanes=8, waiting=50, unsettled=1, unsettled_s=2.0)
    assert (busy.ready, busy.problems) == (True, ())


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_one_wrong_thing_makes_it_unready_and_is_named(wrong, sentence):
    health = Health("orders", **{"open": True, **wrong})
    assert not health.ready
    [problem] = health.problems
    assert sentence in problem


def test_all_that_is_wrong_is_named():
    health = Health(
        "orders",
        open=False,
        fenced=True,
        answered=False,
        lease_lost=True,
        lease_expired=True,
        stuck=1,
        unreported_losses=1,
    )
    assert len(health.problems) == len(WRONG)
