"""The number of units in each group, as it is recorded."""

from concurrent.futures import wait

from sqlalchemy import text

from dualwrite import RowUnit
from dualwrite.telemetry import names
from unit.writing.group.held import Held

INSERT = text("INSERT INTO orders (id) VALUES (:id)")


def test_the_units_of_each_group_are_recorded(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        writer.submit(lambda tx: shop.put(tx, 1)).result()
        one = recorded.metric(names.GROUP_UNITS)["orders",]
        noted = writer._groups._grouped
        held = Held(shop, writer)
        writer._groups._grouped = noted
        with held.together():
            futures = [held.put(2), *(writer.submit(RowUnit(INSERT, {"id": n}), key=n) for n in (3, 4))]
        wait(futures, 30)
        all_three = recorded.metric(names.GROUP_UNITS)["orders",]
    assert (one.count, one.sum) == (1, 1)
    assert (all_three.count, all_three.sum, all_three.max) == (3, 1 + 1 + 3, 3)
