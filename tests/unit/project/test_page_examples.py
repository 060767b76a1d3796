"""Examples of the pages that need no server: they run as they stand, in memory or on a simulated Kafka."""

import asyncio
import textwrap
from types import SimpleNamespace
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI, Response
from harness.asgi import answer
from harness.page_examples import example, run_example
from harness.recorded import Recorded
from harness.served import SETTINGS, TOPIC
from sqlalchemy import create_engine, insert, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from dualwrite import AsyncDualWriter, Transaction, Unavailable
from dualwrite.state import KeyValueStore
from dualwrite.testing import InMemoryWriter


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(default="tea")

    def event(self):
        return f"{self.id}: {self.item}"


@pytest.fixture
def memory():
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    with InMemoryWriter(database=engine) as writer:
        yield writer
    engine.dispose()


@pytest.fixture
def async_url(shop):
    pytest.importorskip("aiosqlite")
    Base.metadata.create_all(shop.engine)
    return shop.engine.url.set(drivername="sqlite+aiosqlite").render_as_string(hide_password=False)


def items(engine):
    with Session(engine) as session:
        return list(session.scalars(select(Order.item)))


def messages(shop):
    return shop.kafka.visible(0) + shop.kafka.visible(1)


def test_a_block_of_an_event_loop(shop, async_url):
    [code] = example("asyncio.md", "asyncio")
    shown = "postgresql+psycopg://app@localhost/shop"
    assert shown in code
    names = run_example(code.replace(shown, async_url), TOPIC)

    async def main():
        await names["serve"](SETTINGS, SimpleNamespace(Order=Order))
        await names["engine"].dispose()

    asyncio.run(main())
    assert items(shop.engine) == ["tea"]
    assert messages(shop) == ["placed"]


def test_a_unit_of_an_event_loop(shop, async_url):
    [_, code] = example("group-commit.md", "Group commit")
    names = run_example(f"async def page(writer):\n{textwrap.indent(code, '    ')}", TOPIC, text=text)

    async def main():
        engine = create_async_engine(async_url)
        async with AsyncDualWriter("orders", kafka=SETTINGS, database=engine) as writer:
            await names["page"](writer)
        await engine.dispose()

    asyncio.run(main())
    assert items(shop.engine) == messages(shop) == ["tea"]


def test_work_that_runs_again(memory):
    [code] = example("recipes.md", "Run it again")
    memory.fail_next("prepare", Unavailable)
    names = run_example(code, TOPIC, writer=memory, Order=Order)
    assert names["order_id"] == 1
    assert items(memory.engine) == ["tea"]
    assert [message.value for message in memory.messages] == [b"1: tea"]
    assert len(memory.transactions) == 2


def test_a_block_as_a_dependency_of_fastapi(memory):
    [code] = example("recipes.md", "Threads")
    app = FastAPI()
    given = {"Annotated": Annotated, "Depends": Depends, "Transaction": Transaction}
    run_example(code, TOPIC, app=app, writer=memory, insert=insert, orders=Order.__table__, **given)
    assert answer(app, "/orders?item=milk") == ([200], None)
    assert items(memory.engine) == ["milk"]
    assert [message.value for message in memory.messages] == [b"milk"]


def test_a_probe_of_readiness():
    [code] = example("telemetry.md", "Is the writer ready?")
    writer = InMemoryWriter()
    ready = run_example(code, TOPIC, page_topic="/ready", writer=writer)["ready"]
    before, after = Response(), Response()
    assert ready(before)
    with writer:
        assert ready(after) == []
    assert (before.status_code, after.status_code) == (503, 200)


def test_a_trace_that_a_consumer_continues(shop):
    [code] = example("telemetry.md", "Through the topic")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = [("traceparent", f"00-{trace_id}-b7ad6b7169203331-01".encode())]
    message = SimpleNamespace(headers=lambda: headers, value=lambda: "bill")
    recorded = Recorded()
    with shop.writer(telemetry=recorded.telemetry) as writer:
        run_example(code, TOPIC, page_topic="bills", writer=writer, message=message)
    [block] = recorded.named("dual_write")
    assert f"{block.context.trace_id:032x}" == trace_id
    recorded.close()
    assert messages(shop) == ["bill"]


def test_a_state_store_and_its_reader(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")
    monkeypatch.chdir(tmp_path)
    [writes] = example("state-stores.md", "A store")
    [reads] = example("state-stores.md", "Reads by other threads")
    run_example(writes, TOPIC, changelog_offset=7)
    with KeyValueStore("state/counts") as store:
        run_example(reads, TOPIC, store=store)
    assert capsys.readouterr().out.splitlines() == ["{b'UA': b'1'}", "b'1' at offset 7", "1 at offset 7"]
