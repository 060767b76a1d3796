"""The words of the ports: those that Kafka sends, and those that stand in rows, are fixed."""

from dualwrite.protocol.values import Outcome, TransactionStatus, TransactionView


def test_the_statuses_are_read_by_the_names_that_coordinators_send():
    # org.apache.kafka.coordinator.transaction.TransactionState; "no such id" is the answer to an unknown id.
    sent = ["Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead"]
    assert {status.value for status in TransactionStatus} == {"no such id", *sent, "PrepareEpochFence"}


def test_the_outcomes_are_the_words_of_the_rows_that_stand_in_databases():
    assert {outcome.name: outcome.value for outcome in Outcome} == {
        "COMMITTED": "committed",
        "LOST": "lost",
        "UNVERIFIABLE": "unverifiable",
    }


def test_a_view_of_an_unknown_id_names_no_producer_and_no_transaction():
    view = TransactionView(TransactionStatus.NO_SUCH_ID)
    assert (view.producer_id, view.epoch, view.partitions) == (-1, -1, ())
    assert view.started_ms is view.timeout_ms is view.newest_started_ms is None
