"""The pytest plugin: servers per session, topics and databases per test.

The library installs it; servers are imported and started only when a test asks for them.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Engine

    from dualwrite import DualWriter
    from dualwrite.testing.servers.databases import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedZooKeeper
    from dualwrite.testing.servers.kafka import EmbeddedKafka

PARTITIONS = 2


@pytest.fixture(scope="session")
def dualwrite_kafka() -> Iterator[EmbeddedKafka]:
    """A Kafka broker for the session: embedded, or the servers of ``DUALWRITE_TEST_KAFKA``."""
    from dualwrite.testing.servers.kafka import EmbeddedKafka  # noqa: PLC0415 - import only on demand

    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def dualwrite_postgres() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL server for the session: embedded, or the one of ``DUALWRITE_TEST_POSTGRES``."""
    from dualwrite.testing.servers.databases import EmbeddedPostgres  # noqa: PLC0415 - import only on demand

    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def dualwrite_zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """A ZooKeeper server for the session: embedded, or the ensemble of ``DUALWRITE_TEST_ZOOKEEPER``."""
    from dualwrite.testing.servers.databases import EmbeddedZooKeeper  # noqa: PLC0415 - import only on demand

    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture(scope="session")
def dualwrite_mariadb() -> Iterator[EmbeddedMariaDB]:
    """A MariaDB server for the session: embedded, or the one of ``DUALWRITE_TEST_MARIADB``."""
    from dualwrite.testing.servers.databases import EmbeddedMariaDB  # noqa: PLC0415 - import only on demand

    with EmbeddedMariaDB() as server:
        yield server


@pytest.fixture(scope="session")
def dualwrite_kafka_config(dualwrite_kafka: EmbeddedKafka) -> Mapping[str, str]:
    """The configuration for the broker, as a writer and confluent-kafka take it."""
    return dualwrite_kafka.client_config()


@pytest.fixture
def dualwrite_topic(dualwrite_kafka: EmbeddedKafka) -> Iterator[str]:
    """The name of a new topic with two partitions; deleted after the test."""
    topic = dualwrite_kafka.create_topic(f"dualwrite-{secrets.token_hex(6)}", PARTITIONS)
    yield topic
    dualwrite_kafka.delete_topic(topic)


@pytest.fixture
def dualwrite_database(dualwrite_postgres: EmbeddedPostgres) -> Iterator[str]:
    """The SQLAlchemy URL of a new, empty database; dropped after the test."""
    name = f"dualwrite_{secrets.token_hex(6)}"
    yield dualwrite_postgres.create_database(name)
    dualwrite_postgres.drop_database(name)


@pytest.fixture
def dualwrite_engine(dualwrite_database: str) -> Iterator[Engine]:
    """An engine for the new database, which has the library's tables; disposed of after the test."""
    from sqlalchemy import create_engine  # noqa: PLC0415 - import only on demand

    from dualwrite import migrations  # noqa: PLC0415 - import only on demand

    engine = create_engine(dualwrite_database)
    with engine.connect() as connection:
        migrations.upgrade(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def dualwrite_writer(dualwrite_kafka_config: Mapping[str, str], dualwrite_engine: Engine) -> Iterator[DualWriter]:
    """An open writer on the broker and the new database; closed after the test."""
    from dualwrite import DualWriter  # noqa: PLC0415 - import only on demand

    with DualWriter("dualwrite-test", kafka=dualwrite_kafka_config, database=dualwrite_engine) as writer:
        yield writer
