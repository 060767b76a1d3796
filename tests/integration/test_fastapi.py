"""A block as a dependency of FastAPI, as docs/recipes.md shows it: an abort reaches the client."""

from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from harness.asgi import answer
from harness.orders import on_postgresql
from sqlalchemy import insert, text

from dualwrite import Transaction, TransactionAborted


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
