"""What `dualwrite relay` says on standard error while it runs."""

import pytest

from dualwrite.cli import tables
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
