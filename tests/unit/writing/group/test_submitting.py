"""Which units a writer takes, and in which context they run."""

import contextvars

import pytest
from harness.served import SETTINGS
from sqlalchemy import text

from dualwrite import DualWriter, RowUnit
from dualwrite.databases import ZooKeeperDatabase
from dualwrite.errors import IllegalStateError

NAME = contextvars.ContextVar("name")


def test_a_unit_sees_the_context_of_its_caller(held):
    NAME.set("the caller's")
    assert held.writer.submit(lambda _: NAME.get()).result(30) == "the caller's"
    with held.together():
        futures = []
        for name in ("a", "b"):
            NAME.set(name)
            futures.append(held.writer.submit(lambda _: NAME.get(), key=name))
    assert [future.result(30) for future in futures] == ["a", "b"]


@pytest.mark.parametrize("together", [True, False])
def test_a_transaction_and_a_unit_inside_a_unit_are_refused(held, together):
    def nested(_):
        for inner in (lambda: held.writer.submit(lambda _: None), lambda: held.writer.transaction().__enter__()):
            with pytest.raises(IllegalStateError, match="already inside"):
                inner()
        return "refused"

    with held.together():
        futures = [held.writer.submit(nested, key=n) for n in range(2 if together else 1)]
    assert [future.result(30) for future in futures] == ["refused"] * len(futures)


def test_a_unit_inside_a_block_is_refused(held):
    with held.writer.transaction(), pytest.raises(IllegalStateError, match="already inside"):
        held.writer.submit(lambda _: None)


def test_work_that_would_not_run_is_refused(shop, held):
    async def coroutine(_):
        pass

    with held.together():
        futures = [held.writer.submit(coroutine, key=1), held.put(2)]
    assert isinstance(futures[0].exception(30), IllegalStateError)
    futures[1].result(30)
    assert shop.both_have(2)


def test_a_writer_that_is_not_open_takes_no_units(shop):
    with pytest.raises(IllegalStateError, match="not open"):
        shop.writer().submit(lambda _: None)


def test_rows_are_refused_where_there_is_no_sql(shop, monkeypatch):
    writer = DualWriter("orders", kafka=SETTINGS, database=ZooKeeperDatabase("nowhere:2181", root="/orders"))
    monkeypatch.setattr(writer, "_require_open", lambda: None)
    with pytest.raises(
        IllegalStateError, match=r"database is ZooKeeper.*submit a function instead, which has tx\.multi"
    ):
        writer.submit(RowUnit(text("INSERT INTO orders (id) VALUES (1)")))
