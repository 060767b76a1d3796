import pytest
from harness.engines import taking
from harness.served import TOPIC

from .members import Member


@pytest.fixture
def member(shop, monkeypatch):
    made = []

    def make(handler, **options):
        made.append(Member(shop, monkeypatch, handler, **options))
        return made[-1]

    yield make
    for one in made:
        one.writer.close()


@pytest.fixture
def put(shop):
    def handler(tx, messages):
        for message in messages:
            number = message.value().decode()
            tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
            tx.produce(TOPIC, number, partition=0)

    return handler


@pytest.fixture
def produced_letters(monkeypatch):
    """The value, key and headers of the messages set aside."""
    found = []

    def note(message):
        if message.headers:
            found.append((message.value, message.key, message.headers))

    taking(monkeypatch, note)
    return found
