"""Ids without a row, on simulated servers: another program's are aborted; those of this library may be named by another database."""

import pytest
from harness.simulated import TIMEOUT_S

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.blocking import TerminateStep
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.recovery import operator
from dualwrite.recovery.operator import complete_prepared, terminate_without_row


@pytest.fixture
def kafka_id(servers):
    """A transaction is open under it, and no row names it."""
    servers.left_by("write.decided", "m1")
    row = servers.row()
    del servers.database.rows["orders"]
    return row.kafka_id(1)


def terminating(kafka_id, *, lose_decided=False):
    return lambda here: terminate_without_row(
        kafka_id, here.context.coordinator, Deadline(TIMEOUT_S), lose_decided=lose_decided
    )


def test_what_another_program_has_open_is_aborted_once(servers, kafka_id):
    assert servers.run(terminating(kafka_id), "T") is TerminateStep.ABORT
    assert servers.run(terminating(kafka_id), "T") is TerminateStep.NOTHING
    assert servers.visible() == []
    assert servers.run(terminating("nobody"), "T") is TerminateStep.UNKNOWN


def test_an_id_of_ours_is_refused_unless_it_is_given_up(servers, kafka_id, monkeypatch):
    monkeypatch.setattr(operator, "is_drawn", lambda _: True)
    before = servers.shown()
    with pytest.raises(IllegalStateError, match="no row was given"):
        servers.run(terminating(kafka_id), "T")
    assert servers.shown() == before
    assert servers.run(terminating(kafka_id, lose_decided=True), "T") is TerminateStep.ABORT
    assert servers.visible() == []


def test_the_state_of_an_id_of_ours_is_in_its_row():
    with pytest.raises(ConfigurationError, match="its row holds the state"):
        complete_prepared("orders.85c0a8daf1ee.6", PreparedTxnState(), kafka={})
