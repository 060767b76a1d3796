"""A writer on SQLite and a simulated Kafka, and sessions that are bound to it."""

import pytest
from harness.bound import Order
from harness.served import TOPIC
from sqlalchemy.orm import sessionmaker


@pytest.fixture
def writer(shop):
    with shop.writer() as writer:
        yield writer


@pytest.fixture
def factory(shop):
    return sessionmaker(shop.engine)


@pytest.fixture
def bound(writer, factory):
    return writer.bind(factory)


@pytest.fixture
def put(bound):
    """Adds a row and a message of this number."""

    def put(session, number):
        session.add(Order(id=number))
        bound.produce(session, TOPIC, str(number), partition=0)

    return put
