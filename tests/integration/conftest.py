"""What the integration tests share: a migrated database and an engine to look with."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine

from dualwrite.migrations import upgrade

METADATA = MetaData()
ORDERS = Table("orders", METADATA, Column("id", Integer, primary_key=True), Column("note", Text))


@pytest.fixture
def kafka(dualwrite_kafka):
    return dualwrite_kafka.client_config()


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request, tmp_path):
    """A fresh, migrated database of each kind."""
    if request.param == "postgresql":
        found = request.getfixturevalue("dualwrite_database")
    else:
        found = f"sqlite:///{tmp_path / 'rows.db'}"
    migrated = create_engine(found)
    with migrated.connect() as connection:
        upgrade(connection)
    migrated.dispose()
    return found


@pytest.fixture
def engine(url):
    engine = create_engine(url)
    METADATA.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def orders():
    return ORDERS
