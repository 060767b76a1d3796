"""Messages that wait in the database, on every SQL database: put with a decision, read in order, deleted, moved aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from harness.databases import Database, Thread, run_raw
from sqlalchemy import Connection, event, text

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DoubtStep
from dualwrite.protocol.values import Decision, FirstLook, OutboxMode, WaitingMessages
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.in_doubt import resolve_commit
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.waiting_rows import decode_headers, encode_headers

WAIT_S = 30.0
LATER, DIRECT = OutboxMode.LATER, OutboxMode.DIRECT
MANY = 100_000


def message(value: bytes | None = b"v", topic: str = "t", **parts: Any) -> Message:
    return Message.checked(topic, value, max_bytes=2**30, **parts)


def put(
    store: SqlStateStore,
    connection: Connection,
    *messages: Any,
    lane: str = "orders",
    writer: str = "orders",
    commit: bool = True,
) -> bool:
    """A block on that lane whose messages wait. Whether it has decided."""
    outbox = store.outbox
    store.begin(connection)
    seen = outbox.read_first(connection, lane, writer)
    decision = Decision(lane, seen.incarnation or 0, waits=seen.next_decision)
    ours, _ = outbox.decide(connection, decision, writer, messages)
    if commit:
        (store.commit if ours else store.rollback)(connection)
    return ours


def taken(
    store: SqlStateStore,
    connection: Connection,
    *,
    limit: int = 1000,
    max_bytes: int = 2**30,
    keep: bool = True,
    writer: str = "orders",
) -> WaitingMessages:
    """What a send reads; it then deletes it unless it is to be kept."""
    store.begin(connection)
    store.read_incarnation(connection, writer)
    found = store.outbox.read(connection, writer, limit=limit, max_bytes=max_bytes)
    if not keep:
        assert store.outbox.delete(connection, writer, found.numbers) == len(found.numbers)
    store.commit(connection)
    return found._replace(values=tuple(found.values), keys=tuple(found.keys))


@contextmanager
def block(store: SqlStateStore) -> Iterator[Connection]:
    """Another block of the same database, which is rolled back if the test has not ended it."""
    with store.engine.connect() as connection:
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        try:
            yield connection
        finally:
            store.rollback(connection)


def test_messages_and_rows_become_visible_together(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = database.claim(store, "orders")
    store.begin(connection)
    seen = store.outbox.read_first(connection, "orders", "orders", namespace=row.namespace, known=row)
    assert seen == FirstLook(1, DIRECT, 0)
    connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
    decision = Decision("orders", 1, namespace=row.namespace, waits=seen.next_decision, deferred=True, answer_s=WAIT_S)
    assert store.outbox.decide(connection, decision, "orders", [message(b"one")])[0]
    if database.kind != "sqlite":  # one connection at a time, as its tests have it
        assert store.outbox.waiting("orders").rows == 0
    store.commit(connection)
    assert store.outbox.waiting("orders")[:2] == (1, 3)
    assert taken(store, connection).values == (b"one",)
    (after,) = store.read(["orders"])
    assert (after.prepared, after.incarnation) == (row.prepared, 1)


def test_a_rollback_leaves_no_message(database: Database, store: SqlStateStore, connection: Connection) -> None:
    row = database.claim(store, "orders")
    assert put(store, connection, message(), commit=False)
    store.rollback(connection)
    assert store.outbox.waiting("orders") == (0, 0, None, True)
    assert store.outbox.decisions_locked("orders", row.namespace, Deadline(WAIT_S)) == 0


ODD = [
    message(b"", key=b""),
    message(None, key=b"tombstone"),
    message(b"\x00\xff'\\%", key=None, topic="a-b.c_D"),
    message(b"p", partition=7, timestamp_ms=1),
    message(b"p0", partition=0, timestamp_ms=2**62),
    message(b"h", headers=[("", b""), ("a", None), ("a", b"\x00" * 200), ("ä", b"x")]),
]


@pytest.mark.parametrize("size", [1, 40_000])
@pytest.mark.parametrize("count", [1, 6, 60])
def test_every_part_of_a_message_comes_back(
    database: Database, store: SqlStateStore, connection: Connection, count: int, size: int
) -> None:
    """Few and many, small and large: PostgreSQL takes them in two ways."""
    database.claim(store, "orders")
    batch = MessageBatch("many", [b"x" * size, None], [None, b"k"], size=0)
    given = (ODD * 10)[:count]
    assert put(store, connection, *given, batch)
    found = taken(store, connection)
    assert list(found.topics) == [one.topic for one in given] + ["many"] * 2
    assert list(found.values) == [one.value for one in given] + [b"x" * size, None]
    assert list(found.keys) == [one.key for one in given] + [None, b"k"]
    none = [None] * 2
    if count > 1:
        assert found.partitions is not None
        assert found.timestamps_ms is not None
        assert found.headers is not None
        assert list(found.partitions) == [one.partition for one in given] + none
        assert list(found.timestamps_ms) == [one.timestamp_ms for one in given] + none
        assert [list(one) for one in found.headers] == [list(one.headers) for one in given] + [[], []]
    else:
        assert (found.partitions, found.timestamps_ms, found.headers) == (None, None, None)
    assert len(set(found.numbers)) == count + 2
    assert list(found.numbers) == sorted(found.numbers)
    now_ms = database.query("SELECT 1") and max(found.produced_ms)
    assert max(found.produced_ms) - min(found.produced_ms) < 1000 < now_ms
    assert not found.more


def test_a_value_of_some_megabytes(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.claim(store, "orders")
    value = bytes(range(256)) * 16_384
    assert put(store, connection, message(value), message(value[::-1]))
    assert taken(store, connection).values == (value, value[::-1])


def test_headers_are_coded_as_in_a_record() -> None:
    assert encode_headers([("a", b"bc"), ("d", None)]) == b"\x04\x02a\x04bc\x02d\x01"
    for headers in ([], [("k" * 300, b"v" * 70_000)], [("", None), ("é", b"")]):
        assert list(decode_headers(encode_headers(headers))) == headers


def test_consumed_offsets_cannot_wait(database: Database, store: SqlStateStore, connection: Connection) -> None:
    database.claim(store, "orders")
    with pytest.raises(IllegalStateError, match="consumed offsets"):
        put(store, connection, ConsumedOffsets([], None))
    store.rollback(connection)


def test_who_was_claimed_away_puts_nothing(database: Database, store: SqlStateStore, connection: Connection) -> None:
    old = database.claim(store, "orders")
    store.begin(connection)
    seen = store.outbox.read_first(connection, "orders", "orders")
    store.rollback(connection)
    database.claim(store, "orders")
    for count in (1, 100):
        store.begin(connection)
        assert store.outbox.read_first(connection, "orders", "orders").incarnation == 2
        decision = Decision("orders", 1, namespace=old.namespace, waits=seen.next_decision)
        assert store.outbox.decide(connection, decision, "orders", [message()] * count) == (False, None)
        store.rollback(connection)
    assert store.outbox.waiting("orders").rows == 0
    assert store.outbox.decisions_locked("orders", old.namespace, Deadline(WAIT_S)) == 0


@pytest.mark.parametrize("count", [1, 100])
def test_a_transaction_that_was_ended_unseen_puts_nothing(
    database: Database, store: SqlStateStore, connection: Connection, count: int
) -> None:
    """The statements would stand alone then, and commit by themselves."""
    if database.kind == "mariadb":
        pytest.skip("a COMMIT as text is refused before it is sent")
    row = database.claim(store, "orders")
    store.begin(connection)
    seen = store.outbox.read_first(connection, "orders", "orders")
    run_raw(connection.connection.dbapi_connection, "COMMIT")
    with pytest.raises(IllegalStateError, match="ended inside"):
        store.outbox.decide(connection, Decision("orders", 1, waits=seen.next_decision), "orders", [message()] * count)
    store.discard(connection)
    assert store.outbox.waiting("orders").rows == 0
    assert store.outbox.decisions_locked("orders", row.namespace, Deadline(WAIT_S)) == 0


def test_tables_that_a_crash_would_empty_are_refused(postgres: Database) -> None:
    database = SqlDatabase(postgres.engine())
    database.require_outbox()
    for table in ("dualwrite_outbox", "dualwrite_outbox_mode"):
        postgres.execute(f"ALTER TABLE {table} SET UNLOGGED")
        with pytest.raises(ConfigurationError, match=f"ALTER TABLE .*{table} SET LOGGED"):
            database.require_outbox()
        postgres.execute(f"ALTER TABLE {table} SET LOGGED")


def test_the_number_of_a_decision_grows_within_an_incarnation_and_with_it(
    database: Database, store: SqlStateStore, connection: Connection
) -> None:
    row = database.claim(store, "orders")
    numbers = []
    for _ in range(2):
        for _ in range(2):
            assert put(store, connection)
            numbers.append(store.outbox.decisions_locked("orders", row.namespace, Deadline(WAIT_S)))
        database.claim(store, "orders")
    assert numbers == [(1 << 32) + 1, (1 << 32) + 2, (2 << 32) + 1, (2 << 32) + 2]


def test_a_row_of_that_name_that_is_another_one_has_no_count_of_ours(database: Database, store: SqlStateStore) -> None:
    database.claim(store, "orders")
    for name, namespace in (("orders", "another"), ("nobody", None)):
        with pytest.raises(ConfigurationError, match="gone"):
            store.outbox.decisions_locked(name, namespace, Deadline(WAIT_S))


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_in_doubt_is_known_by_the_number(
    database: Database, store: SqlStateStore, connection: Connection, *, committed: bool
) -> None:
    row = database.claim(store, "orders")
    context = OwnerContext(None, store, "me")  # type: ignore[arg-type] # Kafka is not asked
    decisions = []
    for outcome in (True, committed):
        store.begin(connection)
        seen = store.outbox.read_first(connection, "orders", "orders")
        decision = Decision("orders", 1, namespace=row.namespace, waits=seen.next_decision)
        _, name = store.outbox.decide(connection, decision, "orders", [message()])
        (store.commit if outcome else store.rollback)(connection)
        decisions.append((decision, name))

    def found(at: int) -> DoubtStep:
        decision, name = decisions[at]
        return resolve_commit(context, "orders", PreparedTxnState(), name, Deadline(WAIT_S), decision)

    expected = DoubtStep.COMMITTED if committed else DoubtStep.ABORTED
    assert found(1) is expected
    database.claim(store, "orders")
    assert found(1) is expected
    assert put(store, connection, message())
    # The next owner's decision stands in the row: now the database alone may know.
    assert found(1) is (expected if database.kind == "postgresql" else DoubtStep.IN_DOUBT)


class TestMode:
    """The mode, its lock and its shares."""

    def test_a_writer_without_a_row_goes_direct(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        database.claim(store, "orders")
        store.begin(connection)
        assert store.outbox.read_first(connection, "orders", "orders").mode is DIRECT
        assert store.outbox.mode(connection, "orders") is DIRECT
        assert store.outbox.share(connection, "orders", within_s=WAIT_S) is DIRECT
        store.rollback(connection)

    def test_it_turns_under_its_lock(self, database: Database, store: SqlStateStore, connection: Connection) -> None:
        database.claim(store, "orders")
        for mode in (LATER, DIRECT, LATER):
            before = DIRECT if mode is LATER else LATER
            store.begin(connection)
            assert store.outbox.read_first(connection, "orders", "orders").mode is before
            assert store.outbox.lock(connection, "orders", within_s=WAIT_S) is before
            store.outbox.turn(connection, "orders", mode)
            assert store.outbox.mode(connection, "orders") is mode
            store.commit(connection)
        store.begin(connection)
        assert store.outbox.read_first(connection, "orders", "orders") == FirstLook(1, LATER, 0)
        assert store.outbox.read_first(connection, "orders", "order").mode is DIRECT
        store.rollback(connection)

    def test_a_rollback_turns_it_back(self, database: Database, store: SqlStateStore, connection: Connection) -> None:
        database.claim(store, "orders")
        store.begin(connection)
        store.outbox.read_first(connection, "orders", "orders")
        store.outbox.lock(connection, "orders", within_s=WAIT_S)
        store.outbox.turn(connection, "orders", LATER)
        store.rollback(connection)
        store.begin(connection)
        assert store.outbox.read_first(connection, "orders", "orders").mode is DIRECT
        store.rollback(connection)

    def test_shares_go_together_and_whoever_locks_alone_waits_for_them(
        self, database: Database, store: SqlStateStore
    ) -> None:
        if database.kind == "sqlite":
            pytest.skip("one transaction at a time")
        database.claim(store, "orders")
        store.outbox.begin_later("orders")
        with block(store) as one, block(store) as two:
            assert store.outbox.share(one, "orders", within_s=WAIT_S) is LATER
            assert store.outbox.share(two, "orders", within_s=WAIT_S) is LATER
            with block(store) as alone, pytest.raises(Unavailable):
                store.outbox.lock(alone, "orders", within_s=0.1)
            with block(store) as alone:
                locked = Thread(lambda: store.outbox.lock(alone, "orders", within_s=WAIT_S))
                store.commit(one)
                assert not locked.done
                store.commit(two)
                assert locked.result() is LATER
                with block(store) as late, pytest.raises(Unavailable):
                    store.outbox.share(late, "orders", within_s=0.1)

    def test_who_gets_a_share_looks_again(self, database: Database, store: SqlStateStore) -> None:
        if database.kind == "sqlite":
            pytest.skip("one transaction at a time")
        database.claim(store, "orders")
        store.outbox.begin_later("orders")
        with store.engine.connect() as last, store.engine.connect() as connection:
            for each in (last, connection):
                store.begin(each)
                assert store.outbox.read_first(each, "orders", "orders").mode is LATER
            store.outbox.lock(last, "orders", within_s=WAIT_S)
            shared = Thread(lambda: store.outbox.share(connection, "orders", within_s=WAIT_S))
            store.outbox.turn(last, "orders", DIRECT)
            with block(store) as late, pytest.raises(Unavailable):
                store.outbox.share(late, "orders", within_s=0.1)
            assert not shared.done
            store.commit(last)
            assert shared.result() is DIRECT
            store.rollback(connection)

    def test_of_several_that_share_the_mode_each_may_turn_it(self, database: Database, store: SqlStateStore) -> None:
        if database.kind != "postgresql":
            pytest.skip("it has no lock beside shares")
        database.claim(store, "orders")
        with block(store) as first:
            assert store.outbox.lock(first, "orders", within_s=WAIT_S) is DIRECT
            store.commit(first)
        with block(store) as one, block(store) as two:
            for each in (one, two):
                assert store.outbox.share(each, "orders", within_s=WAIT_S) is DIRECT
            assert store.outbox.lock(one, "orders", within_s=WAIT_S, beside_shares=True) is DIRECT
            store.outbox.turn(one, "orders", LATER)
            second = Thread(lambda: store.outbox.lock(two, "orders", within_s=WAIT_S, beside_shares=True))
            with block(store) as late:
                assert store.outbox.share(late, "orders", within_s=WAIT_S) is DIRECT, "one has not committed yet"
            assert not second.done
            store.commit(one)
            assert second.result() is LATER
            with block(store) as last, pytest.raises(Unavailable):
                store.outbox.lock(last, "orders", within_s=0.1)
            store.rollback(two)

    def test_the_limit_of_the_wait_is_no_limit_of_later_waits(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        if database.kind != "postgresql":
            pytest.skip("a session's own limit, which others set until the transaction ends")
        database.claim(store, "orders")
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        connection.execute(text("SET LOCAL lock_timeout = '7s'"))
        store.outbox.lock(connection, "orders", within_s=0.5)
        assert connection.scalar(text("SHOW lock_timeout")) == "7s"
        store.rollback(connection)

    def test_a_writer_whose_messages_always_wait_begins_so(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        database.claim(store, "orders")
        for _ in range(2):
            store.outbox.begin_later("orders")
            store.begin(connection)
            assert store.outbox.read_first(connection, "orders", "orders").mode is LATER
            store.outbox.lock(connection, "orders", within_s=WAIT_S)
            store.outbox.turn(connection, "orders", DIRECT)
            store.commit(connection)


class TestReading:
    """What a send takes, and what it leaves."""

    def test_it_goes_by_number_and_by_writer(self, store: SqlStateStore, connection: Connection) -> None:
        store.claim(["orders", "orders#1", "other"], owner="me", cluster_id="cluster-one")
        for number in range(6):
            writer = "other" if number % 3 == 2 else "orders"
            assert put(
                store,
                connection,
                message(b"%d" % number),
                lane=["orders", "orders#1", "other"][number % 3],
                writer=writer,
            )
        assert taken(store, connection).values == (b"0", b"1", b"3", b"4")
        assert taken(store, connection, writer="other").values == (b"2", b"5")
        assert store.outbox.waiting("orders").rows == 4
        assert store.outbox.waiting("order").rows == 0

    def test_it_stops_at_its_limits(self, database: Database, store: SqlStateStore, connection: Connection) -> None:
        database.claim(store, "orders")
        assert put(
            store, connection, *(message(bytes(100), key=b"k" * 10, headers=[("h", b"12345")]) for _ in range(5))
        )
        sizes = 100 + 10 + len(encode_headers([("h", b"12345")]))
        for limit, most, count in (
            (5, 2**30, 5),
            (4, 2**30, 4),
            (1, 1, 1),
            (5, 3 * sizes, 3),
            (5, 4 * sizes - 1, 3),
            (5, 0, 1),
        ):
            found = taken(store, connection, limit=limit, max_bytes=most)
            assert (len(found.numbers), found.size, found.more) == (count, count * sizes, count < 5)

    def test_what_was_read_is_deleted_and_counted_once(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        database.claim(store, "orders")
        assert put(store, connection, *(message(b"%d" % number) for number in range(5)))
        found = taken(store, connection, limit=3, keep=False)
        assert taken(store, connection).values == (b"3", b"4")
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        assert store.outbox.delete(connection, "orders", found.numbers) == 0
        assert store.outbox.delete(connection, "orders", []) == 0
        store.rollback(connection)
        assert taken(store, connection, keep=False).values == (b"3", b"4")
        empty = taken(store, connection)
        assert (list(empty.values), empty.more) == ([], False)

    def test_a_delete_takes_exactly_what_it_names(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        """A message with a number between those that were read may have come since."""
        database.claim(store, "orders")
        assert put(store, connection, *(message(b"%d" % number) for number in range(30)))
        numbers = taken(store, connection).numbers
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        assert store.outbox.delete(connection, "orders", [*numbers[:14], *numbers[15:20]]) == 19
        assert store.outbox.delete(connection, "orders", numbers[20::2]) == 5
        store.commit(connection)
        assert taken(store, connection).values == (b"14", b"21", b"23", b"25", b"27", b"29")

    def test_a_lower_number_that_is_committed_later_is_not_skipped(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        if database.kind == "sqlite":
            pytest.skip("numbers are in the order of commits")
        store.claim(["orders", "orders#1"], owner="me", cluster_id="cluster-one")
        with store.engine.connect() as late:
            assert put(store, late, message(b"late"), commit=False)
            for number in range(3):
                assert put(store, connection, *[message(b"%d" % number)] * 3000, lane="orders#1")
                assert b"late" not in taken(store, connection, limit=5000, keep=False).values
            store.commit(late)
        assert taken(store, connection, keep=False).values == (b"late",)


class TestFloor:
    """A read begins where nothing can come any more. SQLite has no dead rows, and needs no floor."""

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dualwrite.stores.sql.outbox._WORTH", 3)
        monkeypatch.setattr("dualwrite.stores.sql.outbox._AGAIN_S", 0.0)

    @pytest.fixture
    def lanes(self, database: Database, store: SqlStateStore) -> Sequence[str]:
        if database.kind == "sqlite":
            pytest.skip("it needs no floor")
        lanes = ["orders", "orders#1", "orders#2"]
        store.claim(lanes, owner="me", cluster_id="cluster-one")
        return lanes

    def floor(self, store: SqlStateStore) -> int:
        return store.outbox._floors["orders"].number

    def rounds(self, store: SqlStateStore, connection: Connection, count: int, lane: str = "orders") -> int:
        """Put and take, so often. Returns the last number."""
        last = 0
        for _ in range(count):
            assert put(store, connection, *[message()] * 5, lane=lane)
            last = max(taken(store, connection, keep=False).numbers)
        return last

    def test_it_follows_what_is_taken(self, store: SqlStateStore, connection: Connection, lanes: Sequence[str]) -> None:
        del lanes
        last = self.rounds(store, connection, 5)
        assert last - 10 <= self.floor(store) < last

    def test_a_send_that_was_rolled_back_takes_nothing(
        self, store: SqlStateStore, connection: Connection, lanes: Sequence[str]
    ) -> None:
        del lanes
        assert put(store, connection, *[message()] * 5)
        first = taken(store, connection).numbers[0]
        for _ in range(5):
            store.begin(connection)
            store.read_incarnation(connection, "orders")
            found = store.outbox.read(connection, "orders", limit=5, max_bytes=10**6)
            assert found.numbers[0] == first
            assert store.outbox.delete(connection, "orders", found.numbers) == 5
            store.rollback(connection)
        assert self.floor(store) < first

    @pytest.mark.parametrize("commits", [True, False])
    def test_it_waits_for_every_lane_that_may_have_lower_numbers(
        self, store: SqlStateStore, connection: Connection, lanes: Sequence[str], *, commits: bool
    ) -> None:
        with store.engine.connect() as late:
            assert put(store, late, message(b"late"), lane=lanes[1], commit=False)
            before = self.rounds(store, connection, 1)
            for _ in range(4):
                self.rounds(store, connection, 1, lane=lanes[2])
                assert self.floor(store) < before - 5
            (store.commit if commits else store.rollback)(late)
        if commits:
            assert taken(store, connection).values == (b"late",)
            for _ in range(4):
                assert put(store, connection, message())
                assert taken(store, connection).values[0] == b"late"
            taken(store, connection, keep=False)
        self.rounds(store, connection, 5)
        assert self.floor(store) > before

    def test_a_lane_that_is_always_busy_does_not_hold_it_back(
        self, store: SqlStateStore, connection: Connection, lanes: Sequence[str]
    ) -> None:
        """Another block holds its row whenever one looks; but each look finds another count."""
        with store.engine.connect() as busy:
            for _ in range(6):
                assert put(store, busy, message(), lane=lanes[1], commit=False)
                last = self.rounds(store, connection, 1)
                store.commit(busy)
        assert last - 20 <= self.floor(store)

    def test_it_counts_on_its_own_server_alone(
        self, store: SqlStateStore, connection: Connection, lanes: Sequence[str]
    ) -> None:
        del lanes
        last = self.rounds(store, connection, 5)
        floor = store.outbox._floors["orders"]
        floor.number, floor.candidate, floor.proved_in = last + 1000, None, None
        assert put(store, connection, message(b"new"))
        assert list(taken(store, connection).values) == []
        floor.server = "another one"
        assert taken(store, connection).values == (b"new",)
        assert store.outbox.waiting("orders").rows == 1

    def test_what_is_replayed_is_above_it(
        self, store: SqlStateStore, connection: Connection, lanes: Sequence[str]
    ) -> None:
        del lanes
        assert put(store, connection, message(b"poison"))
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        numbers = store.outbox.read(connection, "orders", limit=5, max_bytes=10**6).numbers
        assert store.outbox.move_aside(connection, "orders", numbers, "why") == 1
        store.commit(connection)
        self.rounds(store, connection, 5)
        assert store.outbox.replay("orders") == 1
        assert taken(store, connection).values == (b"poison",)


class TestAside:
    """Messages that could not be sent."""

    @pytest.fixture
    def numbers(self, store: SqlStateStore, connection: Connection) -> Sequence[int]:
        store.claim(["orders", "other"], owner="me", cluster_id="cluster-one")
        assert put(store, connection, *ODD)
        numbers = taken(store, connection).numbers
        store.begin(connection)
        store.read_incarnation(connection, "orders")
        assert store.outbox.move_aside(connection, "orders", [*numbers[:2], numbers[-1]], "too \x00 large") == 3
        assert store.outbox.move_aside(connection, "other", numbers, "") == 0
        assert store.outbox.move_aside(connection, "orders", numbers[:2], "") == 0
        store.commit(connection)
        return [*numbers[:2], numbers[-1]]

    def test_they_are_kept_whole_with_the_reason(
        self, store: SqlStateStore, connection: Connection, numbers: Sequence[int]
    ) -> None:
        assert taken(store, connection).values == tuple(one.value for one in ODD[2:-1])
        found = store.outbox.aside("orders", limit=10)
        assert [one.number for one in found] == list(numbers)
        for one, given in zip(found, [*ODD[:2], ODD[-1]], strict=True):
            assert (one.topic, one.key, one.value, one.partition) == (
                given.topic,
                given.key,
                given.value,
                given.partition,
            )
            assert (list(one.headers), one.timestamp_ms) == (list(given.headers), given.timestamp_ms)
            assert (one.writer, one.transactional_id, one.reason) == ("orders", "orders", "too ? large")
            assert one.put_at <= one.moved_at
        assert [one.number for one in store.outbox.aside("orders", limit=1, after=numbers[0])] == [numbers[1]]
        assert (store.outbox.count_aside("orders"), store.outbox.count_aside("other")) == (3, 0)

    def test_they_are_replayed_behind_all_others_and_wait_in_their_order(
        self, store: SqlStateStore, connection: Connection, numbers: Sequence[int]
    ) -> None:
        taken(store, connection, keep=False)
        assert put(store, connection, message(b"newer"))
        assert store.outbox.replay("other") == 0
        assert store.outbox.replay("orders", [numbers[2], numbers[0]]) == 2
        found = taken(store, connection)
        assert found.values == (b"newer", ODD[0].value, ODD[-1].value)
        assert found.headers is not None
        assert list(found.headers[2]) == list(ODD[-1].headers)
        store.begin(connection)
        assert store.outbox.read_first(connection, "orders", "orders").mode is LATER
        store.rollback(connection)
        assert store.outbox.replay("orders") == 1
        assert store.outbox.count_aside("orders") == 0

    def test_they_are_dropped(self, store: SqlStateStore, numbers: Sequence[int]) -> None:
        assert store.outbox.drop("other") == 0
        assert store.outbox.drop("orders", [numbers[0], 10**15]) == 1
        assert store.outbox.drop("orders") == 2
        assert store.outbox.aside("orders", limit=10) == []

    def test_one_that_is_moved_aside_while_all_are_replayed_stays_there(
        self, database: Database, store: SqlStateStore, connection: Connection, numbers: Sequence[int]
    ) -> None:
        """The sender does that in transactions of its own, which wait for no replay."""
        if database.kind == "sqlite":
            pytest.skip("one transaction at a time writes")
        found = taken(store, connection).numbers
        moved: list[int] = []

        def move_one(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "outbox_aside" in statement and statement.startswith("DELETE") and not moved:
                moved.append(found[0])
                Thread(move).result(WAIT_S)

        def move() -> None:
            with block(store) as own:
                assert store.outbox.move_aside(own, "orders", moved, "late") == 1
                store.commit(own)

        engine = store._engine
        event.listen(engine, "before_cursor_execute", move_one)
        assert store.outbox.replay("orders") == len(numbers)
        event.remove(engine, "before_cursor_execute", move_one)
        assert moved
        assert [one.number for one in store.outbox.aside("orders", limit=10)] == moved
        assert store.outbox.waiting("orders").rows == len(ODD) - 1

    @pytest.mark.usefixtures("unanswered")
    def test_a_commit_that_was_not_answered_counts(self, store: SqlStateStore, numbers: Sequence[int]) -> None:
        assert store.outbox.drop("orders", numbers[:1]) == 1
        assert store.outbox.replay("orders") == 2
        assert store.outbox.count_aside("orders") == 0


class TestWaiting:
    """How much waits."""

    def test_it_is_exact_while_little_waits(
        self, database: Database, store: SqlStateStore, connection: Connection
    ) -> None:
        database.claim(store, "orders")
        assert store.outbox.waiting("orders") == (0, 0, None, True)
        assert put(store, connection, message(bytes(10)), message(None), message(bytes(5), key=b"12"))
        found = store.outbox.waiting("orders")
        assert found[:2] == (3, 17)
        assert found.exact
        assert 0 <= (found.oldest_s or 0) < WAIT_S

    @pytest.mark.parametrize(("sample", "exact"), [(40, True), (31, True), (20, False)])
    def test_of_many_it_is_estimated_by_both_ends(
        self,
        store: SqlStateStore,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
        sample: int,
        *,
        exact: bool,
    ) -> None:
        store.claim(["orders", "other"], owner="me", cluster_id="cluster-one")
        monkeypatch.setattr("dualwrite.stores.sql.outbox._SAMPLE", sample)
        for writer in ("orders", "other", "orders"):
            assert put(store, connection, *[message(bytes(10))] * 30, lane=writer, writer=writer)
        found = store.outbox.waiting("orders")
        assert found.exact == exact
        if exact:
            assert found[:2] == (60, 600)
        else:
            assert 60 <= found.rows <= 90  # the others' numbers count as its own
            assert found.size == found.rows * 10
