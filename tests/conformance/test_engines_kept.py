"""A transaction that a dead producer left prepared: kept, compared and completed by another one (KIP-939's recovery).

The next producer may be of the other engine, which a user may choose at any moment.
"""

import signal

import pytest
from harness.engines import ENGINES, answered, prepare_and_die
from harness.forking import processes
from harness.patience import PATIENCE_S

from dualwrite.clock import Deadline
from dualwrite.errors import DecidedTransactionLost, Fenced, IllegalStateError, OutcomeUnverifiable
from dualwrite.kafka.abandoned import AbandonedTransaction, Completion
from dualwrite.kafka.transaction_ends import steady_view
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import TransactionStatus

EMPTY = PreparedTxnState()
of_librdkafka = pytest.mark.parametrize("producer_engine", ["librdkafka"], indirect=True)


@pytest.fixture(params=ENGINES)
def next_engine(request):
    return request.param


@pytest.fixture
def left(ready, dualwrite_topic):
    """A producer leaves a prepared transaction, a message in each of two partitions; gives its state."""

    def leave(**options):
        producer = ready(**options)
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(dualwrite_topic, b"1", partition=partition)
        state = producer.prepare_transaction()
        producer.close()
        return state

    return leave


@pytest.fixture
def torn(ready, dualwrite_topic):
    """A producer leaves its second transaction cut off in the middle; gives the state of the first, which was committed."""
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", partition=0)
    state = producer.prepare_transaction()
    producer.commit_transaction()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"2", partition=0)
    answered(producer)
    producer.close()
    return state


@pytest.fixture
def keeping(make_producer):
    def make(**options):
        producer = make_producer(**options)
        producer.init_transactions(keep_prepared_txn=True)
        assert producer.state is ProducerState.KEPT
        return producer

    return make


def runs_on(producer, topic):
    assert producer.state is ProducerState.READY
    producer.begin_transaction()
    producer.produce(topic, b"next", partition=0)
    producer.commit_transaction()


def test_a_prepared_transaction_survives_its_process_and_is_committed_by_a_producer_of_either_engine(
    kafka, kafka_id, producer_engine, next_engine, keeping, dualwrite_topic, values
):
    context = processes()
    here, there = context.Pipe(duplex=False)
    dying = context.Process(
        target=prepare_and_die, args=(kafka, kafka_id, producer_engine, dualwrite_topic, there), kwargs={"bulk": False}
    )
    dying.start()
    assert here.poll(PATIENCE_S)
    state = PreparedTxnState.from_string(here.recv())
    dying.join(PATIENCE_S)
    assert dying.exitcode == -signal.SIGKILL
    successor = keeping(engine=next_engine)
    assert successor.complete_transaction(state) is Completion.COMMITTED
    runs_on(successor, dualwrite_topic)
    assert sorted(values()) == [b"1", b"1", b"next"]


def test_a_prepared_transaction_in_bulk_mode_is_committed_by_its_state(left, keeping, values):
    state = left(bulk=True)
    assert keeping(bulk=True).complete_transaction(state) is Completion.COMMITTED
    assert values() == [b"1", b"1"]


def test_partitions_that_a_late_request_has_added_do_not_hide_what_is_prepared(
    left, keeping, coordinator, kafka_id, dualwrite_kafka, values
):
    state = left()
    elsewhere = dualwrite_kafka.create_topic(f"elsewhere-{kafka_id}", 1)
    late = {kafka_id: (state.producer_id, state.epoch, {(elsewhere, 0)})}
    assert coordinator.add_partitions(late, Deadline(30)) == {kafka_id: True}
    assert keeping().complete_transaction(state) is Completion.COMMITTED
    assert values() == [b"1", b"1"]


@pytest.mark.parametrize("other", [EMPTY, PreparedTxnState(4711, 0, None, (FirstOffset("t", 0, 5),))])
def test_a_prepared_transaction_that_the_state_does_not_name_is_aborted_by_a_producer_of_either_engine(
    left, keeping, next_engine, dualwrite_topic, values, other
):
    left()
    successor = keeping(engine=next_engine)
    assert successor.complete_transaction(other) is Completion.ABORTED
    runs_on(successor, dualwrite_topic)
    assert values() == [b"next"]


def test_the_state_of_one_transaction_never_commits_half_of_the_next_one(
    torn, keeping, values, coordinator, kafka_id, producer_engine
):
    view = coordinator.describe([kafka_id], Deadline(30))[kafka_id]
    assert view.status is TransactionStatus.ONGOING
    assert view.producer_id == torn.producer_id
    assert (view.epoch == torn.epoch) is (producer_engine == "librdkafka"), "there the danger is real: both are equal"
    assert keeping().complete_transaction(torn) is Completion.ABORTED
    assert values() == [b"1"]


def test_a_state_in_kips_two_number_form_tells_two_transactions_of_one_producer_apart_where_they_are_native(
    torn, keeping, values, producer_engine
):
    two_numbers = PreparedTxnState.from_string(f"{torn.producer_id}:{torn.epoch}")
    done = keeping().complete_transaction(two_numbers)
    if producer_engine == "native":
        assert done is Completion.ABORTED
        assert values() == [b"1"]
    else:
        assert done is Completion.COMMITTED
        assert values() == [b"1", b"2"], "documented: without evidence the half of the second one is committed"


@of_librdkafka
def test_where_one_of_several_first_offsets_differs_it_is_another_transaction(left, keeping, values):
    state = left()
    one, two = state.first_offsets
    moved = FirstOffset(two.topic, two.partition, two.offset + 1, two.topic_id)
    other = PreparedTxnState(state.producer_id, state.epoch, None, (one, moved))
    assert keeping().complete_transaction(other) is Completion.ABORTED
    assert values() == []


def test_nothing_ongoing_means_nothing_to_do(ready, keeping, next_engine, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1")
    state = producer.prepare_transaction()
    producer.commit_transaction()
    producer.close()
    for _ in range(2):
        successor = keeping(engine=next_engine)
        assert successor.complete_transaction(state) is Completion.NOTHING_ONGOING
        successor.close()
    assert values() == [b"1"]


def test_an_id_that_was_never_used_has_nothing_to_complete(keeping, dualwrite_topic):
    successor = keeping()
    assert successor.complete_transaction(EMPTY) is Completion.NOTHING_ONGOING
    runs_on(successor, dualwrite_topic)


def test_two_recoverers_complete_it_once(left, keeping, next_engine, values):
    state = left()
    one, two = keeping(), keeping(engine=next_engine)
    assert one.complete_transaction(state) is Completion.COMMITTED
    with pytest.raises(Fenced, match="another producer of this id"):
        two.complete_transaction(state)
    assert keeping(engine=next_engine).complete_transaction(state) is Completion.NOTHING_ONGOING
    assert values() == [b"1", b"1"]


def test_while_kept_only_commit_abort_and_complete_are_allowed(left, keeping, dualwrite_topic):
    left()
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


@pytest.mark.parametrize("committed", [True, False])
def test_a_kept_transaction_can_be_ended_by_word(left, keeping, next_engine, dualwrite_topic, values, committed):
    left()
    successor = keeping(engine=next_engine)
    (successor.commit_transaction if committed else successor.abort_transaction)()
    runs_on(successor, dualwrite_topic)
    assert sorted(values()) == ([b"1", b"1", b"next"] if committed else [b"next"])


def test_there_is_nothing_to_commit_where_nothing_is_ongoing(keeping):
    successor = keeping()
    with pytest.raises(IllegalStateError, match="nothing to commit"):
        successor.commit_transaction()
    assert successor.state is ProducerState.KEPT
    successor.abort_transaction()
    assert successor.state is ProducerState.READY


def test_initialising_without_keeping_aborts_what_is_there(left, ready, next_engine, dualwrite_topic, values):
    left()
    producer = ready(engine=next_engine)
    assert not producer.doubtful
    runs_on(producer, dualwrite_topic)
    assert values() == [b"next"]


@pytest.fixture
def kept(left, coordinator, kafka_id, producer_engine):
    """A prepared transaction, with the view of it while it is ongoing, and its state."""
    state = left()
    kept = AbandonedTransaction(coordinator, kafka_id, natively=producer_engine == "native")
    return kept, steady_view(coordinator, kafka_id, Deadline(30)), state


@pytest.fixture
def end_by_hand(coordinator, kafka_id, producer_engine):
    """Ends the transaction as another process does."""

    def end(state, *, committed):
        if producer_engine == "native":
            named = {kafka_id: (state.producer_id, state.epoch)}
            coordinator.end_exactly(named, committed=committed, deadline=Deadline(30))
        else:
            coordinator.end({kafka_id: state}, committed=committed, deadline=Deadline(30))

    return end


def test_a_commit_that_comes_too_late_is_proved_lost_and_never_silent(kept, end_by_hand):
    kept, view, state = kept
    end_by_hand(state, committed=False)
    with pytest.raises(DecidedTransactionLost) as lost:
        kept.commit(view, state, Deadline(30))
    assert lost.value.state == str(state)


@of_librdkafka
def test_a_commit_that_comes_too_late_without_evidence_has_an_unknown_outcome(kept, end_by_hand):
    kept, view, state = kept
    end_by_hand(state, committed=False)
    with pytest.raises(Fenced) as fenced:
        kept.commit(view, None, Deadline(30))
    assert fenced.value.outcome == "unknown"


@of_librdkafka
def test_a_commit_that_comes_too_late_for_records_that_are_gone_is_unverifiable(kept, end_by_hand, dualwrite_topic):
    kept, view, state = kept
    end_by_hand(state, committed=False)
    gone = PreparedTxnState(state.producer_id, state.epoch, None, (FirstOffset(dualwrite_topic, 0, 10_000),))
    with pytest.raises(OutcomeUnverifiable):
        kept.commit(view, gone, Deadline(30))


def test_a_commit_that_somebody_else_made_meanwhile_is_a_success(kept, end_by_hand, coordinator, kafka_id, values):
    kept, view, state = kept
    end_by_hand(state, committed=True)
    kept.commit(view, state, Deadline(30))
    coordinator.retire([kafka_id], Deadline(30))
    kept.commit(view, state, Deadline(30))
    assert values() == [b"1", b"1"]
