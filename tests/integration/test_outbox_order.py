"""Messages that wait in the database keep their order and are there once, whatever their sender and other blocks do meanwhile.

Each test brings blocks and the sender to the points of one interleaving, and then reads the topic: what was decided before
another block began comes first.
"""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient
from harness.orders import on_postgresql
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import create_engine, insert, text

from dualwrite import DualWriter, Fenced, TransactionInDoubt, Unavailable, WriterLimits, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.errors import DatabaseWentBack
from dualwrite.recovery import in_doubt
from dualwrite.stores.sql.outbox import SqlOutbox
from dualwrite.testing import EmbeddedKafka, PostgresProxy, read_committed
from dualwrite.writing.sender import Sending

pytestmark = on_postgresql

LIMITS = WriterLimits(lane_timeout_s=PATIENCE_S)


@contextmanager
def held(*points, threads=""):
    """Whoever comes to one of these points first waits there: the events of its arrival and of its release.

    ``threads`` is the end of the names of those that count.
    """
    gates = {point: (threading.Event(), threading.Event()) for point in points}

    def wait(name):
        if name in gates and threading.current_thread().name.endswith(threads):
            arrived, released = gates[name]
            if not arrived.is_set():
                arrived.set()
                assert released.wait(PATIENCE_S), f"nobody has released {name}"

    with failpoints.watched(wait):
        try:
            yield gates
        finally:
            for _, released in gates.values():
                released.set()


def put(writer, topic, orders, number, **options):
    """One block. Returns whether its message waits."""
    with writer.transaction(**options) as tx:
        tx.produce(topic, value=str(number), key="k")
        tx.connection.execute(insert(orders).values(id=number))
    return tx.outbox


def put_in(writer, topic, orders, thread, number):
    """One block of one of several threads, each with a key of its own. Returns whether its message waits."""
    with writer.transaction() as tx:
        tx.produce(topic, value=str(number), key=str(thread))
        tx.connection.execute(insert(orders).values(id=thread * 1_000_000 + number))
        tx.connection.execute(text("SELECT pg_sleep(0.02)"))  # the shares of eight threads overlap at any moment
    return tx.outbox


def values(kafka, topic):
    return [int(record.value) for record in read_committed(kafka, topic)]


def mode(engine):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT mode FROM dualwrite_outbox_mode"))


def waiting(engine):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM dualwrite_outbox"))


def execute(engine, statement):
    with engine.begin() as connection:
        connection.execute(text(statement))


def somebody_waits_for_a_lock(engine):
    asked = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with engine.connect() as connection:
        return bool(connection.scalar(asked))


def is_direct(engine):
    return mode(engine) == "direct" and not waiting(engine)


def test_a_block_does_not_overtake_what_waits(kafka, engine, orders, dualwrite_topic):
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
        with held("outbox.read") as gates:
            assert put(writer, dualwrite_topic, orders, 1, outbox="always")
            arrived, released = gates["outbox.read"]
            assert arrived.wait(PATIENCE_S)
            put(writer, dualwrite_topic, orders, 2)
            released.set()
        wait_until(lambda: is_direct(engine))
        assert not put(writer, dualwrite_topic, orders, 3)
    assert values(kafka, dualwrite_topic) == [1, 2, 3]


def test_a_block_that_waits_for_the_last_send_looks_again_and_goes_directly(kafka, engine, orders, dualwrite_topic):
    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer,
        ThreadPoolExecutor(1) as threads,
    ):
        with held("outbox.locked") as gates:
            put(writer, dualwrite_topic, orders, 1, outbox="always")
            arrived, released = gates["outbox.locked"]
            assert arrived.wait(PATIENCE_S)
            block = threads.submit(put, writer, dualwrite_topic, orders, 2)
            wait_until(lambda: somebody_waits_for_a_lock(engine))
            released.set()
            assert not block.result(PATIENCE_S)
        assert not put(writer, dualwrite_topic, orders, 3)
    assert values(kafka, dualwrite_topic) == [1, 2, 3]


def test_the_last_send_waits_for_a_block_whose_messages_wait_and_then_sends_them(
    kafka, engine, orders, dualwrite_topic
):
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
        with held("outbox.read") as gates:
            put(writer, dualwrite_topic, orders, 1, outbox="always")
            arrived, released = gates["outbox.read"]
            assert arrived.wait(PATIENCE_S)
            with writer.transaction() as tx:
                tx.produce(dualwrite_topic, value="2", key="k")
                tx.connection.execute(insert(orders).values(id=2))
                released.set()
                # It holds a share of the mode, for which the last send has to wait.
                wait_until(lambda: somebody_waits_for_a_lock(engine) or mode(engine) == "direct", pause_s=0.01)
        wait_until(lambda: mode(engine) == "direct")
        assert not put(writer, dualwrite_topic, orders, 3)
        assert not waiting(engine)
    assert values(kafka, dualwrite_topic) == [1, 2, 3]


def test_a_message_with_a_lower_number_that_is_committed_later_is_not_left_behind(
    kafka, engine, orders, dualwrite_topic
):
    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer,
        ThreadPoolExecutor(1) as threads,
    ):
        with held("write.recorded") as gates:
            lower = threads.submit(put, writer, dualwrite_topic, orders, 1)
            arrived, released = gates["write.recorded"]
            assert arrived.wait(PATIENCE_S)
            for number in (2, 3):
                put(writer, dualwrite_topic, orders, number)
                wait_until(lambda number=number: number in values(kafka, dualwrite_topic))
            released.set()
            assert lower.result(PATIENCE_S)
        put(writer, dualwrite_topic, orders, 4)
        wait_until(lambda: 4 in values(kafka, dualwrite_topic))
    assert values(kafka, dualwrite_topic) == [2, 3, 1, 4]


def test_a_message_that_is_committed_while_others_are_sent_is_not_deleted(kafka, engine, orders, dualwrite_topic):
    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer,
        ThreadPoolExecutor(1) as threads,
    ):
        with held("write.recorded", "outbox.sent") as gates:
            lower = threads.submit(put, writer, dualwrite_topic, orders, 1)
            assert gates["write.recorded"][0].wait(PATIENCE_S)
            put(writer, dualwrite_topic, orders, 2)
            assert gates["outbox.sent"][0].wait(PATIENCE_S)
            gates["write.recorded"][1].set()
            assert lower.result(PATIENCE_S)
        put(writer, dualwrite_topic, orders, 3)
        wait_until(lambda: 3 in values(kafka, dualwrite_topic))
    assert values(kafka, dualwrite_topic) == [2, 1, 3]


def test_the_mode_of_a_writer_of_always_stays_until_its_next_owner_has_sent_all(kafka, engine, orders, dualwrite_topic):
    """Its blocks take no share of the lock on the mode, so no send may be the last one."""
    with DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer:
        put(writer, dualwrite_topic, orders, 1)
    assert (mode(engine), waiting(engine)) == ("later", 0)
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
        put(writer, dualwrite_topic, orders, 2)
        wait_until(lambda: is_direct(engine))
    assert values(kafka, dualwrite_topic) == [1, 2]


def test_a_writer_of_never_sends_first_what_another_setting_has_left(kafka, engine, orders, dualwrite_topic):
    """Also what a block of the former owner decides while it opens, until it has claimed."""
    claims, claimed = threading.Event(), threading.Event()

    def wait_or_fail(name):
        thread = threading.current_thread().name
        if name == "outbox.read" and thread.endswith(" outbox"):
            raise Unavailable("the former owner's sender does not get so far")
        if name == "claim.before" and thread.startswith("next"):
            claims.set()
            assert claimed.wait(PATIENCE_S)

    former = DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS)
    with failpoints.watched(wait_or_fail), ThreadPoolExecutor(1, "next") as threads, ExitStack() as closed_later:
        closed_later.callback(claimed.set)
        former.open()
        closed_later.callback(former.close)
        writer = DualWriter("orders", kafka=kafka, database=engine, limits=LIMITS)
        opening = threads.submit(writer.open)
        assert claims.wait(PATIENCE_S)
        put(former, dualwrite_topic, orders, 1, outbox="always")
        claimed.set()
        opening.result(PATIENCE_S)
        closed_later.callback(writer.close)
        put(writer, dualwrite_topic, orders, 2)
    recover("orders", kafka=kafka, database=engine)
    assert values(kafka, dualwrite_topic) == [1, 2]


def test_a_block_that_turns_the_mode_has_it_alone_until_its_commit(kafka, engine, orders, dualwrite_topic):
    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer,
        ThreadPoolExecutor(2, "block") as threads,
    ):
        with held("write.turns", "write.waits", threads="block_0") as gates:
            first = threads.submit(put, writer, dualwrite_topic, orders, 1, outbox="always")
            arrived, turns = gates["write.turns"]
            assert arrived.wait(PATIENCE_S)
            second = threads.submit(put, writer, dualwrite_topic, orders, 2, outbox="always")
            wait_until(lambda: somebody_waits_for_a_lock(engine) or (second.done() and mode(engine) == "direct"))
            turns.set()
            assert gates["write.waits"][0].wait(PATIENCE_S)  # it has committed, and wakes nobody yet
            second.result(PATIENCE_S)
            wait_until(lambda: mode(engine) == "direct")
            assert not waiting(engine)
        first.result(PATIENCE_S)
        assert not put(writer, dualwrite_topic, orders, 3)
    assert values(kafka, dualwrite_topic) == [1, 2, 3]


def test_a_sender_whose_owner_was_replaced_cannot_claim_its_id_anew(kafka, engine, orders, dualwrite_topic):
    """As it does when a send was not answered. The next owner, whose setting is another one, counts on its mode."""
    former = DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS)
    former.open()
    put(former, dualwrite_topic, orders, 1, outbox="always")
    wait_until(lambda: is_direct(engine))
    with DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer:
        with pytest.raises(Fenced):
            former._connected.outbox_lane.settle(Deadline(PATIENCE_S))
        former.close()
        put(writer, dualwrite_topic, orders, 2)
        wait_until(lambda: not waiting(engine))
    assert values(kafka, dualwrite_topic) == [1, 2]


def sent_after_a_copy(writer, topic, orders, engine, backup):
    """Copy the database while a message waits, and let it be sent. Returns what puts the copy back: the message waits again."""
    with held("outbox.read") as gates:
        put(writer, topic, orders, 1, outbox="always")
        arrived, released = gates["outbox.read"]
        assert arrived.wait(PATIENCE_S)
        restore = backup()
        execute(engine, "CREATE TABLE copied AS SELECT * FROM dualwrite_outbox")
        released.set()
    wait_until(lambda: is_direct(engine))

    def put_back():
        restore()
        execute(engine, "INSERT INTO dualwrite_outbox OVERRIDING SYSTEM VALUE SELECT * FROM copied")
        execute(engine, "UPDATE dualwrite_outbox_mode SET mode = 'later'")

    return put_back


def test_a_database_that_was_put_back_is_noticed_before_its_rows_are_sent_again(
    kafka, engine, orders, backup, dualwrite_topic
):
    """The rows of the writer's lanes show nothing of it: no block has decided anything since."""
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
        put_back = sent_after_a_copy(writer, dualwrite_topic, orders, engine, backup)
    put_back()
    with pytest.raises(DatabaseWentBack):
        DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS).open()
    assert values(kafka, dualwrite_topic) == [1]
    assert waiting(engine) == 1


def test_what_waits_for_a_sender_that_fails_is_counted_and_bounded(kafka, engine, orders, dualwrite_topic, monkeypatch):
    def settle(_):
        raise Unavailable("the coordinator accepts no end")

    monkeypatch.setattr(Sending, "settle", settle)
    limits = replace(LIMITS, outbox_rows=3)
    with DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=limits) as writer:
        for number in range(3):
            put(writer, dualwrite_topic, orders, number)
        wait_until(lambda: writer.health().outbox_rows == 3)
        with pytest.raises(Unavailable, match="outbox_rows"):
            put(writer, dualwrite_topic, orders, 3)


@pytest.mark.parametrize("claims_anew", [False, True])
def test_a_live_sender_stops_once_the_database_was_put_back(
    kafka, engine, orders, backup, dualwrite_topic, claims_anew
):
    """Also if it finds that out by a new claim: the row that it then has contradicts nothing any more."""
    told = []
    with DualWriter(
        "orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS, on_loss=told.append
    ) as writer:
        put_back = sent_after_a_copy(writer, dualwrite_topic, orders, engine, backup)
        wait_until(lambda: not writer._connected.outbox_lane.needs_settling)
        put_back()
        if claims_anew:
            writer._connected.outbox_lane.producer._instance.doubt("for the test")
        put(writer, dualwrite_topic, orders, 2, outbox="always")
        wait_until(lambda: writer.health().outbox_stopped)
        assert values(kafka, dualwrite_topic) == [1]
        assert waiting(engine) == 2
    [loss] = told
    assert isinstance(loss, DatabaseWentBack)


@pytest.mark.parametrize("point", ["outbox.sent", "write.prepared"])
def test_a_sender_whose_owner_was_replaced_sends_nothing(kafka, engine, orders, dualwrite_topic, point):
    with held(point, threads=" outbox") as gates:
        former = DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS)
        former.open()
        put(former, dualwrite_topic, orders, 1, outbox="always")
        arrived, released = gates[point]
        assert arrived.wait(PATIENCE_S)
        with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
            # What the former one has deleted, the next one waits for.
            wait_until(lambda: is_direct(engine) or somebody_waits_for_a_lock(engine))
            released.set()
            former.close()  # raises what it has lost
            put(writer, dualwrite_topic, orders, 2)
            wait_until(lambda: is_direct(engine))
    assert recover("orders", kafka=kafka, database=engine).losses == []
    assert values(kafka, dualwrite_topic) == [1, 2]


def test_a_last_send_that_finds_nothing_ends_nothing_once_its_owner_was_replaced(
    kafka, engine, orders, dualwrite_topic
):
    """The next owner is one of *always*, whose blocks take no share of the lock that the former one's last send has."""
    passes: Counter[tuple[threading.Thread, str]] = Counter()
    senders: list[threading.Thread] = []
    # The first send takes the message; the second finds nothing.
    stops = {(0, "write.checked", 2), (0, "outbox.read", 2), (1, "write.checked", 1)}
    gates = {stop: (threading.Event(), threading.Event()) for stop in stops}

    def wait(name):
        thread = threading.current_thread()
        if not thread.name.endswith(" outbox"):
            return
        if thread not in senders:
            senders.append(thread)
        passes[thread, name] += 1
        stop = senders.index(thread), name, passes[thread, name]
        if stop in gates:
            arrived, released = gates[stop]
            arrived.set()
            assert released.wait(PATIENCE_S)

    former = DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS)
    with failpoints.watched(wait), ExitStack() as released_later:
        released_later.callback(lambda: [released.set() for _, released in gates.values()])
        former.open()
        put(former, dualwrite_topic, orders, 1, outbox="always")
        assert gates[0, "write.checked", 2][0].wait(PATIENCE_S)
        with DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer:
            gates[0, "write.checked", 2][1].set()
            assert gates[0, "outbox.read", 2][0].wait(PATIENCE_S)
            put(writer, dualwrite_topic, orders, 2)
            assert gates[1, "write.checked", 1][0].wait(PATIENCE_S)
            gates[0, "outbox.read", 2][1].set()
            former.close()
            assert waiting(engine) == 1
            assert mode(engine) == "later"
            gates[1, "write.checked", 1][1].set()
    assert values(kafka, dualwrite_topic) == [1, 2]


def test_after_a_commit_in_doubt_the_next_block_waits_for_it_and_decides_under_another_number(
    mortal_kafka, url, engine, orders, dualwrite_postgres, monkeypatch
):
    """Else the row's count, raised by one of them, would tell the other one that it was committed."""
    kafka = patient(mortal_kafka.client_config())
    topic = mortal_kafka.create_topic("number-of-a-decision", 1)
    decided, decide = [], SqlOutbox.decide

    def note(self, connection, decision, *rest):
        decided.append(decision.waits)
        return decide(self, connection, decision, *rest)

    def out_of_reach(*_):
        raise Unavailable("the database does not answer")

    monkeypatch.setattr(SqlOutbox, "decide", note)
    limits = replace(LIMITS, max_lanes=1)
    with PostgresProxy(dualwrite_postgres) as proxy, ThreadPoolExecutor(2) as threads, ExitStack() as resumed_again:
        through = create_engine(proxy.url(url))
        mortal_kafka.suspend()
        resumed_again.callback(mortal_kafka.resume)
        with DualWriter("orders", kafka=kafka, database=through, outbox="fallback", limits=limits) as writer:
            with held("write.recorded") as gates:
                first = threads.submit(put, writer, topic, orders, 1)
                arrived, released = gates["write.recorded"]
                assert arrived.wait(PATIENCE_S)
                commit = proxy.on("COMMIT").hold_request()
                monkeypatch.setattr(in_doubt, "resolve_commit", out_of_reach)
                released.set()
                commit.wait()
                commit.cut()
                with pytest.raises(TransactionInDoubt):
                    first.result(PATIENCE_S)
            second = threads.submit(put, writer, topic, orders, 2)
            wait_until(lambda: somebody_waits_for_a_lock(engine) or second.done())
            commit.release()
            assert second.result(PATIENCE_S)
            resumed_again.pop_all().close()
            wait_until(lambda: is_direct(engine))
        through.dispose()
    assert decided == sorted(set(decided))
    assert len(decided) == 2
    assert values(kafka, topic) == [1, 2]


def test_a_decision_that_is_pending_in_kafka_outlives_blocks_whose_messages_wait(mortal_kafka, engine, orders, request):
    kafka = patient(mortal_kafka.client_config())
    topic = mortal_kafka.create_topic("pending-outbox", 1)
    limits = WriterLimits(max_lanes=1, lane_timeout_s=PATIENCE_S)
    killed = threading.Event()

    def kill(name):
        if name == "write.decided" and not killed.is_set():
            killed.set()
            mortal_kafka.kill()

    with ExitStack() as started_again:
        started_again.callback(mortal_kafka.start)
        with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=limits) as writer:
            with failpoints.watched(kill):
                put(writer, topic, orders, 1)
            assert put(writer, topic, orders, 2)
            started_again.pop_all().close()
            wait_until(lambda: is_direct(engine))
            put(writer, topic, orders, 3)
    recover("orders", kafka=kafka, database=engine)
    assert values(kafka, topic) == [1, 2, 3]


def test_while_kafka_comes_and_goes_every_block_succeeds_and_all_messages_are_there_once_and_in_order(
    mortal_kafka, engine, orders
):
    kafka = patient(mortal_kafka.client_config())
    topic = mortal_kafka.create_topic("comes-and-goes", 1)
    numbers = iter(range(1_000))

    def some(count=4):
        return [put(writer, topic, orders, next(numbers)) for _ in range(count)]

    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:
        for away, back in ((mortal_kafka.kill, mortal_kafka.start), (mortal_kafka.suspend, mortal_kafka.resume)):
            some()
            away()
            try:
                waited = some()
            finally:
                back()
            assert waited[-1]
            wait_until(lambda: not some(1)[0])
        last = next(numbers)
    assert values(kafka, topic) == list(range(last))


@pytest.mark.parametrize(
    ("away", "back"), [("suspend", "resume"), pytest.param("kill", "start", marks=pytest.mark.thorough)]
)
def test_a_writer_whose_threads_never_pause_goes_directly_again_as_soon_as_it_has_caught_up(
    mortal_kafka, engine, orders, monkeypatch, away, back
):
    """Shares of the lock on the mode would overlap for ever, if the sender could not hold back blocks while it takes it."""
    kafka = patient(mortal_kafka.client_config())
    topic = mortal_kafka.create_topic(f"never-pauses-{away}", 2)
    stop, caught_up, meanwhile = threading.Event(), [], []
    waited, direct = Counter(), Counter()
    lock = Sending._lock

    def note_lock(sending, rows, handle):
        caught_up.append((time.monotonic(), sum(waited.values())))
        lock(sending, rows, handle)
        meanwhile.append(sum(waited.values()) - caught_up[0][1])

    monkeypatch.setattr(Sending, "_lock", note_lock)

    def load(thread):
        number = 0
        while not stop.is_set():
            (waited if put_in(writer, topic, orders, thread, number) else direct)[thread] += 1
            number += 1
        return number

    def wait_for(condition):
        def unless_a_thread_has_failed():
            for one in running:
                if one.done():
                    one.result()
            return condition()

        wait_until(unless_a_thread_has_failed, otherwise=lambda: f"waiting: {waited}; directly: {direct}")

    with (
        DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer,
        ThreadPoolExecutor(8) as threads,
        ExitStack() as started_again,
    ):
        started_again.callback(stop.set)
        running = [threads.submit(load, thread) for thread in range(8)]
        started_again.callback(getattr(mortal_kafka, back))
        getattr(mortal_kafka, away)()
        wait_for(lambda: len(waited) == 8 and sum(waited.values()) > 100)
        getattr(mortal_kafka, back)()
        wait_for(lambda: meanwhile and mode(engine) == "direct")
        seconds = time.monotonic() - caught_up[0][0]
        before = direct.copy()
        wait_for(lambda: all(direct[thread] > before[thread] for thread in range(8)))
        stop.set()
        started_again.pop_all()
        written = [one.result(PATIENCE_S) for one in running]
    assert seconds < 10, f"direct again {seconds:.1f} s after it had caught up"
    assert meanwhile[0] <= 16, (
        "once all was sent, each thread ended at most the block that it was in, and the one before"
    )
    found = read_committed(kafka, topic)
    for thread, count in enumerate(written):
        assert [int(record.value) for record in found if record.key == str(thread).encode()] == list(range(count))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM orders")) == sum(written)


def all_replicas_are_in_sync(admin):
    topics = admin.list_topics(timeout=PATIENCE_S).topics.values()
    return all(
        len(partition.isrs) == len(partition.replicas) for topic in topics for partition in topic.partitions.values()
    )


@pytest.mark.thorough
@pytest.mark.longest
@pytest.mark.parametrize(
    "end", [pytest.param(EmbeddedKafka.stop, id="stopped"), pytest.param(EmbeddedKafka.kill, id="killed")]
)
def test_no_caller_sees_an_error_while_three_brokers_are_restarted_one_after_the_other(engine, orders, end):
    """Of three replicas, two must be in sync. The next broker goes when all of them are in sync again."""
    stop, errors, done = threading.Event(), [], []
    with EmbeddedKafka(brokers=3, start_timeout_s=PATIENCE_S) as cluster:
        kafka = patient(cluster.client_config())
        topic = cluster.create_topic("rolling", 3)
        admin = AdminClient(cluster.admin_config())
        partitions = admin.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions.values()
        assert [len(partition.replicas) for partition in partitions] == [3] * 3
        with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback", limits=LIMITS) as writer:

            def load(thread):
                for position in range(1_000_000):
                    if stop.is_set():
                        return
                    number = thread * 1_000_000 + position
                    try:
                        with writer.transaction() as tx:
                            for partition in range(3):
                                tx.produce(topic, value=str(number), key=str(thread), partition=partition)
                            tx.connection.execute(insert(orders).values(id=number))
                        done.append(number)
                    except Exception as error:  # noqa: BLE001 - all of them are wrong
                        errors.append(error)

            with ThreadPoolExecutor(4) as threads:
                running = [threads.submit(load, thread) for thread in range(4)]
                try:
                    for broker in (1, 2, 3):
                        before = len(done)
                        end(cluster, server=broker)
                        wait_until(lambda before=before: len(done) > before + 20)
                        cluster.start(broker)
                        wait_until(lambda: mode(engine) in {None, "direct"})
                        wait_until(lambda: all_replicas_are_in_sync(admin))
                finally:
                    stop.set()
                for one in running:
                    one.result(PATIENCE_S)
        assert not errors
        recover("orders", kafka=kafka, database=engine)
        for partition in range(3):
            found = [int(record.value) for record in read_committed(kafka, topic) if record.partition == partition]
            assert sorted(found) == sorted(done)
            for thread in range(4):
                own = [number for number in found if number // 1_000_000 == thread]
                assert own == sorted(own)
