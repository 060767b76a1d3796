"""Members of a group with state: a partition's store goes on with its next member, and counts each message once."""

import secrets
import signal
from collections import Counter

import pytest
from confluent_kafka import Producer
from harness.members import make_member, running, start_member
from harness.patience import wait_until

from dualwrite import ConfigurationError, ExactlyOnceConsumer
from dualwrite.errors import ChangelogDiffers, IllegalStateError
from dualwrite.state import KeyValueStore, PartitionStores
from dualwrite.testing.checker import read_committed

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

PARTITIONS, KEYS = 2, 7


@pytest.fixture
def place(kafka, migrated_database, dualwrite_kafka):
    name = secrets.token_hex(4)
    source, target, changelog = (f"{kind}-{name}" for kind in ("input", "counts", "changelog"))
    dualwrite_kafka.create_topic(source, PARTITIONS)
    dualwrite_kafka.create_topic(target, 1)
    dualwrite_kafka.create_topic(changelog, PARTITIONS, config={"cleanup.policy": "compact"})
    yield {"kafka": dict(kafka), "url": migrated_database, "source": source, "target": target, "changelog": changelog}
    for topic in (source, target, changelog):
        dualwrite_kafka.delete_topic(topic)


@pytest.fixture
def group():
    return f"counters-{secrets.token_hex(4)}"


def fill(kafka, topic, begin, end):
    producer = Producer(kafka)
    for number in range(begin, end):
        producer.produce(topic, key=f"k{number % KEYS}", value=b"")
    producer.flush()


def counted(kafka, topic):
    """The values of each key in the order of their messages."""
    found = {}
    for record in read_committed(kafka, topic):
        found.setdefault(record.key.decode(), []).append(int(record.value))
    return found


@pytest.mark.parametrize(
    ("point", "offsets"),
    [
        ("state.before_commit:3", "kafka"),
        pytest.param("state.logged:3", "database", marks=pytest.mark.thorough),
        pytest.param("state.committed:3", "kafka", marks=pytest.mark.thorough),
        pytest.param("write.decided:3", "database", marks=pytest.mark.thorough),
    ],
)
def test_a_partitions_state_goes_on_with_its_next_member(tmp_path, kafka, place, group, point, offsets):
    changelog = place.pop("changelog")
    options = {**place, "offsets": offsets, "protocol": "cooperative", "max_messages": 10, "workers": 2}
    source, target = place["source"], place["target"]
    fill(kafka, source, 0, 200)
    dead = start_member("dead", group, point, directory=str(tmp_path / "dead"), changelog=changelog, **options)
    assert dead.wait() == -signal.SIGKILL
    with (
        PartitionStores(tmp_path / "first", kafka=kafka, changelog=changelog) as of_first,
        PartitionStores(tmp_path / "second", kafka=kafka, changelog=changelog) as of_second,
    ):
        first = make_member("first", group, asynchronous=True, state=of_first, **options)
        second = make_member("second", group, state=of_second, **options)
        with running(first):
            wait_until(lambda: first.progress.messages > 0)
            filled = 200
            with running(second):
                while not second.progress.messages:  # the first may be done with all there is when the second joins
                    fill(kafka, source, filled, filled + 20)
                    filled += 20
                    wait_until(lambda: len(read_committed(kafka, target)) >= filled)  # noqa: B023 - called in this round
            fill(kafka, source, filled, filled + 40)  # the partition that the second has left comes back to the first
            filled += 40
            wait_until(lambda: len(read_committed(kafka, target)) >= filled)
    expected = Counter(f"k{number % KEYS}" for number in range(filled))
    assert counted(kafka, target) == {key: list(range(1, count + 1)) for key, count in expected.items()}
    replayed = {key: values[-1] for key, values in counted(kafka, changelog).items()}
    assert replayed == expected
    stored = {}
    for partition in range(PARTITIONS):
        with KeyValueStore(tmp_path / "first" / str(partition)) as store:
            stored |= {key.decode(): int(value) for key, value in store.range()}
    assert stored == expected


def test_a_handler_that_fails_leaves_its_stores_as_they_were(tmp_path, kafka, place, group):
    fill(kafka, place["source"], 0, 60)
    seen = []

    def handle(tx, messages):
        for message in messages:
            store = stores.of(message)
            store.put(message.key(), str(int(store.get(message.key()) or 0) + 1).encode())
        seen.append(messages[0])
        if len(seen) in {1, 3}:
            raise ZeroDivisionError

    with PartitionStores(tmp_path, kafka=kafka, changelog=place["changelog"]) as stores:
        member = ExactlyOnceConsumer(
            group, "0", topics=[place["source"]], handler=handle, kafka=kafka, database=place["url"], state=stores,
            max_messages=20,
        )  # fmt: skip
        member.run(max_messages=60)
        with pytest.raises(IllegalStateError, match="call of.. in the handler"):
            stores.of(seen[0])
    replayed = {key: values[-1] for key, values in counted(kafka, place["changelog"]).items()}
    assert replayed == Counter(f"k{number % KEYS}" for number in range(60))


def test_a_handler_writes_its_store_outside_of_its_savepoints(tmp_path, kafka, place, group):
    fill(kafka, place["source"], 0, 10)
    refused = []

    def handle(tx, messages):
        for message in messages:
            store = stores.of(message)
            try:
                with tx.connection.begin_nested():
                    store.put(message.key(), b"inside")
            except IllegalStateError as error:
                refused.append(error)
            store.put(message.key(), b"1")

    with PartitionStores(tmp_path, kafka=kafka, changelog=place["changelog"]) as stores:
        ExactlyOnceConsumer(
            group, "0", topics=[place["source"]], handler=handle, kafka=kafka, database=place["url"], state=stores
        ).run(max_messages=10)
    assert len(refused) == 10
    assert {value for values in counted(kafka, place["changelog"]).values() for value in values} == {1}


def test_a_changelog_that_does_not_fit_stops_the_member_before_a_handler_runs(tmp_path, kafka, place, group):
    fill(kafka, place["source"], 0, 10)
    for partition in range(PARTITIONS):
        with KeyValueStore(tmp_path / str(partition)) as store:
            store.follow("another/0")
    with PartitionStores(tmp_path, kafka=kafka, changelog=place["changelog"]) as stores:
        member = ExactlyOnceConsumer(
            group, "0", topics=[place["source"]], handler=lambda *_: pytest.fail("it ran"), kafka=kafka,
            database=place["url"], state=stores,
        )  # fmt: skip
        with pytest.raises(ChangelogDiffers, match="follows the changelog another/0"):
            member.run()


@pytest.mark.parametrize("topics", [["a", "b"], ["^a.*"]])
def test_a_consumer_with_state_reads_one_topic(tmp_path, topics):
    stores = PartitionStores(tmp_path, kafka={}, changelog="changelog")
    with pytest.raises(ConfigurationError, match="must read one topic"):
        ExactlyOnceConsumer(
            "group", "0", topics=topics, handler=print, kafka={"bootstrap.servers": "nowhere:1"}, database="sqlite://",
            state=stores,
        )  # fmt: skip


@pytest.mark.parametrize("outbox", ["fallback", "always"])
def test_the_changelog_of_a_consumer_cannot_wait_in_the_database(tmp_path, outbox):
    stores = PartitionStores(tmp_path, kafka={}, changelog="changelog")
    with pytest.raises(ConfigurationError, match="may wait in the database"):
        ExactlyOnceConsumer(
            "group", "0", topics=["a"], handler=print, kafka={"bootstrap.servers": "nowhere:1"}, database="sqlite://",
            state=stores, writer={"outbox": outbox},
        )  # fmt: skip
