"""A consumer whose handler is a coroutine, on SQLite, a simulated Kafka, and input from memory."""

import asyncio
import threading

import pytest
from harness.served import SETTINGS, TOPIC

from dualwrite import AsyncExactlyOnceConsumer, TransactionAborted
from dualwrite.consumer import consumer as member
from dualwrite.errors import IllegalStateError
from dualwrite.writing.dual_write import DualWrite

from .messages import read

pytest.importorskip("aiosqlite")
pytestmark = [
    # A driver that is cancelled while it connects or closes leaves the rest to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Coordinator:
    def __init__(self, _config):
        pass

    def topic_ids(self, topics, _deadline):
        return dict.fromkeys(topics)

    def close(self):
        pass


class Input:
    """A partition in memory, of which a member gets what is behind its committed offset."""

    def __init__(self, count):
        self.messages = {("input", 0): read(count)}
        self.threads = set()

    def __call__(self, _settings, partitions, offsets, _peers, _stop):
        self.partitions, self.offsets = partitions, offsets
        return self

    def subscribe(self, _topics):
        made = self.partitions.add(self.messages)
        found = self.offsets.start(self, made)
        for one in made:
            self._give(one.name, max(0, found[one.name]))

    def get_watermark_offsets(self, one, **_):
        return 0, len(self.messages[one.topic, one.partition])

    def _give(self, name, offset):
        self.partitions.put(self.messages[name][offset:])

    def poll(self):
        self.threads.add(threading.current_thread())
        for one in self.partitions.all():
            if one.rewind and not one.busy:
                [offset] = self.offsets.committed(None, [one]).values()
                self.partitions.rewound(one, offset)
                self._give(one.name, offset)
        threading.Event().wait(0.01)
        return False

    def lag(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def make(shop, monkeypatch):
    """Makes consumers of two messages."""
    monkeypatch.setattr(member, "KafkaCoordinator", Coordinator)
    monkeypatch.setattr(member, "pause_s", lambda _: 0.0)

    def make(handler, **options):
        source = Input(2)
        monkeypatch.setattr(member, "Reading", source)
        url = shop.engine.url.render_as_string(False)
        given = {"kafka": SETTINGS, "database": url, "offsets": "database", **options}
        found = AsyncExactlyOnceConsumer("group", "0", topics=["input"], handler=handler, **given)
        found.source = source
        return found

    return make


async def put(tx, messages):
    for message in messages:
        number = message.offset()
        await tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
        await tx.produce(TOPIC, str(number), partition=0)


def test_each_message_is_written_once_and_another_thread_reads(shop, make):
    errors = [TransactionAborted("a deadlock"), ValueError("once")]

    async def handler(tx, messages):
        await put(tx, messages)
        if errors:
            raise errors.pop()

    consumer = make(handler)
    asyncio.run(consumer.run(max_messages=2))
    assert shop.both_have(0, 1)
    assert consumer.progress.messages == 2
    assert consumer.progress.failed_attempts == 2
    assert threading.current_thread() not in consumer.source.threads
    again = make(put)
    asyncio.run(again.run(idle_s=0.1))
    assert again.progress.messages == 0
    assert shop.both_have(0, 1)


def test_stop_lets_the_transaction_under_way_end(shop, make):
    async def main():
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handler(tx, messages):
            await put(tx, messages)
            begun.set()
            await go_on.wait()

        consumer = make(handler)
        running = asyncio.create_task(consumer.run())
        await begun.wait()
        ended = asyncio.ensure_future(consumer.stop())
        assert not (await asyncio.wait([ended], timeout=0.1))[0]
        go_on.set()
        await ended
        await running
        await consumer.stop()

    asyncio.run(main())
    assert shop.both_have(0, 1)


def test_a_cancellation_aborts_what_is_not_decided_and_the_messages_come_again(shop, make):
    async def main():
        begun = asyncio.Event()

        async def handler(tx, messages):
            await put(tx, messages)
            begun.set()
            await asyncio.sleep(60)

        consumer = make(handler)
        running = asyncio.create_task(consumer.run())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert consumer.progress.messages == 0

    asyncio.run(main())
    assert shop.both_have()
    asyncio.run(make(put).run(max_messages=2))
    assert shop.both_have(0, 1)


@pytest.mark.parametrize(("method", "written"), [("_prepare", False), ("_decide", True)])
def test_a_cancellation_during_the_commit_aborts_or_completes(shop, make, monkeypatch, method, written):
    real = getattr(DualWrite, method)

    async def main():
        def cancelling(self, *args):
            running.cancel()
            return real(self, *args)

        monkeypatch.setattr(DualWrite, method, cancelling)
        consumer = make(put)
        running = asyncio.create_task(consumer.run())
        with pytest.raises(asyncio.CancelledError):
            await running
        assert consumer.progress.messages == (2 if written else 0)

    asyncio.run(main())
    monkeypatch.setattr(DualWrite, method, real)
    assert shop.both_have(*([0, 1] if written else []))
    asyncio.run(make(put).run(idle_s=0.2))
    assert shop.both_have(0, 1)


def test_a_handler_that_is_cancelled_alone_ends_the_consumer_with_an_error(shop, make):
    async def handler(tx, messages):
        await put(tx, messages)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(IllegalStateError, match="cancelled"):
        asyncio.run(make(handler).run())
    assert shop.both_have()


def test_what_a_handler_sends_after_its_return_is_refused(shop, make):
    late = []

    async def main():
        async def handler(tx, messages):
            await put(tx, messages)
            late.append(asyncio.create_task(send(tx)))

        async def send(tx):
            while True:
                await tx.produce(TOPIC, "late", partition=1)
                await asyncio.sleep(0)

        await make(handler).run(max_messages=2)
        with pytest.raises(IllegalStateError, match="the handler has returned"):
            await late[0]

    asyncio.run(main())
    assert shop.both_have(0, 1)


def test_a_plain_function_is_refused(shop, make):
    def handler(tx, messages):
        pass

    consumer = make(handler)
    with pytest.raises(IllegalStateError, match="not a coroutine function"):
        asyncio.run(consumer.run())
    assert consumer.progress.messages == 0
    with pytest.raises(IllegalStateError, match="already run"):
        asyncio.run(consumer.run())


def test_the_end_of_the_event_loop_leaves_nothing_open(shop, make):
    async def main():
        begun = asyncio.Event()

        async def handler(tx, messages):
            await put(tx, messages)
            begun.set()
            await asyncio.sleep(60)

        main.running = asyncio.create_task(make(handler).run())
        await begun.wait()

    asyncio.run(main())
    assert shop.both_have()
    asyncio.run(make(put).run(max_messages=2))
    assert shop.both_have(0, 1)
