"""Rows as values: the Kafka ids that they give, and the transactions that they name."""

from datetime import datetime, timezone

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import Incident, Outcome, StateRow, parsed

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
STATE = PreparedTxnState(42, 0, 3, (FirstOffset("orders", 0, 17, "c2FtcGxl"),), 1000)


def row(name="orders#1", namespace="0123456789ab"):
    return StateRow(name, STATE, namespace, 4, 3, None, "c", "me", NOW)


def incident(text):
    return Incident("orders", text, Outcome.LOST, "aborted by the broker", NOW, None)


def test_each_incarnation_of_each_row_has_a_kafka_id_of_its_own():
    ids = [
        row(name, namespace).kafka_id(incarnation)
        for name in ("orders", "orders#1")
        for namespace in ("0123456789ab", "ba9876543210")
        for incarnation in (3, 4)
    ]
    assert len(set(ids)) == 8
    assert parsed(row().kafka_id(3)) == ("orders#1", "0123456789ab", 3)


def test_an_incident_names_its_transaction_with_all_its_evidence():
    found = incident(str(STATE)).state
    assert found == STATE
    assert found.started_ms == STATE.started_ms


def test_an_incident_that_names_no_transaction_is_refused_and_not_guessed():
    with pytest.raises(ConfigurationError, match="not a prepared transaction state"):
        _ = incident("42:0;garbled").state


def test_nobody_was_told_of_a_new_incident():
    assert incident("42:0").reported_at is None
