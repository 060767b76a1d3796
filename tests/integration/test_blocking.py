"""What open transactions block, on a real broker: records and groups of several programs, in the status and to other users."""

import json
import re
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer, TopicPartition
from harness.patience import PATIENCE_S, wait_until
from harness.spoiling import SpoilingProxy

from dualwrite import DualWriter
from dualwrite.cli.options import commands
from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol import blocking
from dualwrite.serving.app import exposition
from dualwrite.serving.configuration import parse_settings
from dualwrite.serving.supervisor import Snapshot, look
from dualwrite.stores.sql.database import database_of

_LIST_TRANSACTIONS = 66

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def begin(kafka, kafka_id, dualwrite_topic):
    """Begins a transaction of another program, and leaves it open."""
    with ExitStack() as later:

        def made(suffix, records, partition=0):
            producer = Producer({**kafka, "transactional.id": f"{kafka_id}-{suffix}"})
            producer.init_transactions(PATIENCE_S)
            later.callback(producer.abort_transaction, PATIENCE_S)
            producer.begin_transaction()
            for number in range(records):
                producer.produce(dualwrite_topic, b"%d" % number, partition=partition)
            producer.flush(PATIENCE_S)
            return f"{kafka_id}-{suffix}", producer

        yield made


def read_to_the_end(kafka, group, topic, count, *, isolation="read_committed", partition=0):
    """Read so many messages, commit, and leave. The client commits the offset after the last message, before its marker."""
    settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    with closing(Consumer({**kafka, **settings})) as consumer:
        consumer.assign([TopicPartition(topic, partition, 0)])
        read = 0
        while read < count:
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            assert message.error() is None
            read += 1
        consumer.commit(offsets=[TopicPartition(topic, partition, message.offset() + 1)], asynchronous=False)


@pytest.fixture
def open_transactions(kafka, url):
    def asked(*more):
        ran = CliRunner().invoke(
            commands, ["status", "--json", "--url", url, "--bootstrap-server", kafka["bootstrap.servers"], *more]
        )
        return {one["kafka_id"]: one for one in json.loads(ran.stdout)["open_transactions"]}, ran

    return asked


def test_records_and_groups_behind_every_open_transaction_are_shown(
    begin, open_transactions, kafka, engine, dualwrite_topic
):
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        for number in range(3):
            with writer.transaction() as tx:
                tx.produce(dualwrite_topic, value=f"{number}", partition=0)
        read_to_the_end(kafka, f"at the end {dualwrite_topic}", dualwrite_topic, 3)
        read_to_the_end(kafka, f"slow {dualwrite_topic}", dualwrite_topic, 2)
        first, _ = begin("0-17", 5)
        second, _ = begin("1-17", 2)
        read_to_the_end(kafka, f"uncommitted {dualwrite_topic}", dualwrite_topic, 8, isolation="read_uncommitted")
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="behind", partition=0)
            wait_until(lambda: open_transactions()[0][first]["groups"], otherwise=lambda: open_transactions()[0])
            found, ran = open_transactions()
            # Another worker's test may have a writer of that name on the same broker.
            here = [one for one in found.values() if dualwrite_topic in {held["topic"] for held in one["partitions"]}]
            [own] = [one for one in here if one["writer"] == "orders"]
        assert dualwrite_topic not in ran.stderr, "other tests have left partitions that do not exist any more"
        words = CliRunner().invoke(
            commands, ["status", "--url", writer_url(engine), "--bootstrap-server", kafka["bootstrap.servers"]]
        )
    # Three messages and their markers, five records, two records; the writer's own may be behind them by now.
    [held] = found[first]["partitions"]
    assert (held["first_offset"], held["records"]) == (6, found[first]["records"])
    assert found[first]["records"] >= 7
    assert [one["group"] for one in found[first]["groups"]] == [f"at the end {dualwrite_topic}"]
    assert found[first]["groups"][0]["offset"] in {3, 4, 5}, "behind the last message, and not behind every marker"
    assert found[second]["partitions"][0]["first_offset"] == 11
    assert found[second]["groups"] == [], "the first one holds them back"
    assert (found[first]["ours"], found[first]["made_by"], own["ours"]) == (False, "Flink, by its id", True)
    assert f"dualwrite recover {first} --state " in found[first]["way_on"]
    assert own["way_on"] is None
    assert list(found).index(first) < list(found).index(second), "what stops a group comes first"
    assert f"at the end {dualwrite_topic}" in words.stdout
    assert "not ours: Flink, by its id" in words.stdout


def writer_url(engine):
    return engine.url.render_as_string(hide_password=False)


def test_a_status_of_one_writer_shows_its_own_alone(begin, open_transactions, kafka, engine, dualwrite_topic):
    other, _ = begin("0-1", 1)
    with DualWriter("orders", kafka=kafka, database=engine) as writer, writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="one", partition=0)
        wait_until(lambda: open_transactions("orders")[0])
        assert {one["writer"] for one in open_transactions("orders")[0].values()} == {"orders"}
        assert other in open_transactions()[0]


def test_late_transactions_of_other_programs_are_counted_by_partitions(
    begin, kafka, url, dualwrite_topic, tmp_path, monkeypatch
):
    text = f'[target.shop]\nurl = "{url}"\nkafka.bootstrap.servers = "{kafka["bootstrap.servers"]}"\n'
    [target] = parse_settings(text, "serve.toml", directory=tmp_path, environment={}).targets

    def late():
        with closing(database_of(url)) as database:
            found = Snapshot("shop", round=look(target, database))
        shown = exposition([SimpleNamespace(snapshot=found)]).decode()
        counted = re.findall(
            r'^dualwrite_partitions_with_late_transactions{ours="(\w+)",target="shop"} (\S+)$', shown, re.MULTILINE
        )
        return {ours: float(count) for ours, count in counted}

    monkeypatch.setattr(blocking, "LATE_S", 0.2)
    before = late()  # other tests may have left something on this broker
    begin("one", 2)
    begin("two", 1)
    begin("other-place", 1, partition=1)
    wait_until(lambda: late() == {"true": before["true"], "false": before["false"] + 2}, otherwise=late)
    monkeypatch.setattr(blocking, "LATE_S", 3600.0)
    assert late() == {"true": 0.0, "false": 0.0}, "they are young"


def test_what_was_committed_stops_nobody_any_more(begin, open_transactions, kafka, dualwrite_topic, kafka_id):
    name, producer = begin("0-2", 1)
    assert name in open_transactions()[0]
    producer.commit_transaction(PATIENCE_S)
    wait_until(lambda: name not in open_transactions()[0])
    producer.begin_transaction()
    with closing(KafkaCoordinator(KafkaConfig.parse(kafka))) as coordinator:
        opened = coordinator.open_now(Deadline(PATIENCE_S))
        assert name not in opened
        unknown = coordinator.what_blocks(opened, Deadline(PATIENCE_S)).unknown
        assert not [words for words in unknown if dualwrite_topic in words], "other tests' topics may be gone"


class _Repeated:
    """Answers each time as it did the first time: a broker that lists what it coordinated once (KAFKA-21481)."""

    def __init__(self):
        self.first = None
        self.repeated = 0

    def __call__(self, frame):
        if self.first is None:
            self.first = frame
            return frame
        self.repeated += 1
        stale = self.first[:4] + frame[4:8] + self.first[8:]
        assert stale != frame, "the broker's own answer differs"
        return stale


def test_a_stale_list_of_transactions_tells_nothing(begin, dualwrite_kafka, url, dualwrite_topic):
    """The list of a broker that leads no more says that a transaction is open; its present coordinator knows better."""
    name, producer = begin("0-3", 1)
    stale = _Repeated()
    with SpoilingProxy(dualwrite_kafka) as proxy:
        with closing(KafkaCoordinator(KafkaConfig.parse(proxy.client_config()))) as coordinator:
            proxy.changes[_LIST_TRANSACTIONS] = stale
            assert name in coordinator.open_now(Deadline(PATIENCE_S))
            producer.commit_transaction(PATIENCE_S)
            wait_until(lambda: name not in coordinator.open_now(Deadline(PATIENCE_S)))
            before = stale.repeated
            assert before >= 1
        document = _status(url, proxy.client_config()["bootstrap.servers"])
        assert stale.repeated > before
        assert name not in {one["kafka_id"] for one in document["open_transactions"]}
    producer.begin_transaction()


def _status(url, servers):
    return json.loads(
        CliRunner().invoke(commands, ["status", "--json", "--url", url, "--bootstrap-server", servers]).stdout
    )
