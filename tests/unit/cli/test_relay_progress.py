"""What `dualwrite relay` takes from its options, and what it says on standard error while it runs."""

import pytest
from click.testing import CliRunner

from dualwrite.cli import tables
from dualwrite.cli.options import commands
from dualwrite.errors import ConfigurationError
from dualwrite.operations import RelayReport


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(tables, "now_s", lambda: now[0])
    return now


def test_each_change_of_state_is_said_once_and_the_messages_now_and_then(clock, capsys):
    lines, report = tables._Lines(quiet=False), RelayReport()
    course = [("standing by", 0, 0), ("sending", 0, 1), ("waiting for rows", 500, 1), ("sending", 70_000, 60)]
    for state, messages, seconds in [*course, ("waiting after an error", 70_000, 1), ("stopped", 70_000, 1)]:
        clock[0] += seconds
        report.state, report.messages = state, messages
        for _ in range(2):
            lines.show(report)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "standing by",
        "sending",
        "70,000 messages sent, 1,129 a second",
        "waiting after an error",
    ]


def test_nothing_is_said_beside_json(clock, capsys):
    report = RelayReport()
    report.state = "sending"
    tables._Lines(quiet=True).show(report)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ([], None),
        (["-X", "dualwrite.engine=librdkafka"], "librdkafka"),
        (["-X", "dualwrite.engine=librdkafka", "--engine", "native"], "native"),
    ],
)
def test_the_engine_is_that_of_the_kafka_settings_unless_the_option_names_one(monkeypatch, options, engine):
    given = []

    def relay(table, *, kafka, **_):
        given.append(kafka.get("dualwrite.engine"))
        raise ConfigurationError("enough")

    monkeypatch.setattr(tables, "Relay", relay)
    url = ["--url", "postgresql://h/d", "--bootstrap-server", "h:1", "--topic", "t"]
    done = CliRunner().invoke(commands, ["relay", *url, *options])
    assert given == [engine], done.output
