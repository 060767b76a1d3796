"""Fixtures of the integration tests: a migrated database and an engine to look with."""

import asyncio
import shutil
from contextlib import closing

import pytest
from click.testing import CliRunner
from harness.databases import prepare, through_mysqlclient
from harness.orders import Base, Order
from kafka.admin import KafkaAdminClient
from sqlalchemy import create_engine, make_url, select, text, update

from dualwrite import DualWriter, failpoints
from dualwrite.asyncio.writer import AsyncDualWriter
from dualwrite.cli.options import commands
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing.checker import read_committed


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.thorough)])
def url(request, tmp_path):
    """A fresh, migrated database of each kind."""
    if request.param == "postgresql":
        return request.getfixturevalue("migrated_database")
    if request.param.startswith("mariadb"):
        found = request.getfixturevalue("migrated_mariadb")
        return through_mysqlclient(found) if "mysqlclient" in request.param else found
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
        RocksDatabase(tmp_path / "rocks").close()
        return f"rocksdb://{tmp_path / 'rocks'}"
    found = f"sqlite:///{tmp_path / 'rows.db'}"
    prepare("sqlite", found, own_tables=False).dispose()
    return found


@pytest.fixture
def task_url(request, url):
    """The database's URL for tasks, which wait for each other longer; with the driver that a test is parametrized with."""
    if (driver := getattr(request, "param", None)) is not None:
        pytest.importorskip(driver, reason=f"the extra {driver!r} is not installed")
        return make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    return f"{url}?timeout=60" if url.startswith("sqlite") else url  # it lets writers wait for each other in no order


@pytest.fixture
def engine(url):
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def lowered(mortal_kafka):
    """Sets the cluster's ``transaction.version``; it is 2 again after the test."""
    with closing(KafkaAdminClient(bootstrap_servers=mortal_kafka.bootstrap_servers)) as admin:

        def set_to(version):
            admin.update_features({"transaction.version": ("SAFE_DOWNGRADE" if version < 2 else "UPGRADE", version)})

        yield set_to
        set_to(2)


@pytest.fixture
def orders():
    return Order.__table__


@pytest.fixture
def writer(kafka, engine):
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        yield writer


@pytest.fixture
def copied(request, url, engine, writer, engine_of, dualwrite_postgres):
    """An engine of a whole copy of the database, taken once the writer is open: the library's rows are in it."""
    if engine.dialect.name == "sqlite":
        target = f"{make_url(url).database}.copy"
        engine.dispose()
        shutil.copyfile(make_url(url).database, target)
        yield engine_of(f"sqlite:///{target}")
        return
    engine.dispose()
    name = f"{make_url(url).database}_copy"
    admin = engine_of(make_url(url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        source = make_url(url).database
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": source}
        )
        connection.execute(text(f'CREATE DATABASE "{name}" TEMPLATE "{source}"'))
    copy = engine_of(make_url(url).set(database=name))
    yield copy
    copy.dispose()
    dualwrite_postgres.drop_database(name)


@pytest.fixture
def backup(url, engine, tmp_path):
    """Takes a copy of the database's content; what it returns brings that back."""

    state = declare_tables(None).state

    def take():
        if engine.dialect.name == "sqlite":
            engine.dispose()
            file, copy = tmp_path / "rows.db", tmp_path / "copy.db"
            shutil.copy(file, copy)

            def restore():
                engine.dispose()
                shutil.copy(copy, file)

            return restore
        with engine.connect() as connection:
            rows = connection.execute(select(state)).mappings().all()

        def restore_rows():
            with engine.begin() as connection:
                for row in rows:
                    connection.execute(
                        update(state).where(state.c.transactional_id == row["transactional_id"]).values(**row)
                    )

        return restore_rows

    return take


@pytest.fixture
def both(engine, orders, kafka, dualwrite_topic):
    """Reads both sides once no transaction is open: the ids of the rows, and the messages as numbers, sorted."""

    def read():
        messages = sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))
        with engine.connect() as connection:
            return sorted(connection.execute(select(orders.c.id)).scalars()), messages

    return read


@pytest.fixture(autouse=True)
def disarm():
    yield
    failpoints.arm("")


@pytest.fixture
def dualwrite(kafka):
    """Runs a command, in this process."""

    def run(*command):
        return CliRunner().invoke(commands, [*command, "--bootstrap-server", kafka["bootstrap.servers"]])

    return run


@pytest.fixture
def visible(kafka, dualwrite_topic):
    return lambda: [record.value for record in read_committed(kafka, dualwrite_topic)]


@pytest.fixture
def in_writer(kafka, task_url, engine):
    """Runs a coroutine function with an open writer."""

    def run(work, **options):
        async def main():
            async with AsyncDualWriter("orders", **{"kafka": kafka, "database": task_url, **options}) as writer:
                return await work(writer)

        return asyncio.run(main())

    return run
