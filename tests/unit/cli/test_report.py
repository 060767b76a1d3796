"""The tables and documents of the commands."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from rich.console import Console

from dualwrite.cli.report import lease_json, lease_table, status_json, status_table, summary
from dualwrite.protocol.members import Lease
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.values import StateRow, TransactionStatus
from dualwrite.recovery.recover import IdStatus, longest_open_s

SHARED = PreparedTxnState.from_string("7:0;i=1;orders:0=3")
NATIVE = PreparedTxnState.from_string("7:0;n;i=1;orders@c2FtcGxl:0=3")


def item(prepared: PreparedTxnState, incarnation: int = 1) -> IdStatus:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    row = StateRow("orders", prepared, "n", 2, 0, None, "c", "me", now)
    return IdStatus(row, incarnation, TransactionStatus.ONGOING, 1.0, SettleStep.COMMIT, needs_recovery=True)


def printed(*items: IdStatus) -> list[list[str]]:
    console = Console(width=400)
    with console.capture() as captured:
        console.print(status_table(items))
    return [line.split() for line in captured.get().splitlines()]


def test_the_engine_of_a_decided_transaction_is_shown_where_one_is_native() -> None:
    head, shared, native, undecided = printed(item(SHARED), item(NATIVE), item(NATIVE, 2))
    assert "engine" in head
    assert shared[4:6] == ["decided", "librdkafka"]
    assert native[4:6] == ["decided", "native"]
    assert undecided[4:6] == ["-", "Ongoing"]
    assert "engine" not in printed(item(SHARED))[0]


def test_scripts_read_the_engine_of_a_decided_transaction() -> None:
    shown = [status_json(one)["engine"] for one in (item(SHARED), item(NATIVE), item(NATIVE, 2))]
    assert shown == ["librdkafka", "native", None]


def test_the_last_line_of_status_counts_and_tells_the_longest_open_transaction() -> None:
    items = [item(SHARED), replace(item(NATIVE), open_for_s=95.0, has_no_time_limit=True)]
    assert summary(items, longest_open_s(items), 3) == (
        "2 ids, 2 to recover, 3 losses not acknowledged, longest open 95 s, 1 without a time limit"
    )
    idle = replace(item(SHARED), open_for_s=None, has_no_time_limit=False, needs_recovery=False)
    assert summary([idle], None, 0) == "1 ids, 0 to recover, 0 losses not acknowledged"
    assert longest_open_s([idle, *items]) == 95.0
    assert longest_open_s([idle]) is None


def test_leases_are_shown_with_how_long_they_last_or_are_over() -> None:
    leases = [
        Lease("orders-0", "orders", 0, "app@web-1:4711 ab on boot/1/4711", 12.4),
        Lease("orders-1", "orders", 1, "app@web-2:4712 cd", -3.2),
        Lease("orders-2", "orders", 2),
    ]
    console = Console(width=400)
    with console.capture() as captured:
        console.print(lease_table(leases))
    assert [line.split() for line in captured.get().splitlines()[1:]] == [
        ["orders-0", "held", "12", "s", "app@web-1:4711", "ab"],
        ["orders-1", "expired", "3", "s", "app@web-2:4712", "cd"],
        ["orders-2", "free"],
    ]
    assert lease_json(leases[1]) == {
        "transactional_id": "orders-1",
        "fleet": "orders",
        "state": "expired",
        "left_s": -3.2,
        "owner": "app@web-2:4712 cd",
    }
