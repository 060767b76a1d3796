"""Rows and names, judged without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.stores.sql.tables import check_decidable, check_name, digest, in_chunks, parse_rows, parse_state_row

STATE = PreparedTxnState(42, 0, 3, (FirstOffset("orders", 0, 17),), 1767225600000)
ROW: dict[str, Any] = {
    "transactional_id": "orders",
    "prepared_transaction_state": str(STATE),
    "namespace": "n",
    "incarnation": 5,
    "settled_incarnation": 4,
    "completed": "lost",
    "cluster_id": "c",
    "owner": "me",
    "updated_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
    "settle_fence": None,
}


def test_a_row_is_read_as_it_was_written() -> None:
    row = parse_state_row("t", ROW)
    assert (row.prepared, row.completed, row.incarnation, row.settled_incarnation) == (STATE, Outcome.LOST, 5, 4)
    assert row.prepared.started_ms == STATE.started_ms
    assert (row.kafka_id(5), row.owner, row.cluster_id) == ("orders.n.5", "me", "c")


@pytest.mark.parametrize("text", [None, ""])
def test_no_state_is_the_empty_state(text: str | None) -> None:
    row = parse_state_row("t", {**ROW, "prepared_transaction_state": text, "completed": None})
    assert (row.prepared, row.completed) == (PreparedTxnState(), None)


@pytest.mark.parametrize(
    ("column", "value", "cause"),
    [
        ("prepared_transaction_state", "42:0;i=3", "no first offsets"),
        ("prepared_transaction_state", "42:0;orders:0=17", "no incarnation"),
        ("prepared_transaction_state", "42:0;i=6;orders:0=17", "only at 5"),
        ("prepared_transaction_state", "42:0;n;i=3", "no partitions"),
        ("settle_fence", 1, "settle_fence is 1"),  # only a native transaction has one
        ("prepared_transaction_state", "drop table", "not a prepared transaction state"),
        ("completed", "perhaps", "'perhaps'"),
    ],
)
def test_a_bad_row_names_table_id_and_cause(column: str, value: str, cause: str) -> None:
    with pytest.raises(ConfigurationError, match=cause) as caught:
        parse_state_row("some.table", {**ROW, column: value})
    assert "some.table" in caught.value.what
    assert caught.value.transactional_id == "orders"
    assert "restore" in (caught.value.next_step or "")


def test_rows_come_in_the_order_of_code_points() -> None:
    rows = parse_rows("t", [{**ROW, "transactional_id": name} for name in ("b", "a#2", "B", "a#10", "ä")])
    assert [row.transactional_id for row in rows] == ["B", "a#10", "a#2", "b", "ä"]


def test_what_is_decided_can_be_read_back() -> None:
    assert check_decidable(Decision("orders", 3, STATE)) == str(STATE)


@pytest.mark.parametrize(
    "state",
    [
        PreparedTxnState(),
        replace(STATE, incarnation=None),
        replace(STATE, first_offsets=()),
        replace(STATE, incarnation=2),
    ],
)
def test_what_could_not_be_settled_is_not_decided(state: PreparedTxnState) -> None:
    with pytest.raises(IllegalStateError, match="cannot be recorded"):
        check_decidable(Decision("orders", 3, state))


def test_the_digest_is_the_identity() -> None:
    assert digest(STATE) == digest(replace(STATE, started_ms=None)) == digest(replace(STATE, started_ms=1))
    others = [replace(STATE, epoch=1), replace(STATE, incarnation=4), replace(STATE, first_offsets=())]
    assert len({digest(STATE), *map(digest, others)}) == 4
    assert len(digest(STATE)) == 64


def test_names() -> None:
    for name in ("a", "x" * 255, "a b#1", "ä🎉"):
        assert check_name(name) == name
    for name in ("", "x" * 256, "a\n", "\x7f", "\x85", "\udfff"):
        with pytest.raises(ConfigurationError, match="cannot be the name of a batch"):
            check_name(name, "the name of a batch")


def test_chunks_lose_nothing() -> None:
    for count in (0, 1, 4999, 5000, 5001, 12_345):
        chunks = list(in_chunks(range(count)))
        assert [item for chunk in chunks for item in chunk] == list(range(count))
        assert all(1 <= len(chunk) <= 5000 for chunk in chunks)
