"""FastStream's handlers in dual writes, on a real broker: rows, what is published, and the offsets, together or not at all."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from harness.orders import Order, on_postgresql
from harness.page_examples import example, run_example
from harness.places import ROOT
from sqlalchemy import insert, text

from dualwrite import (
    AsyncDualWriter,
    AsyncTransaction,
    CompletionPending,
    ConfigurationError,
    TransactionAborted,
    recover,
)
from dualwrite.protocol.lives import WriteState
from dualwrite.testing.checker import read_committed

pytest.importorskip("faststream", reason="the extra 'faststream' is not installed")

from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker
from faststream.confluent.message import KafkaMessage
from faststream.exceptions import RejectMessage

from dualwrite.frameworks.faststream import DualWrite, in_transaction, opened
from dualwrite.writing.lane import Lane

pytestmark = on_postgresql


@pytest.fixture
def incoming(dualwrite_kafka):
    """A topic with one partition, with ten messages."""
    topic = dualwrite_kafka.create_topic(f"payments-{secrets.token_hex(4)}", 1)
    producer = Producer(dualwrite_kafka.client_config())
    for number in range(10):
        producer.produce(topic, str(number), key=str(number))
    producer.flush()
    yield topic
    dualwrite_kafka.delete_topic(topic)


@pytest.fixture
def group():
    return f"receipts-{secrets.token_hex(4)}"


@pytest.fixture
def both(engine, kafka, dualwrite_topic, incoming, group):
    """The rows, the messages, and the group's offset."""

    def read():
        messages = [message.value.decode() for message in read_committed(kafka, dualwrite_topic)]
        with engine.connect() as made:
            rows = list(made.scalars(text("SELECT id FROM orders ORDER BY id")))
        consumer = Consumer({**kafka, "group.id": group})
        (found,) = consumer.committed([TopicPartition(incoming, 0)], timeout=30)
        consumer.close()
        return rows, sorted(map(int, messages)), found.offset

    return read


class Broken(Exception):
    """Raised by a handler."""


def run(engine_url, kafka, incoming, group, handle, *, publishes=None, policy=AckPolicy.MANUAL, until=9, batch=False):
    """Serve until a message was handled that the handler returns ``until`` for."""

    async def main():
        writer = AsyncDualWriter("receipts", kafka=kafka, database=engine_url)
        broker = KafkaBroker(kafka["bootstrap.servers"], middlewares=[in_transaction(writer)])
        app = FastStream(broker, lifespan=opened(writer))
        seen = []

        async def served(body, tx):
            seen.append(body)
            result = await handle(body, tx, broker)
            if (max(map(int, body)) if batch else int(body)) == until:
                app.exit()
            return result

        if batch:

            @broker.subscriber(incoming, group_id=group, auto_offset_reset="earliest", ack_policy=policy, batch=True)
            async def one(body: list[int], tx: DualWrite):
                return await served(body, tx)
        else:

            @broker.subscriber(incoming, group_id=group, auto_offset_reset="earliest", ack_policy=policy)
            async def one(body: int, tx: DualWrite):
                return await served(body, tx)

        if publishes is not None:
            broker.publisher(publishes)(one)
        await asyncio.wait_for(app.run(), 100)
        return seen

    return asyncio.run(main())


def place(orders, fails=()):
    left = list(fails)

    async def handle(body, tx, broker):
        await tx.connection.execute(insert(orders).values(id=body))
        if body in left:
            left.remove(body)
            raise Broken
        return body

    return handle


def test_a_handlers_row_its_result_and_its_offset_commit_together_and_a_failure_comes_again(
    url, kafka, incoming, group, dualwrite_topic, both, orders
):
    seen = run(url, kafka, incoming, group, place(orders, fails=[3, 3, 7]), publishes=dualwrite_topic)
    assert seen == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 8, 9]
    assert both() == (list(range(10)), list(range(10)), 10)


def test_what_a_handler_publishes_by_the_broker_commits_too_and_keeps_its_key_and_headers(
    url, kafka, incoming, group, dualwrite_topic, both, orders
):
    async def handle(body, tx, broker):
        await tx.connection.execute(insert(orders).values(id=body))
        await broker.publish(
            body, topic=dualwrite_topic, key=b"k", headers={"of": "a handler"}, correlation_id=f"c{body}"
        )
        if body == 4 and not failed:
            failed.append(body)
            raise Broken

    failed = []
    run(url, kafka, incoming, group, handle)
    assert both() == (list(range(10)), list(range(10)), 10)
    found = read_committed(kafka, dualwrite_topic)
    assert {record.key for record in found} == {b"k"}
    headers = sorted(dict(record.headers)["correlation_id"] for record in found)
    assert headers == [f"c{number}".encode() for number in range(10)]
    assert {dict(record.headers)["of"] for record in found} == {b"a handler"}
    assert {dict(record.headers)["content-type"] for record in found} == {b"application/json"}


def test_batches(url, kafka, incoming, group, dualwrite_topic, both, orders):
    async def handle(body, tx, broker):
        await tx.connection.execute(insert(orders), [{"id": number} for number in body])
        await broker.publish_batch(*body, topic=dualwrite_topic)
        if len(failed) < 1:
            failed.append(body)
            raise Broken

    failed = []
    run(url, kafka, incoming, group, handle, batch=True)
    assert both() == (list(range(10)), list(range(10)), 10)


def test_a_message_that_is_rejected_is_left_behind(url, kafka, incoming, group, dualwrite_topic, both, orders):
    async def handle(body, tx, broker):
        await tx.connection.execute(insert(orders).values(id=body))
        if body == 5:
            raise RejectMessage
        return body

    assert run(url, kafka, incoming, group, handle, publishes=dualwrite_topic) == list(range(10))
    expected = [number for number in range(10) if number != 5]
    assert both() == (expected, expected, 10)


def test_a_completion_that_is_pending_is_no_failure(
    url, kafka, incoming, group, dualwrite_topic, both, orders, monkeypatch
):
    done, complete = [], Lane.complete

    def fail(self, *arguments, **options):
        done.append(1)
        if len(done) == 3:
            raise CompletionPending("Kafka does not answer", transactional_id=self.transactional_id)
        return complete(self, *arguments, **options)

    monkeypatch.setattr(Lane, "complete", fail)
    assert run(url, kafka, incoming, group, place(orders), publishes=dualwrite_topic) == list(range(10))
    assert both() == (list(range(10)), list(range(10)), 10)


def test_a_block_whose_offsets_are_refused_has_ended_before_its_message_comes_again(
    url, kafka, incoming, group, dualwrite_topic, both, orders, monkeypatch
):
    """As when the group has given the partition to another member meanwhile."""
    begun, at_nack = [], []
    send, nack = AsyncTransaction.send_offsets_to_transaction, KafkaMessage.nack

    async def refused(self, *arguments):
        begun.append(self)
        if len(begun) == 3:
            raise TransactionAborted("another generation", transactional_id=self.transactional_id)
        await send(self, *arguments)

    async def noted(self):
        at_nack.append(begun[-1].state)
        await nack(self)

    monkeypatch.setattr(AsyncTransaction, "send_offsets_to_transaction", refused)
    monkeypatch.setattr(KafkaMessage, "nack", noted)
    seen = run(url, kafka, incoming, group, place(orders), publishes=dualwrite_topic)
    assert seen == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9]
    assert at_nack == [WriteState.ABORTED]
    assert both() == (list(range(10)), list(range(10)), 10)


def test_a_subscriber_that_commits_offsets_by_itself_is_refused(url, kafka, incoming, group, orders, caplog):
    async def main():
        writer = AsyncDualWriter("receipts", kafka=kafka, database=url)
        broker = KafkaBroker(kafka["bootstrap.servers"], middlewares=[in_transaction(writer)])
        handled = asyncio.Event()

        @broker.subscriber(incoming, group_id=group, auto_offset_reset="earliest")
        async def one(body: int, tx: DualWrite):
            handled.set()

        async with writer, broker:
            await broker.start()
            for _ in range(300):
                if "commits offsets by itself" in caplog.text:
                    break
                await asyncio.sleep(0.1)
        return handled.is_set()

    assert not asyncio.run(main())
    assert "ack_policy=AckPolicy.MANUAL" in caplog.text
    assert issubclass(ConfigurationError, Exception)


def test_the_code_of_the_page(url, kafka, engine, incoming, group, dualwrite_topic, both):
    (code,) = example("frameworks.md", "FastStream")
    shown = code.replace('"payments"', f'"{incoming}", auto_offset_reset="earliest"')
    shown = shown.replace('group_id="receipts"', f'group_id="{group}"').replace(
        'publisher("receipts")', f'publisher("{dualwrite_topic}")'
    )
    names = run_example(shown, dualwrite_topic, kafka=kafka, url=url, Order=Order)

    async def main():
        running = asyncio.create_task(names["app"].run())
        while len(await asyncio.to_thread(rows)) < 10:
            assert not running.done()
            await asyncio.sleep(0.1)
        names["app"].exit()
        await asyncio.wait_for(running, 60)

    def rows():
        with engine.connect() as made:
            return list(made.scalars(text("SELECT id FROM orders ORDER BY id")))

    asyncio.run(asyncio.wait_for(main(), 100))
    assert rows() == list(range(10))
    found = [json.loads(message.value)["paid"] for message in read_committed(kafka, dualwrite_topic)]
    assert sorted(found) == list(range(10))


PROGRAM = """
import asyncio, sys
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker
from faststream.confluent.message import KafkaMessage
from sqlalchemy import text
from dualwrite import AsyncDualWriter
from dualwrite.frameworks.faststream import DualWrite, in_transaction, opened

writer = AsyncDualWriter("receipts", kafka={kafka!r}, database={url!r})
broker = KafkaBroker({bootstrap!r}, middlewares=[in_transaction(writer)])
app = FastStream(broker, lifespan=opened(writer))

@broker.publisher({topic!r})
@broker.subscriber({incoming!r}, group_id={group!r}, auto_offset_reset="earliest", ack_policy=AckPolicy.MANUAL)
async def place(body: int, tx: DualWrite):
    await tx.connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {{"id": body}})
    if body == 9:
        app.exit()
    return body

asyncio.run(asyncio.wait_for(app.run(), 100))
"""


@pytest.mark.parametrize("failpoint", ["write.prepared:4", "write.decided:4"])
def test_a_process_that_is_killed_goes_on_where_both_sides_are(
    url, engine, kafka, incoming, group, dualwrite_topic, both, tmp_path, failpoint
):
    file = tmp_path / "service.py"
    given = {
        "kafka": dict(kafka), "url": url, "bootstrap": kafka["bootstrap.servers"], "topic": dualwrite_topic,
        "incoming": incoming, "group": group,
    }  # fmt: skip
    file.write_text(textwrap.dedent(PROGRAM.format(**given)), encoding="utf-8")

    def start(point):
        return subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "DUALWRITE_FAILPOINT": point},
            capture_output=True, text=True, timeout=150, check=False, cwd=ROOT,
        )  # fmt: skip

    assert start(failpoint).returncode == -signal.SIGKILL
    recover("receipts", kafka=kafka, database=engine)
    again = start("")
    assert again.returncode == 0, again.stderr
    assert both() == (list(range(10)), list(range(10)), 10)
