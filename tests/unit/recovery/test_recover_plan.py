"""The plan of a recovery: which ids it settles, and which it leaves alone."""

import time
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from dualwrite.cli.report import report_console, status_table, will_do
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import SettleStep, initial, looked, next_step
from dualwrite.protocol.values import NEVER_MS, Outcome, StateRow, TransactionStatus, TransactionView
from dualwrite.recovery.inspect import Unsettled
from dualwrite.recovery.recover import describe

STATE = PreparedTxnState.from_string("7:0;i=1;orders:0=3")
ROW = StateRow(
    transactional_id="orders",
    prepared=STATE,
    namespace="n",
    incarnation=2,
    settled_incarnation=0,
    completed=None,
    cluster_id="cluster",
    owner="me",
    updated_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
)
ABORTED = TransactionView(TransactionStatus.COMPLETE_ABORT, producer_id=7, epoch=1)


def status_of(recorded):
    row = replace(ROW, completed=recorded)
    item = Unsettled(row, 1, looked(initial(STATE, recorded), ABORTED))
    return describe(item, next_step(item.known), None, None)


@pytest.mark.parametrize("recorded", [Outcome.LOST, Outcome.UNVERIFIABLE])
def test_a_recorded_loss_is_settled_as_its_finder_may_have_died_before_it_ended_what_is_open(recorded):
    assert initial(STATE, recorded).suspects == STATE.partitions
    item = status_of(recorded)
    assert item.needs_recovery
    assert will_do(item) == "end what the broker may have left open of it"


def test_what_is_recorded_as_committed_is_left_alone():
    item = status_of(Outcome.COMMITTED)
    assert not item.needs_recovery
    assert will_do(item) == "nothing: idle"


@pytest.mark.parametrize(("epoch", "undecided"), [(0, False), (1, True)])
def test_what_is_open_is_undecided_although_the_row_names_an_earlier_one(epoch, undecided):
    native = replace(ROW, prepared=PreparedTxnState.from_string("7:0;n;i=1;orders@c2FtcGxl:0=3"))
    view = TransactionView(TransactionStatus.ONGOING, 7, epoch, int(time.time() * 1000), NEVER_MS, (("orders", 0),))
    step = SettleStep.RETIRE if undecided else SettleStep.COMMIT
    item = describe(Unsettled(native, 1, looked(initial(native.prepared, None), view)), step, None, None)
    assert item.partitions == (("orders", 0),)
    assert item.is_undecided is undecided


@pytest.mark.parametrize(("timeout_ms", "shown"), [(NEVER_MS, "never"), (NEVER_MS - 100, " s")])
def test_a_transaction_without_a_time_limit_is_never_aborted_by_the_broker(capsys, timeout_ms, shown):
    begun_30_days_ago_ms = int((time.time() - 30 * 86_400) * 1000)
    view = TransactionView(TransactionStatus.ONGOING, 7, 0, begun_30_days_ago_ms, timeout_ms)
    item = describe(Unsettled(ROW, 1, looked(initial(STATE, None), view)), SettleStep.COMMIT, None, None)
    assert item.aborted_in_s == (None if shown == "never" else 0.0)
    assert item.has_no_time_limit is (shown == "never")
    report_console().print(status_table([item]))
    assert shown in capsys.readouterr().out.replace("2592000 s", "")
