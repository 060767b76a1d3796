"""What ``dualwrite recover`` shows on standard error while it settles."""

from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from dualwrite.cli import recovery
from dualwrite.cli.options import commands
from dualwrite.recovery.recover import RecoveryReport


@pytest.mark.parametrize(("planned", "shown"), [(0, False), (2, True)])
def test_how_many_ids_are_settled_is_shown_where_there_are_some(monkeypatch, planned, shown):
    def settle(*_, progress, **__):
        progress(planned, planned)
        return RecoveryReport()

    monkeypatch.setattr(recovery, "opened", lambda *_: nullcontext())
    monkeypatch.setattr(recovery.by_hand, "settle", settle)
    done = CliRunner().invoke(commands, ["recover", "--all", "--url", "sqlite:///x", "--bootstrap-server", "h:1"])
    assert done.exit_code == 0, done.output
    assert (f"settling {planned}/{planned}" in done.stderr) == shown
