"""A broker whose clock is moved on, where libfaketime is installed (``apt install faketime``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualwrite.testing import EmbeddedKafka

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
needs_faketime = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed: apt install faketime")


def restart_days_later(kafka: EmbeddedKafka, days: int) -> None:
    """Restart a cluster of one broker with a clock that is ahead by that many days."""
    assert LIBRARY is not None
    kafka.stop()
    [broker] = kafka._members
    command = broker._command
    # The library is for the broker alone: the process that guards it would not work with it.
    broker._command = lambda *arguments: ["env", f"LD_PRELOAD={LIBRARY}", f"FAKETIME=+{days}d", *command(*arguments)]
    kafka.start()
