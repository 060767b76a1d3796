"""The example of docs/testing.md with testcontainers. There is no Docker here: embedded servers stand in for the containers.

What is held: that the calls are those of the installed testcontainers, that its addresses and URLs fit a writer, and that the
fixtures of the page are a writer's. Not held: the images.
"""

from unittest.mock import Mock

import pytest
from harness.page_examples import example
from sqlalchemy import make_url, text

from dualwrite.testing.checker import read_committed

pytest.importorskip("testcontainers", reason="testcontainers is not installed")

from testcontainers.community.kafka import KafkaContainer
from testcontainers.community.postgres import PostgresContainer


@pytest.fixture
def fixtures(monkeypatch, dualwrite_kafka, dualwrite_database):
    """The functions of the page's fixtures, with embedded servers in the place of started containers."""
    url = make_url(dualwrite_database)
    made = []

    def start_kafka(self, *_, **__):
        made.append(dict(self.env))
        return self

    def start_postgres(self, *_, **__):
        self._container = Mock()
        self.username, self.password, self.dbname = url.username, url.password, url.database
        return self

    monkeypatch.setattr("testcontainers.core.container.DockerClient", Mock())
    for kind, start in ((KafkaContainer, start_kafka), (PostgresContainer, start_postgres)):
        monkeypatch.setattr(kind, "start", start)
        monkeypatch.setattr(kind, "stop", lambda *_, **__: None)
    monkeypatch.setattr(PostgresContainer, "get_container_host_ip", lambda _: url.host)
    monkeypatch.setattr(PostgresContainer, "get_exposed_port", lambda *_: url.port)
    monkeypatch.setattr(
        KafkaContainer, "get_bootstrap_server", lambda _: dualwrite_kafka.client_config()["bootstrap.servers"]
    )
    names = {}
    exec(example("testing.md", "Testcontainers")[0], names)
    return {name: names[name].__wrapped__ for name in ("kafka", "engine", "writer")}, made


def test_the_fixtures_of_the_page_give_a_writer(fixtures, dualwrite_topic):
    found, made = fixtures
    kafka_steps = found["kafka"]()
    engine_steps = found["engine"]()
    kafka, engine = next(kafka_steps), next(engine_steps)
    assert engine.url.drivername == "postgresql+psycopg"
    writer_steps = found["writer"](kafka, engine)
    with next(writer_steps).transaction() as tx:
        tx.connection.execute(text("CREATE TABLE orders (id int)"))
        tx.produce(dualwrite_topic, "1")
    for steps in (writer_steps, engine_steps, kafka_steps):
        assert next(steps, None) is None
    assert [message.value for message in read_committed(kafka, dualwrite_topic)] == [b"1"]
    assert made[0]["KAFKA_TRANSACTION_MAX_TIMEOUT_MS"] == "2147483647"
