"""The coordinator's side of transactions, on a real broker, with confluent-kafka producers that know nothing of us."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from harness.patience import PATIENCE_S, wait_until
from harness.transactions import PlainProducer, fresh_id

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.values import EndAnswer, LogProof, TransactionStatus, TransactionView
from dualwrite.testing import read_committed


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


def view(coordinator, producer):
    return coordinator.describe([producer.kafka_id], soon())[producer.kafka_id]


def wait_for(coordinator, producer, status):
    wait_until(lambda: view(coordinator, producer).status is status)
    return view(coordinator, producer)


def end(coordinator, producer, state, *, committed=True):
    return coordinator.end({producer.kafka_id: state}, committed=committed, deadline=soon())[producer.kafka_id]


def end_fully(coordinator, producer, state, *, committed=True):
    assert end(coordinator, producer, state, committed=committed) is EndAnswer.ENDED
    wait_for(
        coordinator, producer, TransactionStatus.COMPLETE_COMMIT if committed else TransactionStatus.COMPLETE_ABORT
    )


def values(config, topic):
    return [record.value for record in read_committed(config, topic)]


def test_an_id_that_nobody_has_used_is_no_such_id(coordinator):
    kafka_id = fresh_id()
    assert coordinator.describe([kafka_id], soon()) == {kafka_id: TransactionView(TransactionStatus.NO_SUCH_ID)}


def test_a_producer_that_has_written_nothing_is_empty(coordinator, producer):
    seen = view(coordinator, producer)
    assert seen.status is TransactionStatus.EMPTY
    assert seen.producer_id >= 0
    assert (seen.epoch, seen.started_ms, seen.timeout_ms, seen.partitions) == (0, None, 60_000, ())


def test_an_open_transaction_shows_when_it_began_and_where_it_wrote(coordinator, producer, dualwrite_topic):
    before = int(time.time() * 1000)
    producer.write(dualwrite_topic, (0, 1))
    seen = view(coordinator, producer)
    assert seen.status is TransactionStatus.ONGOING
    assert before <= seen.started_ms <= int(time.time() * 1000)
    assert set(seen.partitions) == {(dualwrite_topic, 0), (dualwrite_topic, 1)}


@pytest.mark.parametrize("committed", [True, False])
def test_a_finished_transaction_shows_how_it_ended(coordinator, producer, dualwrite_topic, committed):
    producer.write(dualwrite_topic)
    (producer.client.commit_transaction if committed else producer.client.abort_transaction)(30)
    status = TransactionStatus.COMPLETE_COMMIT if committed else TransactionStatus.COMPLETE_ABORT
    assert wait_for(coordinator, producer, status).started_ms is None


def test_another_process_commits_the_transaction_of_an_abandoned_producer(coordinator, config, dualwrite_topic):
    producer = PlainProducer(config)
    producer.write(dualwrite_topic, value=b"abandoned")
    state = str(producer.state(coordinator))
    script = """
import json, sys
from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.prepared_state import PreparedTxnState
config, kafka_id, state = json.loads(sys.argv[1])
with KafkaCoordinator(KafkaConfig.parse(config)) as coordinator:
    answers = coordinator.end({kafka_id: PreparedTxnState.from_string(state)}, committed=True, deadline=Deadline(30))
print(answers[kafka_id].value)
"""
    import json

    argument = json.dumps([config, producer.kafka_id, state])
    done = subprocess.run(
        [sys.executable, "-c", script, argument], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.stdout.strip(), done.stderr) == ("ended", "")
    assert values(config, dualwrite_topic) == [b"abandoned"]


def test_ending_again_is_harmless_and_changes_nothing(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, value=b"once")
    state = producer.state(coordinator)
    end_fully(coordinator, producer, state)
    assert [end(coordinator, producer, state) for _ in range(3)] == [EndAnswer.ENDED] * 3
    seen = view(coordinator, producer)
    assert (seen.status, seen.epoch) == (TransactionStatus.COMPLETE_COMMIT, state.epoch)
    assert values(config, dualwrite_topic) == [b"once"]


def test_the_owner_of_a_transaction_that_another_one_ended_goes_on(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, value=b"first")
    end_fully(coordinator, producer, producer.state(coordinator))
    producer.client.commit_transaction(120)
    producer.write(dualwrite_topic, value=b"second")
    producer.client.commit_transaction(120)
    assert values(config, dualwrite_topic) == [b"first", b"second"]


def test_ending_with_abort_aborts(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, value=b"never")
    end_fully(coordinator, producer, producer.state(coordinator), committed=False)
    assert values(config, dualwrite_topic) == []


def test_an_end_that_is_not_possible_says_why(coordinator, producer, dualwrite_topic):
    producer.write(dualwrite_topic)
    state = producer.state(coordinator)
    assert end(coordinator, producer, replace(state, epoch=state.epoch + 1)) is EndAnswer.FENCED
    assert end(coordinator, producer, replace(state, producer_id=state.producer_id + 1)) is EndAnswer.NO_SUCH_ID
    unknown = fresh_id()
    assert coordinator.end({unknown: state}, committed=True, deadline=soon()) == {unknown: EndAnswer.NO_SUCH_ID}
    assert view(coordinator, producer).status is TransactionStatus.ONGOING
    end_fully(coordinator, producer, state)
    assert end(coordinator, producer, state, committed=False) is EndAnswer.INVALID_STATE


def test_an_end_before_any_transaction_says_so(coordinator, producer):
    assert end(coordinator, producer, producer.state(coordinator)) is EndAnswer.INVALID_STATE


def test_retiring_aborts_what_is_open_and_fences_its_producer(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, value=b"never")
    state = producer.state(coordinator)
    coordinator.retire([producer.kafka_id], soon())
    seen = view(coordinator, producer)
    assert seen.status is TransactionStatus.EMPTY
    assert (seen.producer_id, seen.epoch) > (state.producer_id, state.epoch)
    assert end(coordinator, producer, state) is EndAnswer.FENCED
    with pytest.raises(KafkaException):
        producer.client.commit_transaction(120)
    assert values(config, dualwrite_topic) == []


def test_retiring_may_be_repeated_and_done_by_many_at_once(coordinator, producer, dualwrite_topic):
    producer.write(dualwrite_topic)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(coordinator.retire, [producer.kafka_id], soon()) for _ in range(4)]:
            done.result()
    coordinator.retire([producer.kafka_id], soon())
    assert view(coordinator, producer).status is TransactionStatus.EMPTY


def test_retiring_what_is_committed_leaves_it_committed(coordinator, producer, config, dualwrite_topic):
    producer.write(dualwrite_topic, value=b"kept")
    end_fully(coordinator, producer, producer.state(coordinator))
    coordinator.retire([producer.kafka_id], soon())
    assert values(config, dualwrite_topic) == [b"kept"]


def test_a_crowd_of_ids_is_described_ended_and_retired_together(coordinator, config, dualwrite_topic):
    with ThreadPoolExecutor(8) as threads:
        producers = list(threads.map(lambda _: PlainProducer(config), range(80)))
    for producer in producers:
        producer.write(dualwrite_topic, (0, 1))
    states = {producer.kafka_id: producer.state(coordinator) for producer in producers}
    observed = coordinator.open_offsets(list(states.values()), soon())
    assert list(observed) == [producer.first_offsets for producer in producers]

    fenced = {producer.kafka_id for producer in producers[::7]}
    asked = {key: replace(state, epoch=5) if key in fenced else state for key, state in states.items()}
    ended = coordinator.end(asked, committed=True, deadline=soon())
    assert {key for key, answer in ended.items() if answer is EndAnswer.FENCED} == fenced
    assert {key for key, answer in ended.items() if answer is EndAnswer.ENDED} == states.keys() - fenced
    coordinator.end({key: states[key] for key in fenced}, committed=True, deadline=soon())
    for producer in producers:
        wait_for(coordinator, producer, TransactionStatus.COMPLETE_COMMIT)
    coordinator.retire([*states, *states], soon())
    views = coordinator.describe([*states, "unknown"], soon())
    assert {seen.status for kafka_id, seen in views.items() if kafka_id in states} == {TransactionStatus.EMPTY}
    assert views["unknown"].status is TransactionStatus.NO_SUCH_ID
    assert len(values(config, dualwrite_topic)) == 160


def test_nothing_asked_is_nothing_answered(coordinator):
    assert coordinator.describe([], soon()) == {}
    assert coordinator.end({}, committed=True, deadline=soon()) == {}
    assert coordinator.open_offsets([], soon()) == []
    assert coordinator.topic_ids([], soon()) == {}
    coordinator.retire([], soon())


def test_open_offsets_are_those_of_the_delivery_reports(coordinator, producer, config, dualwrite_topic):
    PlainProducer(config).write(dualwrite_topic, (0, 1), count=3)
    for _ in range(2):
        first = dict(producer.write(dualwrite_topic, (0, 1), count=2))
        state = producer.state(coordinator)
        assert coordinator.open_offsets([state], soon()) == [first]
        assert coordinator.producer_open_offsets(state.producer_id, state.epoch, list(first), soon()) == first
        producer.client.commit_transaction(120)


def test_a_finished_transaction_has_no_open_offsets(coordinator, producer, dualwrite_topic):
    producer.write(dualwrite_topic, (0,))
    state = producer.state(coordinator)
    end_fully(coordinator, producer, state)
    assert coordinator.open_offsets([state], soon()) == [{(dualwrite_topic, 0): None}]


def test_open_offsets_are_of_the_states_own_producer_and_topic_alone(coordinator, producer, dualwrite_topic):
    producer.write(dualwrite_topic, (0,))
    state = producer.state(coordinator)
    [first] = state.first_offsets
    others = [
        replace(state, epoch=state.epoch + 1),
        replace(state, producer_id=state.producer_id + 1_000_000),
        replace(state, first_offsets=(replace(first, topic_id="AAAAAAAAAAAAAAAAAAAAAQ"),)),
        replace(state, first_offsets=(replace(first, topic="no-such-topic"),)),
        replace(state, first_offsets=(replace(first, topic="no-such-topic", topic_id=None),)),
    ]
    shown = [list(found.values()) for found in coordinator.open_offsets(others, soon())]
    assert shown == [[None], [None], [], [], []], "what does not exist is left out"
    unnamed = replace(state, first_offsets=(replace(first, topic_id=None),))
    assert coordinator.open_offsets([unnamed, state], soon()) == [{(dualwrite_topic, 0): first.offset}] * 2


def test_a_transaction_of_offsets_alone_has_its_evidence_in_the_offsets_topic(
    coordinator, producer, config, dualwrite_topic
):
    consumer = Consumer({**config, "group.id": dualwrite_topic, "enable.auto.commit": False})
    producer.client.begin_transaction()
    offsets = [TopicPartition(dualwrite_topic, 0, 1)]
    producer.client.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
    consumer.close()
    seen = view(coordinator, producer)
    [(topic, _)] = seen.partitions
    assert topic == "__consumer_offsets"
    shown = coordinator.producer_open_offsets(seen.producer_id, seen.epoch, seen.partitions, soon())
    assert None not in shown.values()

    producer.first_offsets = shown
    state = producer.state(coordinator)
    assert coordinator.prove([state], soon()) == [LogProof.OPEN]
    end_fully(coordinator, producer, state)
    assert coordinator.prove([state], soon()) == [LogProof.COMMITTED]


def test_a_leader_that_is_one_no_longer_is_found_out(coordinator, producer, dualwrite_topic):
    """Followers answer what producers have open, too: the epoch of the leadership tells them apart."""
    first = producer.write(dualwrite_topic, (0,))
    state = producer.state(coordinator)
    topic = coordinator._topics._known[dualwrite_topic]
    outdated = replace(topic.leaders[0], epoch=topic.leaders[0].epoch + 5)
    coordinator._topics._known = {dualwrite_topic: replace(topic, leaders={0: outdated})}
    assert coordinator.producer_open_offsets(state.producer_id, state.epoch, list(first), soon()) == first
    assert coordinator._topics._known[dualwrite_topic] == topic


def test_ids_are_listed_by_prefix(coordinator, config):
    prefix = fresh_id("listed")
    ids = [f"{prefix}.{number}" for number in range(5)]
    for kafka_id in [*ids, f"other-{prefix}"]:
        PlainProducer(config, kafka_id)
    assert coordinator.list_ids(f"{prefix}.", soon()) == ids
    assert coordinator.list_ids(f"{prefix}.*", soon()) == []
    assert set(ids) < set(coordinator.list_ids("", soon()))


def test_the_cluster_and_its_topics_are_named_as_kafka_names_them(coordinator, dualwrite_kafka, dualwrite_topic):
    assert coordinator.cluster_id(soon()) == dualwrite_kafka.cluster_id
    ids = coordinator.topic_ids([dualwrite_topic, "no-such-topic", "__consumer_offsets_not"], soon())
    assert list(ids) == [dualwrite_topic]
    assert len(ids[dualwrite_topic]) == 22
    dualwrite_kafka.delete_topic(dualwrite_topic)
    dualwrite_kafka.create_topic(dualwrite_topic, 2)
    assert coordinator.topic_ids([dualwrite_topic], soon()) != ids


def test_the_longest_transaction_that_the_broker_allows_is_read(coordinator):
    assert coordinator.max_transaction_timeout_ms(soon()) == 900_000


def test_threads_share_a_coordinator(coordinator, config, dualwrite_topic):
    producers = [PlainProducer(config) for _ in range(4)]
    expected = []
    for producer in producers:
        producer.write(dualwrite_topic)
        expected.append(producer.state(coordinator))

    def look(number):
        producer, state = producers[number % 4], expected[number % 4]
        seen = view(coordinator, producer)
        found = coordinator.open_offsets([state], soon())[0]
        return (seen.producer_id, found) == (state.producer_id, producer.first_offsets)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(look, range(200)))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's own advice against just this
def test_a_forked_process_is_refused_and_cannot_disturb_its_parent(coordinator):
    coordinator.cluster_id(soon())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            coordinator.cluster_id(soon())
        except IllegalStateError:
            coordinator.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert coordinator.cluster_id(soon())


def test_a_closed_coordinator_is_refused(config):
    coordinator = KafkaCoordinator(KafkaConfig.parse(config))
    coordinator.cluster_id(soon())
    coordinator.close()
    coordinator.close()
    with pytest.raises(IllegalStateError):
        coordinator.cluster_id(soon())
