"""A transaction that a dead producer left prepared: kept, compared and completed by another one (KIP-939's recovery)."""

import subprocess
import sys
import textwrap

import pytest
from harness.patience import PATIENCE_S

from dualwrite.runtime.deadline import Deadline
from dualwrite.errors import DecidedTransactionLost, Fenced, IllegalStateError, OutcomeUnverifiable
from dualwrite.kafka.producer.abandoned_transaction import Completion, KeptTransaction
from dualwrite.protocol.observations import TransactionStatus
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.tables.producer_life import ProducerState
from dualwrite.testing.reading import read_committed

EMPTY = PreparedTxnState()


@pytest.fixture
def values(kafka, dualwrite_topic):
    return lambda: [record.value for record in read_committed(kafka, dualwrite_topic)]


@pytest.fixture
def killed_after(kafka, kafka_id, dualwrite_topic):
    """Runs lines with a ready ``producer`` in a process that kills itself afterwards; returns the states that they printed."""

    def run(lines, bulk=False):
        head = f"""
            import os, signal
            from dualwrite.kafka.producer.transactional import TransactionalProducer
            topic = {dualwrite_topic!r}
            producer = TransactionalProducer({kafka!r}, {kafka_id!r}, bulk={bulk})
            producer.init_transactions()
        """
        tail = "os.kill(os.getpid(), signal.SIGKILL)"
        script = "\n".join([textwrap.dedent(head), textwrap.dedent(lines), tail])
        ended = subprocess.run(
            [sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == -9, ended.stderr
        return [PreparedTxnState.from_string(line) for line in ended.stdout.split()]

    return run


ONE_PREPARED = """
    producer.begin_transaction()
    producer.produce(topic, b"1", partition=0)
    producer.produce(topic, b"1", partition=1)
    print(producer.prepare_transaction())
"""
# The row holds the first one's state; the second one is cut off in its middle, under the same producer id and epoch.
TORN = """
    producer.begin_transaction()
    producer.produce(topic, b"1", partition=0)
    print(producer.prepare_transaction())
    producer.commit_transaction()
    producer.begin_transaction()
    producer.produce(topic, b"2", partition=0)
    producer._instance._raw.flush(120)
"""


@pytest.fixture
def keeping(make_producer):
    def make():
        producer = make_producer()
        producer.init_transactions(keep_prepared_txn=True)
        assert producer.state is ProducerState.KEPT
        return producer

    return make


def runs_on(producer, topic):
    assert producer.state is ProducerState.READY
    producer.begin_transaction()
    producer.produce(topic, b"next", partition=0)
    producer.commit_transaction()


@pytest.mark.parametrize("bulk", [False, True])
def test_a_prepared_transaction_survives_its_process_and_is_committed_by_its_state(
    killed_after, keeping, dualwrite_topic, values, bulk
):
    [state] = killed_after(ONE_PREPARED, bulk)
    successor = keeping()
    assert successor.complete_transaction(state) is Completion.COMMITTED
    runs_on(successor, dualwrite_topic)
    assert sorted(values()) == [b"1", b"1", b"next"]


def test_partitions_that_a_late_request_has_added_do_not_hide_what_is_prepared(
    killed_after, keeping, coordinator, kafka_id, dualwrite_kafka, values
):
    [state] = killed_after(ONE_PREPARED)
    elsewhere = dualwrite_kafka.create_topic(f"elsewhere-{kafka_id}", 1)
    late = {kafka_id: (state.producer_id, state.epoch, {(elsewhere, 0)})}
    assert coordinator.add_partitions(late, Deadline(30)) == {kafka_id: True}
    assert keeping().complete_transaction(state) is Completion.COMMITTED
    assert values() == [b"1", b"1"]


@pytest.mark.parametrize("other", [EMPTY, PreparedTxnState(4711, 0, None, (FirstOffset("t", 0, 5),))])
def test_a_prepared_transaction_that_the_state_does_not_name_is_aborted(
    killed_after, keeping, dualwrite_topic, values, other
):
    killed_after(ONE_PREPARED)
    successor = keeping()
    assert successor.complete_transaction(other) is Completion.ABORTED
    runs_on(successor, dualwrite_topic)
    assert values() == [b"next"]


def test_closing_leaves_the_transaction_prepared(ready, keeping, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1")
    state = producer.prepare_transaction()
    producer.close()
    assert keeping().complete_transaction(state) is Completion.COMMITTED
    assert values() == [b"1"]


def test_the_state_of_one_transaction_never_commits_half_of_the_next_one(
    killed_after, keeping, values, coordinator, kafka_id
):
    [first] = killed_after(TORN)
    view = coordinator.describe([kafka_id], Deadline(30))[kafka_id]
    assert view.status is TransactionStatus.ONGOING
    assert (view.producer_id, view.epoch) == (first.producer_id, first.epoch), (
        "the danger is real: id and epoch are equal"
    )
    assert keeping().complete_transaction(first) is Completion.ABORTED
    assert values() == [b"1"]


def test_a_state_in_kips_two_number_form_cannot_tell_two_transactions_of_one_producer_apart(
    killed_after, keeping, values
):
    [first] = killed_after(TORN)
    two_numbers = PreparedTxnState.from_string(f"{first.producer_id}:{first.epoch}")
    assert keeping().complete_transaction(two_numbers) is Completion.COMMITTED
    assert values() == [b"1", b"2"], "documented: without evidence the half of the second one is committed"


def test_where_one_of_several_first_offsets_differs_it_is_another_transaction(killed_after, keeping, values):
    [state] = killed_after(ONE_PREPARED)
    one, two = state.first_offsets
    moved = FirstOffset(two.topic, two.partition, two.offset + 1, two.topic_id)
    other = PreparedTxnState(state.producer_id, state.epoch, None, (one, moved))
    assert keeping().complete_transaction(other) is Completion.ABORTED
    assert values() == []


def test_nothing_ongoing_means_nothing_to_do(ready, keeping, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1")
    state = producer.prepare_transaction()
    producer.commit_transaction()
    producer.close()
    for _ in range(2):
        successor = keeping()
        assert successor.complete_transaction(state) is Completion.NOTHING_ONGOING
        successor.close()
    assert values() == [b"1"]


def test_an_id_that_was_never_used_has_nothing_to_complete(keeping, dualwrite_topic):
    successor = keeping()
    assert successor.complete_transaction(EMPTY) is Completion.NOTHING_ONGOING
    runs_on(successor, dualwrite_topic)


def test_two_recoverers_complete_it_once(killed_after, keeping, values):
    [state] = killed_after(ONE_PREPARED)
    one, two = keeping(), keeping()
    assert one.complete_transaction(state) is Completion.COMMITTED
    assert two.complete_transaction(state) is Completion.NOTHING_ONGOING
    assert values() == [b"1", b"1"]


def test_while_kept_only_commit_abort_and_complete_are_allowed(killed_after, keeping, dualwrite_topic):
    killed_after(ONE_PREPARED)
    successor = keeping()
    for call in (
        successor.begin_transaction,
        successor.prepare_transaction,
        successor.init_transactions,
        lambda: successor.produce(dualwrite_topic, b"2"),
        lambda: successor.send_offsets_to_transaction([], None),
    ):
        with pytest.raises(IllegalStateError, match="commit, abort or complete"):
            call()
        assert successor.state is ProducerState.KEPT


def test_a_kept_transaction_can_be_committed_by_word(killed_after, keeping, dualwrite_topic, values):
    killed_after(ONE_PREPARED)
    successor = keeping()
    successor.commit_transaction()
    runs_on(successor, dualwrite_topic)
    assert sorted(values()) == [b"1", b"1", b"next"]


def test_a_kept_transaction_can_be_aborted_by_word(killed_after, keeping, dualwrite_topic, values):
    killed_after(ONE_PREPARED)
    successor = keeping()
    successor.abort_transaction()
    runs_on(successor, dualwrite_topic)
    assert values() == [b"next"]


def test_there_is_nothing_to_commit_where_nothing_is_ongoing(keeping):
    successor = keeping()
    with pytest.raises(IllegalStateError, match="nothing to commit"):
        successor.commit_transaction()
    assert successor.state is ProducerState.KEPT
    successor.abort_transaction()
    assert successor.state is ProducerState.READY


def test_initialising_without_keeping_aborts_what_is_there(killed_after, ready, dualwrite_topic, values):
    killed_after(ONE_PREPARED)
    producer = ready()
    assert not producer.doubtful
    runs_on(producer, dualwrite_topic)
    assert values() == [b"next"]


@pytest.fixture
def aborted_meanwhile(killed_after, coordinator, kafka_id):
    """A prepared transaction, the view of it while it was ongoing, and then its abort by an operator."""
    [state] = killed_after(ONE_PREPARED)
    kept = KeptTransaction(coordinator, kafka_id)
    view = kept.look(Deadline(30))
    coordinator.end({kafka_id: state}, committed=False, deadline=Deadline(30))
    return kept, view, state


def test_a_commit_that_comes_too_late_is_proved_lost_and_never_silent(aborted_meanwhile):
    kept, view, state = aborted_meanwhile
    with pytest.raises(DecidedTransactionLost) as lost:
        kept.commit(view, state, Deadline(30))
    assert lost.value.state == str(state)


def test_a_commit_that_comes_too_late_without_evidence_has_an_unknown_outcome(aborted_meanwhile):
    kept, view, _ = aborted_meanwhile
    with pytest.raises(Fenced) as fenced:
        kept.commit(view, None, Deadline(30))
    assert fenced.value.outcome == "unknown"


def test_a_commit_that_comes_too_late_for_records_that_are_gone_is_unverifiable(aborted_meanwhile, dualwrite_topic):
    kept, view, state = aborted_meanwhile
    gone = PreparedTxnState(state.producer_id, state.epoch, None, (FirstOffset(dualwrite_topic, 0, 10_000),))
    with pytest.raises(OutcomeUnverifiable):
        kept.commit(view, gone, Deadline(30))


def test_a_commit_that_somebody_else_made_meanwhile_is_a_success(killed_after, coordinator, kafka_id, values):
    [state] = killed_after(ONE_PREPARED)
    kept = KeptTransaction(coordinator, kafka_id)
    view = kept.look(Deadline(30))
    coordinator.end({kafka_id: state}, committed=True, deadline=Deadline(30))
    kept.commit(view, state, Deadline(30))
    coordinator.retire([kafka_id], Deadline(30))
    kept.commit(view, state, Deadline(30))
    assert values() == [b"1", b"1"]
