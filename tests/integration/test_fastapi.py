"""A block as a dependency of FastAPI, as docs/recipes.md shows it: an abort reaches the client."""

import asyncio
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from harness.orders import on_postgresql
from sqlalchemy import insert, text

from dualwrite import Transaction, TransactionAborted


def answer(app, path):
    """The statuses that a client of ``POST path`` reads, and the error that the server is left with."""
    return asyncio.run(ask(app, path))


async def ask(app, path):
    """See :func:`answer`; in the event loop of the caller."""
    statuses = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    try:
        await app(scope, receive, send)
    except TransactionAborted as error:
        return statuses, error
    return statuses, None


@pytest.fixture
def serve(writer, engine, dualwrite_topic, orders):
    """Makes the application. It writes an order and a note on another one: a reference that the end of the block checks."""
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE notes (order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
        )

    def serve(**scope):
        app = FastAPI()

        def transaction():
            with writer.transaction() as tx:
                yield tx

        @app.post("/orders/{number}/{noted}")
        def place_order(number: int, noted: int, tx: Annotated[Transaction, Depends(transaction, **scope)]):
            tx.connection.execute(insert(orders).values(id=number))
            tx.connection.execute(text("INSERT INTO notes VALUES (:noted)"), {"noted": noted})
            tx.produce(dualwrite_topic, value=str(number))

        return app

    return serve


@on_postgresql
@pytest.mark.parametrize(("scope", "status"), [({"scope": "function"}, 500), ({}, 200)], ids=["function", "default"])
def test_the_client_reads_of_an_abort_only_if_the_block_ends_before_the_response(serve, both, scope, status):
    app = serve(**scope)
    assert answer(app, "/orders/1/1") == ([200], None)
    statuses, error = answer(app, "/orders/2/3")
    assert (statuses, type(error)) == ([status], TransactionAborted)
    assert answer(app, "/orders/3/3") == ([200], None)
    assert both() == ([1, 3], [1, 3])
