"""Which rows the arguments of a call name."""

import pytest

from dualwrite.recovery.recover import rows_of, whole_writers


@pytest.fixture
def select(servers):
    """Rows of three writers, one of them a pool of slots without a first lane."""
    for name in ("orders", "orders#1", "orders-old", "flights.spark#1", "flights.spark#2"):
        servers.run(lambda here, name=name: here.ready(name))
    return lambda choose: sorted(row.transactional_id for row in servers.run(lambda here: choose(here.context.store)))


def test_an_id_stands_for_its_writer_with_all_lanes_and_a_prefix_for_all_ids_that_begin_so(select):
    assert select(lambda store: rows_of(store, "orders", None)) == ["orders", "orders#1"]
    assert select(lambda store: rows_of(store, None, "orders")) == ["orders", "orders#1", "orders-old"]
    assert len(select(lambda store: rows_of(store, None, None))) == 5


def test_a_lane_brings_the_others_of_its_writer_and_a_slot_does_not(select):
    assert select(lambda store: whole_writers(store, store.read(["orders#1"]))) == ["orders", "orders#1"]
    assert select(lambda store: whole_writers(store, store.read(["flights.spark#1"]))) == ["flights.spark#1"]
