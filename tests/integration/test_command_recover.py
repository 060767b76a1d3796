"""``dualwrite status``, ``recover`` and ``acknowledge``, as an operator and as a script runs them."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from harness.checker import Case
from harness.moved_clock import LIBRARY, needs_faketime
from harness.orders import write
from harness.patience import PATIENCE_S
from sqlalchemy import make_url, text

from dualwrite import (
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.cli.options import commands
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


def arguments_of(url, kafka, command):
    servers = ["--bootstrap-server", kafka["bootstrap.servers"]] if command[0] != "acknowledge" else []
    return [*command, "--url", url, *servers]


@pytest.fixture
def dualwrite(url, kafka):
    """Runs a command, in this process."""

    def run(*command):
        return CliRunner().invoke(commands, arguments_of(url, kafka, command))

    return run


@pytest.fixture
def script(url):
    """Runs a command as a shell does."""

    def run(kafka, *command, **environment):
        return subprocess.run(
            [sys.executable, "-c", "from dualwrite.cli import main; main()", *arguments_of(url, kafka, command)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run


@pytest.fixture
def left(tmp_path, kafka, url, dualwrite_topic):
    """An id whose owner was killed right after the database's commit."""
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.decided:2", killed=True)
    return case


def test_status_shows_what_is_left_and_changes_nothing(dualwrite, left):
    table = dualwrite("status")
    assert table.exit_code == 3, table.stderr
    assert "case" in table.stdout
    assert "commit: the database has decided" in table.stdout
    document = json.loads(dualwrite("status", "--json").stdout)
    (item,) = document["ids"]
    assert item["needs_recovery"]
    assert item["kafka"] == "Ongoing"
    assert item["row"] == "decided"
    assert 0 <= item["open_for_s"] <= document["longest_open_s"]
    assert "1 to recover, 0 losses not acknowledged, longest open " in table.stdout
    assert item["has_no_time_limit"] is False
    assert (
        json.loads(dualwrite("status", "--json").stdout)["ids"][0]["current_incarnation"] == item["current_incarnation"]
    )


def test_status_shows_what_waits_until_recover_has_sent_it(dualwrite, kafka, engine, dualwrite_topic, orders):
    def fail(name):
        if name == "outbox.read":
            raise Unavailable("the sender does not get so far")

    with failpoints.watched(fail), DualWriter("orders", kafka=kafka, database=engine, outbox="always") as writer:
        for number in (17, 18):
            write(writer, dualwrite_topic, orders, number)
    table = dualwrite("status").stdout
    shown = re.search(r"orders: mode later, 2 messages of (\d+) bytes wait, the oldest for \d+ s", table)
    assert shown, table
    [found] = json.loads(dualwrite("status", "--json").stdout)["outbox"]
    assert found.pop("oldest_s") > 0
    assert found == {"writer": "orders", "mode": "later", "rows": 2, "bytes": int(shown[1]), "aside": 0}
    assert dualwrite("recover", "orders").exit_code == 0
    assert json.loads(dualwrite("status", "--json").stdout)["outbox"] == []


def test_recover_by_id_after_a_dry_run(dualwrite, left):
    dry = dualwrite("recover", "case", "--dry-run", "--json")
    assert dry.exit_code == 0, dry.stderr
    [item] = json.loads(dry.stdout)["planned"]
    assert item["transactional_id"] == "case"
    assert item["recovery_would"].startswith("commit: the database has decided")
    assert dualwrite("status").exit_code == 3
    done = dualwrite("recover", "case")
    assert done.exit_code == 0, done.stderr
    assert "1 rolled forward" in done.stdout
    assert dualwrite("status").exit_code == 0
    assert left.verify() == {"w1-0", "w1-1"}


@needs_faketime
@pytest.mark.parametrize(("offset", "open_for", "code"), [("+1y", "60", 7), ("-1y", "0.1", 0)])
def test_ages_do_not_depend_on_the_clock_of_the_machine_that_recovers(script, kafka, left, offset, open_for, code):
    """Ahead, it would take a live owner's transaction for old; behind, it would leave a dead owner's open for ever."""
    done = script(kafka, "recover", "--all", "--open-for", open_for, LD_PRELOAD=str(LIBRARY), FAKETIME=offset)
    assert done.returncode == code, done.stdout + done.stderr


def test_recover_all_leaves_young_transactions_to_their_owners(dualwrite, left):
    young = dualwrite("recover", "--all")
    assert young.exit_code == 7, young.stderr
    assert "case: left alone: its owner may be at work: its transaction is young, or its lease" in young.stdout
    old = json.loads(dualwrite("recover", "--prefix", "ca", "--open-for", "0", "--json").stdout)
    assert old["settled"] == ["case"]


def test_a_loss_has_an_exit_code_until_somebody_acknowledges_it(dualwrite, left, kafka, engine):
    (row,) = SqlStateStore(engine).read(["case"])
    Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
    found = dualwrite("recover", "case", "--json")
    assert found.exit_code == 4, found.stderr
    (loss,) = json.loads(found.stdout)["losses"]
    assert loss["outcome"] == "lost"
    assert dualwrite("recover", "case").exit_code == 0
    assert dualwrite("status").exit_code == 4
    assert dualwrite("status", "--problems").exit_code == 4
    assert dualwrite("acknowledge", "case", "--all").exit_code == 0
    assert dualwrite("status").exit_code == 0


def test_a_lost_decision_is_shown_recorded_and_has_exit_codes(
    dualwrite, kafka, engine, url, dualwrite_topic, orders, backup
):
    """The claim survived: the id can be recovered, and the loss becomes an incident."""
    names = ["first", "second"]
    writers = [DualWriter(name, kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) for name in names]
    for number, writer in enumerate(writers):
        writer.open()
        write(writer, dualwrite_topic, orders, number)
    restore = backup()
    for number, writer in enumerate(writers, start=2):
        write(writer, dualwrite_topic, orders, number)
        writer.close()
    restore()
    shown = {item.row.transactional_id: item for item in status(kafka=kafka, database=url)}
    assert [shown[name].needs_recovery for name in names] == [True, True]
    assert all("Kafka has committed a transaction" in shown[name].went_back for name in names)
    assert not any(shown[name].claim_lost for name in names)
    assert dualwrite("status", "--problems").exit_code == 8

    [loss] = recover("first", kafka=kafka, database=url).losses
    assert (loss.outcome, loss.went_back) == (Outcome.UNVERIFIABLE, True)
    found = dualwrite("recover", "second", "--json")
    assert found.exit_code == 4, found.stderr
    assert [loss["outcome"] for loss in json.loads(found.stdout)["losses"]] == ["unverifiable"]
    assert dualwrite("status").exit_code == 4
    assert not any(item.went_back for item in status(kafka=kafka, database=url))


def test_a_lost_claim_is_shown_refused_and_has_an_exit_code(
    dualwrite, kafka, engine, url, dualwrite_topic, orders, backup
):
    restore = None
    for number in (1, 2):
        with DualWriter("case", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
            write(writer, dualwrite_topic, orders, number)
        restore = restore or backup()
    restore()
    assert dualwrite("status").exit_code == 8
    refused = dualwrite("recover", "case")
    assert refused.exit_code == 8, refused.stderr
    assert "gone back in time" in refused.stdout
    accepted = dualwrite("recover", "case", "--after-restore", "--json")
    assert accepted.exit_code == 4, "the lost decision is a loss"
    assert json.loads(accepted.stdout)["settled"] == ["case"]
    assert dualwrite("recover", "case").exit_code == 0


def test_a_loss_whose_finder_died_before_it_told_is_told_by_the_next_opening(dualwrite, script, left, kafka, engine):
    (row,) = SqlStateStore(engine).read(["case"])
    Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
    died = script(kafka, "recover", "case", DUALWRITE_FAILPOINT="settle.recorded")
    assert died.returncode == -signal.SIGKILL
    assert dualwrite("status").exit_code == 4
    with pytest.raises(DecidedTransactionLost, match="ended before it reported the loss"):
        DualWriter("case", kafka=kafka, database=engine).open()
    with DualWriter("case", kafka=kafka, database=engine):  # once is enough
        pass
    assert dualwrite("recover", "case").exit_code == 0
    assert dualwrite("status").exit_code == 4


@pytest.mark.thorough
def test_a_loss_whose_finder_died_before_it_told_is_told_by_the_next_recovery(dualwrite, script, left, kafka, engine):
    (row,) = SqlStateStore(engine).read(["case"])
    Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
    died = script(kafka, "recover", "case", DUALWRITE_FAILPOINT="settle.recorded")
    assert died.returncode == -signal.SIGKILL
    found = dualwrite("recover", "case", "--json")
    assert found.exit_code == 4, found.stderr
    assert [loss["outcome"] for loss in json.loads(found.stdout)["losses"]] == ["lost"]
    assert dualwrite("recover", "case").exit_code == 0


def test_a_living_writer_is_taken_with_all_its_lanes_or_left_alone(dualwrite, kafka, engine, url, dualwrite_topic):
    """Taken lane by lane, it went on with the others."""
    with DualWriter("case", kafka=kafka, database=engine) as writer:
        with pytest.raises((Fenced, TransactionAborted)), writer.transaction() as open_block:
            open_block.produce(dualwrite_topic, value="undecided")
            open_block.connection.execute(text("SELECT 1"))
            shown = dualwrite("status", "--json")
            (item,) = [one for one in json.loads(shown.stdout)["ids"] if one["kafka"] == "Ongoing"]
            assert item["recovery_would"] == "abort: undecided"
            assert 0 < item["aborted_in_s"] < 900
            problems = json.loads(dualwrite("status", "--problems", "--json").stdout)
            assert problems["ids"] == []
            assert problems["longest_open_s"] >= item["open_for_s"]
            young = recover(kafka=kafka, database=url)  # as the command's: 60 s
            assert (young.settled, young.skipped) == ([], [item["transactional_id"]])
            assert dualwrite("recover", "--all").exit_code == 7
            taken = recover("case", kafka=kafka, database=url)
            assert taken.settled == [item["transactional_id"]]
        for _ in range(2):
            with pytest.raises(Fenced), writer.transaction():
                pass
    assert {row.incarnation for row in SqlStateStore(engine).find("case")} == {2}


def test_what_is_open_after_a_committed_one_is_shown_as_what_becomes_of_it(
    dualwrite, tmp_path, kafka, url, dualwrite_topic
):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.recorded:3", killed=True)  # the lane's first is complete, and its row names it
    shown = json.loads(dualwrite("status", "--json").stdout)["ids"]
    assert [one["recovery_would"] for one in shown if one["kafka"] == "Ongoing"] == ["abort: undecided"]
    problems = dualwrite("status", "--problems", "--open-for", "0", "--json")
    assert problems.exit_code == 3
    planned = dualwrite("recover", "--all", "--open-for", "0", "--dry-run", "--json")
    for found in (json.loads(problems.stdout)["ids"], json.loads(planned.stdout)["planned"]):
        assert [one["recovery_would"] for one in found] == ["abort: undecided"]


def test_every_command_runs_with_the_rights_that_its_error_names(dualwrite, left, kafka, url, engine):
    role = "operator_" + make_url(url).database.rpartition("_")[2]
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'operator'"))
    (row,) = SqlStateStore(engine).read(["case"])
    Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)

    def run(*arguments):
        at = make_url(url).set(username=role, password="operator").render_as_string(hide_password=False)
        servers = ["--bootstrap-server", kafka["bootstrap.servers"]] if arguments[0] in {"status", "recover"} else []
        return CliRunner().invoke(commands, [*arguments, "--url", at, *servers])

    every = {("status",): 3, ("recover", "case"): 4, ("acknowledge", "case", "--all"): 0, ("batches",): 0}
    refused = [run(*arguments) for arguments in every]
    assert [done.exit_code for done in refused] == [1] * len(every)
    [grants] = {re.search(r"as the owner of the tables: (.*)\)", done.output)[1] for done in refused}
    assert "migrate" not in "".join(done.output for done in refused)
    with engine.begin() as connection:
        connection.execute(text(grants))
    for arguments, code in every.items():
        done = run(*arguments)
        assert done.exit_code == code, (arguments, done.output)
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_an_id_that_does_not_exist_has_an_exit_code(dualwrite, engine):
    assert dualwrite("recover", "nobody").exit_code == 6
    assert dualwrite("status", "nobody").exit_code == 6


@pytest.mark.parametrize("arguments", [["recover"], ["recover", "a", "--all"], ["recover", "--all", "-X", "nonsense"]])
def test_wrong_usage_has_an_exit_code_of_its_own(dualwrite, arguments):
    assert dualwrite(*arguments).exit_code == 2


def test_a_server_that_does_not_answer_has_an_exit_code(script, engine):
    SqlStateStore(engine).claim(["orders"], owner="test", cluster_id="c")  # an id must be there to be asked about
    done = script({"bootstrap.servers": "127.0.0.1:1"}, "status", "--timeout", "2")
    assert done.returncode == 5, done.stderr
    assert "Unavailable" in done.stderr
