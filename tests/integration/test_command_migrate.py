"""The commands ``migrate`` and ``acknowledge``, and the command without its libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import create_engine, inspect

from dualwrite.cli.options import COMMANDS, commands
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.stores.sql.short_transactions import check_schema
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import OWN_TABLES


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(commands, list(arguments), env=environment)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'test.db'}"


def test_it_makes_the_tables_and_says_so(url: str) -> None:
    first = run("migrate", "--url", url)
    assert (first.exit_code, first.output) == (0, "The tables are now at 0008; they were at base.\n")
    engine = create_engine(url)
    check_schema(engine)
    second = run("migrate", DUALWRITE_DATABASE_URL=url)
    assert (second.exit_code, second.output) == (0, "The tables are already at 0008.\n")
    down = run("migrate", "--url", url, "--downgrade", "--revision", "base")
    assert (down.exit_code, down.output) == (0, "The tables are now at base; they were at 0008.\n")
    assert inspect(engine).get_table_names() == ["dualwrite_version"]
    engine.dispose()


@pytest.mark.postgresql
def test_it_makes_the_schema_too(dualwrite_database: str) -> None:
    result = run("migrate", "--url", dualwrite_database, "--schema", "Side")
    assert result.exit_code == 0, result.output
    engine = create_engine(dualwrite_database)
    check_schema(engine, "Side")
    assert set(inspect(engine).get_table_names(schema="Side")) == OWN_TABLES
    engine.dispose()


def test_it_prints_a_script_without_connecting() -> None:
    url = "postgresql+psycopg://me:s3cret@nowhere.invalid/x"
    up = run("migrate", "--url", url, "--schema", "Side", "--sql")
    assert up.exit_code == 0
    assert up.output.startswith("BEGIN;")
    assert 'CREATE TABLE "Side".kafka_transaction_state' in up.output
    assert run("migrate", "--url", url, "--sql", "--revision", "0008:head").output.count("CREATE") == 0
    down = run("migrate", "--url", url, "--sql", "--downgrade", "--revision", "0008:base")
    assert down.output.count("DROP TABLE") == 11
    assert "s3cret" not in up.output + down.output


@pytest.mark.parametrize("url", ["postgresql+psycopg://h/x", "mysql+pymysql://h/x", "sqlite:///x"])
def test_names_stand_in_the_script_as_they_are(url: str) -> None:
    """Only a driver that looks for values in a statement wants a % doubled."""
    printed = run("migrate", "--url", url, "--schema", "a%b:c", "--sql").output
    assert "a%b:c" in printed
    assert "%%" not in printed


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--downgrade"], 2, "needs a --revision"),
        (["--downgrade", "--sql", "--revision", "base"], 2, "FROM:TO"),
        (["--revision", "0008:head"], 2, "for --sql"),
        (["--revision", "0815"], 1, "'0815'"),
        (["--url", "nonsense"], 1, "cannot be used"),
        (["--url", "nonsense+driver://me:s3cret@h/x"], 1, "cannot be used"),
        (["--url", "mysql+mysqldb://me:s3cret@h/x"], 1, "MySQLdb is not installed"),
        (["--url", "postgresql+psycopg://me:a@b:s3cret@h/x"], 1, "cannot be used"),
        (["--sql", "--url", "postgresql+psycopg://me:a@b:s3cret@h/x"], 1, "cannot be used"),
        (["--sql", "--url", "nosuch://me:s3cret@h/x"], 1, "cannot be used"),
        (["--url", "postgresql+psycopg://me:s3cret@127.0.0.1:1/x"], 5, "refused"),
        (["--url", "sqlite:////nowhere/at/all.db"], 1, "unable to open"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(url: str, arguments: list[str], code: int, words: str) -> None:
    result = run("migrate", "--url", url, *arguments)
    assert (result.exit_code, words in result.output, "s3cret" in result.output) == (code, True, False), result.output
    assert "Traceback" not in result.output


def test_a_loss_is_acknowledged(url: str) -> None:
    run("migrate", "--url", url)
    store = SqlStateStore(url)
    states = [PreparedTxnState(1, 0, 1, (FirstOffset("t", 0, number),)) for number in range(3)]
    for name in ("orders", "orders#1"):
        row = store.claim([name], owner="me", cluster_id="c")[0]
        for state in states:
            store.record_outcomes([(type(row)(**{**vars(row), "prepared": state}), Outcome.LOST, "gone")])
    one = run("acknowledge", "orders", str(states[0]), "--url", url)
    assert (one.exit_code, one.output) == (0, "orders: 1 acknowledged\n")
    again = run("acknowledge", "orders", str(states[0]), "--url", url)
    assert (again.exit_code, again.output) == (1, "orders: 0 acknowledged\n")
    assert run("acknowledge", "orders", "--all", "--url", url).output == "orders: 2 acknowledged\n"
    assert {incident.transactional_id for incident in store.incidents()} == {"orders#1"}
    assert run("acknowledge", "orders", "--url", url).exit_code == 2
    assert run("acknowledge", "orders", "nonsense", "--url", url).exit_code == 1
    store.close()


def test_the_help_lists_every_command_and_loads_none() -> None:
    script = (
        "import sys\nfrom dualwrite.cli import main\nsys.argv = ['dualwrite', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {'sqlalchemy', 'alembic', 'confluent_kafka', 'kafka', 'rich'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: dualwrite {name}")


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run("frobnicate").exit_code == 2


def test_without_its_libraries_it_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in {'click', 'rich'}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from importlib import util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in {'click', 'rich'} else real(name, *rest)\n"
        "from dualwrite.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dualwrite: the command needs click and rich: pip install 'dualwrite[cli]'\n"
