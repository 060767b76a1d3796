"""An engine made from a URL notices a server that is gone; what the user has set stays."""

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url

from dualwrite.cli.options import commands
from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.access import LIVENESS, engine_of, liveness_of


def test_a_url_that_says_nothing_gets_all_of_it():
    assert liveness_of(make_url("postgresql+psycopg://db/x")) == LIVENESS


@pytest.mark.parametrize("name", LIVENESS)
def test_what_the_url_says_stays(name):
    found = liveness_of(make_url(f"postgresql+psycopg://db/x?{name}=7"))
    assert found == {key: value for key, value in LIVENESS.items() if key != name}


def test_a_service_file_may_say_it():
    assert liveness_of(make_url("postgresql+psycopg:///?service=shop")) == {}


def test_other_databases_have_no_such_settings():
    assert liveness_of(make_url("sqlite:///x.db")) == {}


@pytest.mark.parametrize(
    ("client", "wanted"), [("Rdict", "RocksDatabase"), ("KazooClient", "ZooKeeperDatabase"), ("Path", "SQLAlchemy")]
)
def test_the_client_of_another_database_is_refused_with_what_to_give(client, wanted):
    given = type(client, (), {})()
    with pytest.raises(ConfigurationError, match=f"{client} is not an engine .give a {wanted}"):
        engine_of(given)


@pytest.mark.parametrize("url", ["rocksdb:///there", "zookeeper://there"])
@pytest.mark.parametrize(("command", "words"), [("migrate", "has no tables"), ("batches", "has no batches")])
def test_a_database_without_tables_has_nothing_to_migrate_and_no_batches(url, command, words):
    done = CliRunner().invoke(commands, [command, "--url", url])
    assert done.exit_code == 2
    assert words in done.output
