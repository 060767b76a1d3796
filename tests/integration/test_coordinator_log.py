"""The proof of an outcome from the log, on a real broker: when it proves an outcome, and when it must not."""

import logging
import secrets
import time
from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.patience import wait_until
from harness.transactions import PlainProducer
from kafka.admin import AbortTransactionSpec, KafkaAdminClient
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.record.memory_records import MemoryRecords
from kafka.structs import TopicPartition as Place

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka import log
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import LogProof, TransactionStatus

COMMIT, ABORT = True, False


@pytest.fixture
def config(dualwrite_kafka):
    return dualwrite_kafka.client_config()


@pytest.fixture
def coordinator(config):
    with KafkaCoordinator(KafkaConfig.parse(config)) as coordinator:
        yield coordinator


@pytest.fixture
def producer(config):
    return PlainProducer(config)


def soon():
    return Deadline(30)


def finish(coordinator, producer, committed):
    (producer.client.commit_transaction if committed else producer.client.abort_transaction)(30)
    status = TransactionStatus.COMPLETE_COMMIT if committed else TransactionStatus.COMPLETE_ABORT
    wait_until(lambda: coordinator.describe([producer.kafka_id], soon())[producer.kafka_id].status is status)


def written(coordinator, producer, topic, committed, partitions=(0,), **how):
    """Write a transaction, end it, and return its state."""
    producer.write(topic, partitions, **how)
    state = producer.state(coordinator)
    finish(coordinator, producer, committed)
    return state


@pytest.mark.parametrize(
    ("committed", "proof"), [(COMMIT, LogProof.COMMITTED), (ABORT, LogProof.ABORTED)], ids=["commit", "abort"]
)
def test_a_marker_is_a_proof(coordinator, producer, dualwrite_topic, committed, proof):
    state = written(coordinator, producer, dualwrite_topic, committed, (0, 1), count=3)
    assert coordinator.prove([state], soon()) == [proof]


def test_records_without_a_marker_are_of_an_open_transaction(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, (0, 1))
    state = producer.state(coordinator)
    other = PlainProducer(config)
    written(coordinator, other, dualwrite_topic, COMMIT, (0, 1))  # its markers are not ours
    assert coordinator.prove([state], soon()) == [LogProof.OPEN]
    finish(coordinator, producer, ABORT)
    assert coordinator.prove([state], soon()) == [LogProof.ABORTED]


def test_a_retired_transaction_is_proved_aborted_though_its_epoch_has_moved_on(coordinator, producer, dualwrite_topic):
    producer.write(dualwrite_topic, (0, 1))
    state = producer.state(coordinator)
    coordinator.retire([producer.kafka_id], soon())
    assert coordinator.prove([state], soon()) == [LogProof.ABORTED]


def test_later_transactions_of_the_same_producer_and_epoch_do_not_change_a_proof(
    coordinator, producer, config, dualwrite_topic
):
    other = PlainProducer(config)
    outcomes = [COMMIT, ABORT, COMMIT, COMMIT, ABORT]
    states = []
    for outcome in outcomes:
        states.append(written(coordinator, producer, dualwrite_topic, outcome, (0, 1)))
        written(coordinator, other, dualwrite_topic, not outcome, (0, 1))
    assert len({(state.producer_id, state.epoch) for state in states}) < len(states), "all of this is about one epoch"
    proofs = coordinator.prove(states, soon())
    assert proofs == [LogProof.COMMITTED if outcome else LogProof.ABORTED for outcome in outcomes]


def test_plain_and_compressed_records_in_between_are_passed_over(coordinator, config, dualwrite_topic):
    producer = PlainProducer(config, **{"compression.type": "zstd"})
    plain = Producer({**config, "compression.type": "lz4"})
    producer.write(dualwrite_topic, (0,), count=50, value=b"x" * 1000)
    state = producer.state(coordinator)
    for _ in range(200):
        plain.produce(dualwrite_topic, b"y" * 100, partition=0)
    assert plain.flush(120) == 0
    finish(coordinator, producer, COMMIT)
    assert coordinator.prove([state], soon()) == [LogProof.COMMITTED]


@pytest.mark.parametrize("named", [True, False], ids=["with topic id", "without topic id"])
def test_an_offset_inside_its_batch_is_found(coordinator, producer, dualwrite_topic, named):
    producer.write(dualwrite_topic, (0,), count=10)
    state = producer.state(coordinator, topic_ids=named)
    finish(coordinator, producer, COMMIT)
    [first] = state.first_offsets
    inside = replace(state, first_offsets=(replace(first, offset=first.offset + 3),))
    assert coordinator.prove([inside], soon()) == [LogProof.COMMITTED]


def test_one_partition_that_still_has_the_records_shows_what_was_decided_and_the_other_is_looked_at(
    coordinator, producer, config, dualwrite_topic
):
    state = written(coordinator, producer, dualwrite_topic, COMMIT, (0, 1))
    delete_records(config, dualwrite_topic, 0, up_to=-1)
    assert coordinator.prove([state], soon()) == [LogProof.PARTLY]


def delete_records(config, topic, partition, *, up_to):
    admin = AdminClient(config)
    place = TopicPartition(topic, partition, up_to)
    admin.delete_records([place])[place].result(120)


def test_deleted_records_leave_nothing_to_prove(coordinator, producer, config, dualwrite_topic):
    state = written(coordinator, producer, dualwrite_topic, ABORT, (0,))
    written(coordinator, producer, dualwrite_topic, COMMIT, (0,))
    delete_records(config, dualwrite_topic, 0, up_to=state.first_offsets[0].offset + 1)
    assert coordinator.prove([state], soon()) == [LogProof.UNKNOWABLE]
    delete_records(config, dualwrite_topic, 0, up_to=-1)
    assert coordinator.prove([state], soon()) == [LogProof.UNKNOWABLE]


@pytest.mark.parametrize("named", [True, False], ids=["with topic id", "without topic id"])
def test_a_topic_made_anew_under_its_name_proves_nothing(coordinator, producer, config, dualwrite_kafka, named):
    topic = dualwrite_kafka.create_topic(f"again-{named}", 1)
    producer.write(topic)
    state = producer.state(coordinator, topic_ids=named)
    finish(coordinator, producer, ABORT)
    dualwrite_kafka.delete_topic(topic)
    assert coordinator.prove([state], soon()) == [LogProof.UNKNOWABLE]
    dualwrite_kafka.create_topic(topic, 1)
    written(coordinator, PlainProducer(config), topic, COMMIT, count=5)
    assert coordinator.prove([state], soon()) == [LogProof.UNKNOWABLE]


def test_the_topics_id_tells_a_topic_made_anew_when_nothing_else_does(coordinator, producer, dualwrite_kafka):
    """The same producer and epoch, the same offset, another topic under the same name."""
    topic = dualwrite_kafka.create_topic(f"made-again-{secrets.token_hex(4)}", 1)
    lost = written(coordinator, producer, topic, COMMIT)
    dualwrite_kafka.delete_topic(topic)
    dualwrite_kafka.create_topic(topic, 1)
    kept = written(coordinator, producer, topic, COMMIT)
    [then], [now] = lost.first_offsets, kept.first_offsets
    assert (then.offset, lost.producer_id, lost.epoch) == (now.offset, kept.producer_id, kept.epoch)
    assert coordinator.prove([lost], soon()) == [LogProof.UNKNOWABLE]
    assert coordinator.prove([kept], soon()) == [LogProof.COMMITTED]


def test_records_of_somebody_else_at_the_offset_prove_nothing(coordinator, producer, config, dualwrite_topic):
    state = written(coordinator, producer, dualwrite_topic, COMMIT, (0,))
    for another in (
        replace(state, producer_id=state.producer_id + 1_000_000),
        replace(state, epoch=state.epoch + 1),
        replace(state, first_offsets=(replace(state.first_offsets[0], offset=1),)),  # its own marker
    ):
        assert coordinator.prove([another], soon()) == [LogProof.UNKNOWABLE]


def test_a_log_that_ends_before_the_offset_was_truncated(coordinator, producer, dualwrite_topic):
    state = written(coordinator, producer, dualwrite_topic, COMMIT, (0,))
    for offset in (2, 3, 1_000_000):  # the end of the log itself, and beyond
        beyond = replace(state, first_offsets=(replace(state.first_offsets[0], offset=offset),))
        assert coordinator.prove([beyond], soon()) == [LogProof.UNKNOWABLE]


def test_a_state_without_evidence_proves_nothing(coordinator):
    assert coordinator.prove([PreparedTxnState(1, 0)], soon()) == [LogProof.UNKNOWABLE]
    nowhere = PreparedTxnState(1, 0, None, (FirstOffset("no-such-topic", 0, 0), FirstOffset("no-such-topic", 9, 0)))
    assert coordinator.prove([nowhere], soon()) == [LogProof.UNKNOWABLE]


def test_a_marker_written_by_hand_in_one_partition_is_a_loss_and_is_told(
    coordinator, producer, dualwrite_kafka, dualwrite_topic, caplog
):
    producer.write(dualwrite_topic, (0, 1))
    state = producer.state(coordinator)
    with closing(KafkaAdminClient(bootstrap_servers=dualwrite_kafka.bootstrap_servers)) as admin:
        admin.abort_transaction(AbortTransactionSpec(Place(dualwrite_topic, 1), state.producer_id, state.epoch))
    assert coordinator.open_offsets([state], soon())[0][dualwrite_topic, 1] is None
    finish(coordinator, producer, COMMIT)
    with caplog.at_level(logging.ERROR, "dualwrite"):
        assert coordinator.prove([state], soon()) == [LogProof.ABORTED]
    assert f"{dualwrite_topic}[0] committed" in caplog.text
    assert f"{dualwrite_topic}[1] aborted" in caplog.text


@pytest.mark.parametrize(("near", "others"), [(log._NEAR, LogProof.COMMITTED), (0, LogProof.OPEN)], ids=["near", "far"])
def test_what_others_have_open_before_it_is_read_past_where_that_is_little(
    coordinator, config, dualwrite_topic, monkeypatch, near, others
):
    monkeypatch.setattr(log, "_NEAR", near)
    before, producer = PlainProducer(config), PlainProducer(config)
    before.write(dualwrite_topic, (0,))
    open_before = before.state(coordinator)
    state = written(coordinator, producer, dualwrite_topic, COMMIT, (0, 1))
    assert coordinator.prove_now([state, open_before], soon(), read_on=False) == [
        {(dualwrite_topic, 0): others, (dualwrite_topic, 1): LogProof.COMMITTED},
        {(dualwrite_topic, 0): LogProof.OPEN},
    ]
    finish(coordinator, before, ABORT)
    assert coordinator.prove_now([open_before], soon(), read_on=False) == [{(dualwrite_topic, 0): LogProof.ABORTED}]


def test_a_long_log_with_great_batches_is_read_to_the_marker(coordinator, config, dualwrite_kafka):
    topic = dualwrite_kafka.create_topic(f"great-batches-{secrets.token_hex(4)}", 3, {"max.message.bytes": "8000000"})
    great = {"message.max.bytes": 8_000_000, "linger.ms": 0}
    producer = PlainProducer(config, **great)
    other = PlainProducer(config, **great)
    producer.write(topic, (0, 1, 2), value=b"x" * 3_000_000)
    state = producer.state(coordinator)
    for _ in range(3):
        other.write(topic, (0, 1), value=b"y" * 3_000_000)
        finish(coordinator, other, ABORT)
    assert coordinator.prove([state], soon()) == [LogProof.OPEN]
    finish(coordinator, producer, COMMIT)
    assert coordinator.prove([state], soon()) == [LogProof.COMMITTED]


def test_a_proof_that_takes_too_long_is_unavailable(coordinator, producer, dualwrite_topic):
    state = written(coordinator, producer, dualwrite_topic, COMMIT)
    with pytest.raises(Unavailable):
        coordinator.prove([state], Deadline(0))


@pytest.mark.slow
def test_a_compacted_transaction_is_not_taken_for_a_later_one(mortal_kafka):
    """Aborted, compacted away, and followed by a commit of the same producer and epoch: that commit is not its own."""
    config = mortal_kafka.client_config()
    settings = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.001",
        "delete.retention.ms": "0",
        "max.compaction.lag.ms": "200",
    }
    topic = mortal_kafka.create_topic("compacted", 1, settings)
    producer = PlainProducer(config)
    with KafkaCoordinator(KafkaConfig.parse(config)) as coordinator:
        producer.client.begin_transaction()
        producer.client.produce(topic, b"aborted", key=b"key", partition=0)
        assert producer.client.flush(120) == 0
        producer.first_offsets = {(topic, 0): 0}
        aborted = producer.state(coordinator)
        finish(coordinator, producer, ABORT)
        assert coordinator.prove([aborted], soon()) == [LogProof.ABORTED]
        deadline, epochs, proofs = Deadline(120), set(), [LogProof.ABORTED]
        while first_batch(coordinator, topic).base_offset <= ABORT_MARKER:
            assert not deadline.expired, "not compacted"
            # Each turn rolls a segment: only what is older than the newest one is compacted.
            producer.client.begin_transaction()
            producer.client.produce(topic, b"committed", key=f"key {len(proofs)}", partition=0)
            finish(coordinator, producer, COMMIT)
            epochs.add(coordinator.describe([producer.kafka_id], soon())[producer.kafka_id].epoch)
            proofs += coordinator.prove([aborted], soon())
            time.sleep(0.2)  # the age that segment.ms asks for
        assert epochs == {aborted.epoch}, "all of this is about one epoch"
        first = first_batch(coordinator, topic)
        assert not first.is_control_batch
        assert (first.producer_id, first.producer_epoch) == (aborted.producer_id, aborted.epoch)
        assert coordinator.prove([aborted], soon()) == [LogProof.UNKNOWABLE]
        assert LogProof.COMMITTED not in proofs


ABORT_MARKER = 1


def first_batch(coordinator, topic):
    """The first batch of a partition, whatever its kind."""
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=0,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1000,
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        max_bytes=1000,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[partition])],
        rack_id="",
        max_version=12,
    )
    [response] = coordinator.brokers.exchange([(1, request)], soon())
    return next(MemoryRecords(response.responses[0].partitions[0].records))
