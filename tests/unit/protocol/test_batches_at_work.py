"""Whether any process works on a batch: from its records, and from its tasks' leases."""

from datetime import datetime, timedelta, timezone

from dualwrite.protocol.batches import QUIET_S, nobody_since
from dualwrite.protocol.values import may_own, owner_prefix, stream_name

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def ago(seconds):
    return NOW - timedelta(seconds=seconds)


def test_a_lease_that_lives_is_somebody_at_work_however_long_nothing_changes():
    assert nobody_since([ago(86400)], [ago(-1), ago(5000)], NOW) is None


def test_nobody_is_at_work_since_the_last_change_or_the_end_of_the_last_lease():
    assert nobody_since([ago(86400), ago(4000)], [], NOW) == ago(4000)
    assert nobody_since([ago(86400)], [ago(5000), ago(4000)], NOW) == ago(4000)


def test_what_is_young_or_unknown_is_not_called_deserted():
    assert nobody_since([ago(QUIET_S - 1)], [ago(4000)], NOW) is None
    assert nobody_since([], [], NOW) is None


def test_a_lease_belongs_to_its_batch_and_that_of_a_stream_to_any():
    assert may_own(f"{owner_prefix('b 1', 7)}attempt", "b 1")
    assert not may_own(owner_prefix("b 1", 7), "b")
    assert may_own(owner_prefix(stream_name("0"), 7), "b")
