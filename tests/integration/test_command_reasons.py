"""Commands with ``--reason``: the history says who did what and why, and how it ended, also if the process was killed."""

import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from harness.checker import Case
from sqlalchemy import text

from dualwrite.cli.options import commands
from dualwrite.failpoints import ENVIRONMENT
from dualwrite.protocol.blocking import Deed, Ended
from dualwrite.stores.sql.operators import History

WHY = "its host is gone, ticket 4711"

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def dualwrite(url):
    """Runs a command with a reason, in this process."""

    def run(*command):
        return CliRunner().invoke(commands, [*command, "--url", url, "--reason", WHY])

    return run


@pytest.fixture
def killed(url):
    """Runs a command with a reason in a process of its own, which is killed at a point."""

    def run(point, *command):
        arguments = ["dualwrite", *command, "--url", url, "--reason", WHY]
        program = f"import sys; sys.argv = {arguments!r}; from dualwrite.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, ENVIRONMENT: point}, capture_output=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    return run


@pytest.fixture
def at(kafka):
    return "--bootstrap-server", kafka["bootstrap.servers"]


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    return Case(tmp_path, kafka, url, dualwrite_topic)


def told(engine):
    """The history, oldest first."""
    return [
        (one.intent.deed, one.intent.subject, one.outcome, one.result)
        for one in reversed(History(engine).last("", limit=9))
    ]


def put_aside(engine, topic, *values):
    with engine.begin() as connection:
        for number, value in enumerate(values, start=1):
            connection.execute(
                text(
                    "INSERT INTO dualwrite_outbox_aside (seq, writer, transactional_id, topic, value, reason) "
                    "VALUES (:number, 'case', 'case', :topic, :value, 'too large')"
                ),
                {"number": number, "topic": topic, "value": value.encode()},
            )


def count(engine, table):
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT count(*) FROM {table}"))


def test_each_command_stores_its_reason_and_what_it_has_done(dualwrite, at, case, engine):
    case.run(failpoint="write.decided:2", killed=True)
    refused = dualwrite("terminate", "case", *at)
    assert refused.exit_code == 3, refused.output
    given_up = dualwrite("terminate", "case", "--lose-decided", *at)
    assert given_up.exit_code == 4, given_up.output
    assert dualwrite("acknowledge", "case", "--all").exit_code == 0
    assert dualwrite("recover", "case", "--dry-run", *at).exit_code == 0
    assert dualwrite("recover", "--prefix", "ca", *at).exit_code == 0
    put_aside(engine, case.topic, "one", "two")
    assert dualwrite("outbox", "replay", "case", "1").exit_code == 0
    assert dualwrite("outbox", "drop", "case", "--all", "--yes").exit_code == 0
    assert told(engine) == [
        (Deed.TERMINATE, "case", Ended.REFUSED, told(engine)[0][3]),
        (Deed.TERMINATE, "case", Ended.DONE, "1 transaction aborted, 1 id settled, 1 LOST"),
        (Deed.ACKNOWLEDGE, "case", Ended.DONE, "1 acknowledged"),
        (Deed.SETTLE, "ca*", Ended.DONE, "0 ids settled, 0 rolled forward"),
        (Deed.REPLAY, "case", Ended.DONE, "1 message put back"),
        (Deed.DROP, "case", Ended.DONE, "1 message deleted"),
    ]
    assert "has decided the open transaction" in told(engine)[0][3]
    last = History(engine).last("", limit=1)[0].intent
    assert (last.reason, last.detail) == (WHY, "all messages that were moved aside")
    assert last.actor
    assert last.program.startswith(f"{last.actor}@")


@pytest.mark.parametrize("point", ["action.intended", "settle.before_commit", "settle.marked", "action.done"])
def test_a_command_that_is_killed_leaves_an_intent_whose_end_is_not_known_and_can_be_repeated(
    dualwrite, killed, at, case, engine, point
):
    case.run(failpoint="write.decided:2", killed=True)
    killed(point, "recover", "case", *at)
    assert told(engine) == [(Deed.SETTLE, "case", None, None)]
    assert dualwrite("recover", "case", *at).exit_code == 0
    [first, (deed, _, outcome, _)] = told(engine)
    assert first == (Deed.SETTLE, "case", None, None), "the second one does not speak for the first"
    assert (deed, outcome) == (Deed.SETTLE, Ended.DONE)
    assert case.verify() == {"w1-0", "w1-1"}


@pytest.mark.parametrize(("point", "left"), [("action.intended", 2), ("action.done", 0)])
def test_messages_are_there_until_they_are_dropped_and_the_history_claims_neither(
    dualwrite, killed, case, engine, point, left
):
    case.run()
    put_aside(engine, case.topic, "one", "two")
    killed(point, "outbox", "drop", "case", "--all", "--yes")
    assert (count(engine, "dualwrite_outbox_aside"), told(engine)) == (left, [(Deed.DROP, "case", None, None)])


def test_a_reason_that_cannot_be_stored_lets_nothing_be_done(dualwrite, case, engine, at):
    case.run(failpoint="write.decided:2", killed=True)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE dualwrite_action RENAME TO away"))
    refused = dualwrite("recover", "case", *at)
    assert refused.exit_code == 1
    assert "dualwrite migrate" in refused.output
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO dualwrite_action"))
    assert count(engine, "kafka_transaction_state WHERE incarnation > 1") == 0, "nothing was claimed"
