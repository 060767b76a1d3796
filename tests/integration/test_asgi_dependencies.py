"""The dependencies of ``dualwrite.frameworks`` for FastAPI and Litestar: what the client reads is what both sides hold."""

import asyncio
import sys
import threading
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Annotated, Any

import pytest
from harness.asgi import ask
from harness.orders import Order, on_postgresql
from harness.page_examples import example
from harness.patience import PATIENCE_S
from sqlalchemy import event, insert, text

from dualwrite import (
    AsyncDualWriter,
    AsyncTransaction,
    CompletionPending,
    DualWriter,
    Transaction,
    TransactionAborted,
    Unavailable,
    WriterLimits,
)
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.native.producer import NativeInstance
from dualwrite.protocol.findings import standby
from dualwrite.testing import AsyncInMemoryWriter
from dualwrite.testing.checker import read_committed
from dualwrite.writing.lane import Lane

pytestmark = on_postgresql

ERRORS = {
    "aborted": TransactionAborted("x", retryable=True),
    "unavailable": Unavailable("y"),
    "standby": standby(is_standby=True).as_error(),
}


@pytest.fixture
def deferred(engine, orders):
    """A table with a reference that is checked at COMMIT, so that an abort comes after the path function."""
    with engine.begin() as made:
        made.execute(text("CREATE TABLE notes (order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)"))
    return text("INSERT INTO notes VALUES (:noted)")


def fastapi_app(writer, topic, orders, deferred, *, asynchronous, handlers=True):
    pytest.importorskip("fastapi", reason="the extra 'fastapi' is not installed")
    from fastapi import FastAPI

    from dualwrite.frameworks import fastapi

    app = FastAPI(lifespan=fastapi.opened(writer))
    if handlers:
        fastapi.answer_errors(app)
    if asynchronous:

        @app.post("/orders/{number}/{noted}")
        async def place(number: int, noted: int, tx: Annotated[AsyncTransaction, fastapi.in_transaction(writer)]):
            await tx.connection.execute(insert(orders).values(id=number))
            await tx.connection.execute(deferred, {"noted": noted})
            await tx.produce(topic, value=str(number))
            return number
    else:

        @app.post("/orders/{number}/{noted}")
        def place(number: int, noted: int, tx: Annotated[Transaction, fastapi.in_transaction(writer)]):
            tx.connection.execute(insert(orders).values(id=number))
            tx.connection.execute(deferred, {"noted": noted})
            tx.produce(topic, value=str(number))
            return number

    @app.post("/raise/{kind}")
    async def fail(kind: str):
        raise ERRORS[kind]

    return app


def litestar_app(writer, topic, orders, deferred, *, asynchronous):
    pytest.importorskip("litestar", reason="the extra 'litestar' is not installed")
    from litestar import Litestar, post
    from litestar.di import NamedDependency
    from litestar.params import FromPath

    from dualwrite.frameworks import litestar

    if asynchronous:

        @post("/orders/{number:int}/{noted:int}")
        async def place(number: FromPath[int], noted: FromPath[int], tx: NamedDependency[AsyncTransaction]) -> int:
            await tx.connection.execute(insert(orders).values(id=number))
            await tx.connection.execute(deferred, {"noted": noted})
            await tx.produce(topic, value=str(number))
            return number
    else:

        @post("/orders/{number:int}/{noted:int}", sync_to_thread=True)
        def place(number: FromPath[int], noted: FromPath[int], tx: NamedDependency[Transaction]) -> int:
            tx.connection.execute(insert(orders).values(id=number))
            tx.connection.execute(deferred, {"noted": noted})
            tx.produce(topic, value=str(number))
            return number

    @post("/raise/{kind:str}")
    async def fail(kind: FromPath[str]) -> None:
        raise ERRORS[kind]

    return Litestar(
        [place, fail],
        dependencies={"tx": litestar.in_transaction(writer)},
        lifespan=[litestar.opened(writer)],
        exception_handlers=dict.fromkeys([Unavailable, TransactionAborted, ConfigurationError], litestar.answer_error),
        openapi_config=None,
    )


@asynccontextmanager
async def served(app):
    """The application between its startup and its shutdown."""
    heard, said = asyncio.Queue(), asyncio.Queue()
    running = asyncio.create_task(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, heard.get, said.put)
    )
    await heard.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    yield app
    await heard.put({"type": "lifespan.shutdown"})
    assert (await said.get())["type"] == "lifespan.shutdown.complete"
    await running


BUILDERS = [fastapi_app, litestar_app]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["task", "thread"])
@pytest.mark.parametrize("build", BUILDERS)
def test_the_client_reads_of_an_abort_and_both_sides_hold_the_rest(
    url, kafka, engine, dualwrite_topic, orders, deferred, both, build, asynchronous
):
    kind = AsyncDualWriter if asynchronous else DualWriter
    writer = kind("shop", kafka=kafka, database=url if asynchronous else engine)

    async def main():
        async with served(build(writer, dualwrite_topic, orders, deferred, asynchronous=asynchronous)) as app:
            assert not writer.health().unreported_losses
            return [(await ask(app, f"/orders/{number}/{noted}"))[0] for number, noted in [(1, 1), (2, 3), (3, 3)]]

    first, aborted, third = asyncio.run(main())
    assert (first[0] // 100, aborted, third[0] // 100) == (2, [500], 2)
    assert both() == ([1, 3], [1, 3])
    assert "closed" in repr(writer)


@pytest.mark.parametrize("build", BUILDERS)
def test_what_can_be_sent_again_is_answered_with_503(url, kafka, dualwrite_topic, orders, deferred, build):
    async def main():
        writer = AsyncDualWriter("shop", kafka=kafka, database=url)
        async with served(build(writer, dualwrite_topic, orders, deferred, asynchronous=True)) as app:
            return [(await ask(app, f"/raise/{kind}"))[0] for kind in ERRORS]

    assert asyncio.run(main()) == [[503]] * 3


@pytest.mark.parametrize("build", BUILDERS)
def test_a_completion_that_is_pending_is_a_success(
    url, kafka, dualwrite_topic, orders, deferred, both, build, monkeypatch
):
    def fail(self, *_, **__):
        raise CompletionPending("Kafka does not answer", transactional_id=self.transactional_id)

    async def main():
        writer = AsyncDualWriter("shop", kafka=kafka, database=url)
        async with served(build(writer, dualwrite_topic, orders, deferred, asynchronous=True)) as app:
            with monkeypatch.context() as patch:
                patch.setattr(Lane, "complete", fail)
                return (await ask(app, "/orders/1/1"))[0]

    assert asyncio.run(main())[0] // 100 == 2
    assert both() == ([1], [1])


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.usefixtures("kafka")
def test_an_application_starts_and_is_tested_without_servers(url, dualwrite_topic, orders, build):
    async def main():
        async with AsyncInMemoryWriter("shop") as database:  # a database in memory, with the application's tables
            async with database.engine.begin() as made:
                await made.run_sync(orders.metadata.create_all)
            writer = AsyncInMemoryWriter("shop", database=database.engine)
            app = build(writer, dualwrite_topic, orders, text("SELECT :noted"), asynchronous=True)
            async with served(app):
                writer.fail_next("produce", TransactionAborted, times=1)
                statuses = [(await ask(app, f"/orders/{number}/0"))[0][0] // 100 for number in (1, 1, 2)]
            return statuses, [message.value for message in writer.messages]

    assert asyncio.run(main()) == ([5, 2, 2], [b"1", b"2"])


@pytest.mark.parametrize(("heading", "package"), [("FastAPI and uvicorn", "fastapi"), ("Litestar", "litestar")])
def test_the_code_of_the_page(url, engine, kafka, dualwrite_topic, heading, package, monkeypatch):
    pytest.importorskip(package, reason=f"the extra {package!r} is not installed")
    (code,) = example("frameworks.md", heading)
    page = ModuleType("page")  # Litestar looks in the handler's module for what its annotations name
    monkeypatch.setitem(sys.modules, "page", page)
    vars(page).update(kafka=kafka, url=url, Order=Order)
    exec(code.replace('"orders"', f'"{dualwrite_topic}"'), vars(page))

    async def main():
        async with served(page.app) as app:
            return [(await ask(app, f"/orders/{number}"))[0][0] // 100 for number in (1, 2)]

    assert asyncio.run(main()) == [2, 2]
    with engine.connect() as made:
        assert list(made.scalars(text("SELECT id FROM orders ORDER BY id"))) == [1, 2]
    assert [message.value for message in read_committed(kafka, dualwrite_topic)] == [b"placed"] * 2


@pytest.mark.usefixtures("url")
def test_an_older_fastapi_is_refused_by_its_name(monkeypatch):
    pytest.importorskip("fastapi", reason="the extra 'fastapi' is not installed")
    from dualwrite.frameworks import fastapi

    def depends(dependency: Any = None, *, use_cache: bool = True) -> None: ...

    monkeypatch.setattr(fastapi, "Depends", depends)
    with pytest.raises(ConfigurationError, match=r"FastAPI 0.121.*dualwrite\[fastapi\]"):
        fastapi.in_transaction(AsyncInMemoryWriter())


@pytest.mark.parametrize("held", ["statement", "message"])
def test_a_function_that_outlives_its_cancelled_request_writes_into_no_other_block(  # noqa: C901 - two held back, one test
    url, kafka, engine, engine_of, dualwrite_topic, orders, both, held, monkeypatch
):
    """A server that stops cancels the request's task. Its function runs on in a thread, here about to send something."""
    pytest.importorskip("fastapi", reason="the extra 'fastapi' is not installed")
    from fastapi import FastAPI

    from dualwrite.frameworks import fastapi

    shared = engine_of(url, pool_size=2, max_overflow=0, pool_use_lifo=True)
    writer = DualWriter("shop", kafka=kafka, database=shared, limits=WriterLimits(max_lanes=1))
    app = FastAPI(lifespan=fastapi.opened(writer))
    sending, goes_on, sent = threading.Event(), threading.Event(), threading.Event()

    def hold():
        sending.set()
        assert goes_on.wait(PATIENCE_S)

    @event.listens_for(shared, "before_cursor_execute")
    def hold_statement(_connection, _cursor, statement, parameters, *_):
        if held == "statement" and "INSERT INTO orders" in statement and parameters["id"] == 1:
            hold()

    def send(self, message):
        if held == "message" and message.value == b"1":
            hold()
        sent_by_engine(self, message)

    sent_by_engine = NativeInstance.send
    monkeypatch.setattr(NativeInstance, "send", send)

    @app.post("/orders/{number}")
    def place(number: int, tx: Annotated[Transaction, fastapi.in_transaction(writer)]):
        tx.connection.execute(text("SELECT 1"))
        try:
            if held == "statement":
                tx.connection.execute(insert(orders).values(id=number))
            tx.produce(dualwrite_topic, value=str(number))
            if held == "message":
                tx.connection.execute(insert(orders).values(id=number))
        finally:
            if number == 1:
                sent.set()
        goes_on.set()
        assert sent.wait(PATIENCE_S)

    async def main():
        async with served(app):
            first = asyncio.create_task(ask(app, "/orders/1"))
            assert await asyncio.to_thread(sending.wait, PATIENCE_S)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            return (await ask(app, "/orders/2"))[0]

    assert asyncio.run(main()) == [200]
    assert both() == ([2], [2])
