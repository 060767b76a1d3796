"""The promises of a database that decides, on every kind of it: alone, under a writer, and after the death of its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.databases import CLUSTER, prepared
from harness.death import mortal
from harness.deciding import KINDS, POINTS, Kind, Sql
from harness.places import PROOF, ROOT
from harness.served import SETTINGS, TOPIC, ServedKafka

from dualwrite import (
    ConfigurationError,
    DualWriter,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    WriterLimits,
    recover,
    status,
)
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.interfaces import Database, StateStore
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.stores.sql.database import _OTHERS

BY_URL = {"rocksdb", "zookeeper"}
MARKS = {"postgresql": pytest.mark.postgresql, "mariadb": pytest.mark.mariadb}
THERE = [name for name in KINDS if name not in BY_URL or name in _OTHERS]


@dataclass
class Place:
    """A database of one kind, open in this process."""

    name: str
    kind: Kind
    text: str
    database: Database

    def write(self, store: StateStore, number: int, incarnation: int = 1, **known: Any) -> None:
        with self.database.connect() as handle:
            store.begin(handle)
            assert store.read_incarnation(handle, "orders", **known) == incarnation
            self.kind.put(handle, number)
            assert store.decide(handle, Decision("orders", incarnation, prepared(incarnation, number)))[0]
            store.commit(handle)

    @property
    def numbers(self) -> list[int]:
        if not self.kind.alone or self.kind.dies:
            return self.kind.numbers(self.text)
        self.database.close()
        try:
            return self.kind.numbers(self.text)
        finally:
            self.database = self.kind.open(self.text)
            self.database.check()


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in THERE])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Place]:
    kind = KINDS[request.param]
    text = kind.make(request, tmp_path)
    database = kind.open(text)
    database.check()
    made = Place(request.param, kind, text, database)
    yield made
    made.database.close()


@pytest.fixture
def store(place: Place) -> StateStore:
    return place.database.store()


def claim(store: StateStore, *ids: str, owner: str = "me", **more: Any) -> Any:
    return store.claim(ids or ["orders"], owner=owner, cluster_id=CLUSTER, **more)


# Claims


def test_a_claim_makes_the_row_and_the_next_one_raises_it(store):
    [first] = claim(store)
    assert (first.incarnation, first.settled_incarnation, first.owner, first.completed) == (1, 0, "me", None)
    [second] = claim(store, owner="you")
    assert (second.incarnation, second.owner, second.namespace) == (2, "you", first.namespace)
    assert store.read(["orders", "nobody"]) == [second]


def test_many_are_claimed_at_once_or_none(store):
    assert [row.transactional_id for row in claim(store, "b", "a", "a#10", "b")] == ["a", "a#10", "b"]
    with pytest.raises(Fenced):
        claim(store, "a", "c", guard=("b", 1), owner="another")
    with pytest.raises(ConfigurationError):
        store.claim(["a", "c"], owner="me", cluster_id="another cluster")
    assert [(row.transactional_id, row.incarnation) for row in store.find("")] == [("a", 1), ("a#10", 1), ("b", 1)]


def test_a_guard_lets_its_owner_through(store):
    claim(store)
    [lane] = claim(store, "orders#1", guard=("orders", 1))
    [again] = claim(store, guard=("orders", 1))
    assert (lane.incarnation, again.incarnation) == (1, 2)


def test_what_verify_refuses_is_not_claimed(store):
    claim(store)

    def refuse(rows: Any) -> None:
        assert [row.incarnation for row in rows] == [2]
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError, match="no"):
        claim(store, verify=refuse)
    assert store.read(["orders"])[0].incarnation == 1


def test_an_incarnation_can_be_raised_but_not_lowered(store):
    assert claim(store, raise_to={"orders": 7})[0].incarnation == 7
    assert claim(store, raise_to={"orders": 3})[0].incarnation == 8


def test_concurrent_claimers_never_share_an_incarnation(store):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: claim(store, owner=f"owner {number}")[0].incarnation, range(12)))
    assert sorted(found) == list(range(1, 13))


@pytest.mark.parametrize("name", ["x" * 255, "ünïcode 🎉", "quote ' \" % _ \\ :name", "a/b", "/", ".", "..", "a//b"])
def test_an_unusual_id_is_a_key_as_any_other(store, name):
    [row] = claim(store, name)
    assert store.read([name]) == store.find(name) == [row]
    assert store.find(f"{name}x"[:255]) == ([row] if len(name) == 255 else [])


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "\ud800"])
def test_an_id_that_cannot_be_a_key_is_refused(store, name):
    with pytest.raises(ConfigurationError):
        claim(store, name)


# Decisions


def test_a_decision_and_its_rows_become_visible_together(place, store):
    [row] = claim(store)
    with place.database.connect() as handle:
        store.begin(handle)
        assert store.read_incarnation(handle, "orders", namespace=row.namespace, known=row) == 1
        place.kind.put(handle, 1)
        assert store.decide(handle, Decision("orders", 1, prepared(1), namespace=row.namespace))[0]
        assert store.read(["orders"]) == [row]
        store.commit(handle)
    assert store.read(["orders"])[0].prepared == prepared(1)
    assert place.numbers == [1]


def test_one_handle_serves_one_dual_write_after_another(place, store):
    claim(store)
    with place.database.connect() as handle:
        for number in (1, 2, 3):
            store.begin(handle)
            assert store.read_incarnation(handle, "orders") == 1
            place.kind.put(handle, number)
            assert store.decide(handle, Decision("orders", 1, prepared(1, number)))[0]
            (store.rollback if number == 2 else store.commit)(handle)
    assert store.read(["orders"])[0].prepared == prepared(1, 3)
    assert place.numbers == [1, 3]


@pytest.mark.parametrize("end", ["rollback", "discard"])
def test_what_is_rolled_back_leaves_nothing(place, store, end):
    [row] = claim(store)
    with place.database.connect() as handle:
        store.begin(handle)
        store.read_incarnation(handle, "orders")
        place.kind.put(handle, 1)
        assert store.decide(handle, Decision("orders", 1, prepared(1)))[0]
        getattr(store, end)(handle)
    assert store.read(["orders"]) == [row]
    assert place.numbers == []


def test_rows_alone_commit_if_the_row_is_still_ours(place, store):
    [row] = claim(store)
    with place.database.connect() as handle:
        store.begin(handle)
        store.read_incarnation(handle, "orders")
        place.kind.put(handle, 1)
        assert store.hold(handle, Decision("orders", 1))[0]
        store.commit(handle)
    assert store.read(["orders"]) == [row]
    assert place.numbers == [1]


def test_a_handle_that_is_in_a_dual_write_is_refused(place, store):
    with place.database.connect() as handle:
        store.begin(handle)
        with pytest.raises(IllegalStateError):
            store.begin(handle)
        store.rollback(handle)


def test_a_former_owner_cannot_decide(place, store):
    [row] = claim(store)
    claim(store, owner="you")
    with place.database.connect() as handle:
        store.begin(handle)
        assert store.read_incarnation(handle, "orders", known=row) == 2
        assert store.decide(handle, Decision("orders", 1, prepared(1))) == (False, None)
        assert store.hold(handle, Decision("orders", 1)) == (False, None)
        assert store.decide(handle, Decision("orders", 2, prepared(2), namespace="another")) == (False, None)
        assert store.decide(handle, Decision("nobody", 1, prepared(1))) == (False, None)
        store.rollback(handle)


@pytest.mark.parametrize("place", [name for name in THERE if not isinstance(KINDS[name], Sql)], indirect=True)
def test_a_decision_whose_row_was_claimed_before_its_commit_writes_nothing(place, store):
    """Nothing holds the row meanwhile, as a lock does in SQL: only the version that was read tells."""
    claim(store)
    with place.database.connect() as handle:
        store.begin(handle)
        assert store.read_incarnation(handle, "orders") == 1
        place.kind.put(handle, 1)
        assert store.decide(handle, Decision("orders", 1, prepared(1)))[0]
        [row] = claim(store, owner="you")
        with pytest.raises(TransactionAborted, match="another owner has claimed it"):
            store.commit(handle)
    assert store.read(["orders"]) == [row]
    assert place.numbers == []


def test_a_lost_decision_is_noticed(place, store):
    [row] = claim(store)
    place.write(store, 1)
    [newer] = store.read(["orders"])
    with place.database.connect() as handle:
        store.begin(handle)
        with pytest.raises(ConfigurationError):
            store.read_incarnation(handle, "orders", known=replace(newer, prepared=prepared(1, 2)))
        store.rollback(handle)
    assert row.namespace == newer.namespace


def test_a_state_that_could_not_be_settled_is_not_decided(place, store):
    claim(store)
    with place.database.connect() as handle:
        store.begin(handle)
        with pytest.raises(IllegalStateError):
            store.decide(handle, Decision("orders", 1, prepared(2)))
        store.rollback(handle)


# Records


def test_an_outcome_is_recorded_once_and_the_next_decision_forgets_it(place, store):
    claim(store)
    place.write(store, 1)
    [row] = store.read(["orders"])
    store.record_outcomes([(row, Outcome.COMMITTED, "")])
    store.record_outcomes([(row, Outcome.UNVERIFIABLE, "it saw less")])
    assert store.read(["orders"])[0].completed is Outcome.COMMITTED
    assert store.incidents() == []
    place.write(store, 2)
    assert store.read(["orders"])[0].completed is None
    store.record_outcomes([(row, Outcome.COMMITTED, "of an older decision")])
    assert store.read(["orders"])[0].completed is None


def test_a_loss_is_kept_until_a_person_has_looked(place, store):
    claim(store)
    place.write(store, 1)
    [row] = store.read(["orders"])
    for _ in range(2):
        store.record_outcomes([(row, Outcome.LOST, "gone")])
    place.write(store, 2)
    [found] = store.incidents("ord")
    assert (found.state, found.outcome, found.detail, found.reported_at) == (row.prepared, Outcome.LOST, "gone", None)
    assert store.incident("orders", row.prepared) is Outcome.LOST
    assert store.incident("orders", prepared(1, 2)) is None
    store.note_reported([("orders", row.prepared), ("nobody", row.prepared)])
    assert store.incidents()[0].reported_at is not None
    assert (store.incidents("orders/"), store.incidents_of(["order"])) == ([], [])
    assert [store.acknowledge("orders", row.prepared) for _ in range(2)] == [True, False]
    assert store.incidents() == []
    assert store.incidents(acknowledged=True) == store.incidents_of(["orders", "nobody"])


def test_the_settled_mark_only_rises(store):
    claim(store, "a", "b", raise_to={"a": 5, "b": 5})
    store.mark_settled({"a": 3, "b": 4, "nobody": 1})
    store.mark_settled({"a": 2})
    assert [row.settled_incarnation for row in store.find("")] == [3, 4]


def test_work_under_the_locks_of_rows_is_done_by_one_after_the_other(store):
    claim(store, "a", "b")
    inside, most = [], []

    def work() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(store.while_locked, ["a", "b"], work, Deadline(60)) for _ in range(8)]:
            one.result()
    assert (max(most), len(most)) == (1, 8)


# Answers that are lost


@pytest.mark.parametrize("produces", [True, False])
def test_the_row_tells_whether_a_commit_without_an_answer_has_happened(place, store, produces):
    claim(store)
    with place.database.connect() as handle:
        for written in (True, False):
            store.begin(handle)
            store.read_incarnation(handle, "orders")
            ours = prepared(1, 10 + written)
            if produces:
                mine, name = store.decide(handle, Decision("orders", 1, ours))
            else:
                mine, name = store.hold(handle, Decision("orders", 1))
            assert mine
            place.kind.put(handle, int(written))
            (store.commit if written else store.discard)(handle)
            row = store.read_locked("orders", Deadline(60))
            if produces:
                assert (row.prepared == ours) is written
            elif name is not None:
                known = store.transaction_verdict(name)
                assert known is (DatabaseVerdict.COMMITTED if written else DatabaseVerdict.ABORTED)
    assert store.transaction_verdict(None) is DatabaseVerdict.UNKNOWN


# Under a writer, on a simulated Kafka


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> ServedKafka:
    made = ServedKafka()
    made.plant(monkeypatch)
    return made


def writer(place: Place, **more: Any) -> DualWriter:
    return DualWriter(
        "orders", **{"kafka": SETTINGS, "database": place.database, "limits": WriterLimits(max_lanes=1), **more}
    )


@contextmanager
def block(place: Place, owner: DualWriter, number: int) -> Iterator[None]:
    """A dual write of this number."""
    with owner.transaction() as tx:
        given = tx._dual_write.resource(place.database.traits.gives)  # whatever its name is
        name = place.database.traits.gives
        place.kind.put(given if name == "connection" else _Named(name, given), number)
        tx.produce(TOPIC, str(number), partition=0)
        yield


class _Named:
    def __init__(self, name: str, value: object) -> None:
        setattr(self, name, value)


def both(place: Place, kafka: ServedKafka) -> tuple[list[int], list[object]]:
    return place.numbers, kafka.visible()


def test_a_writer_commits_both_sides_or_neither(place, kafka):
    with writer(place) as owner:
        with block(place, owner, 1):
            pass
        with pytest.raises(ZeroDivisionError), block(place, owner, 2):
            raise ZeroDivisionError
        with block(place, owner, 3):
            pass
    assert not [one for one in status(kafka=SETTINGS, database=place.database) if one.needs_recovery]
    assert both(place, kafka) == ([1, 3], ["1", "3"])


def test_a_second_writer_fences_the_first(place, kafka):
    with writer(place) as first:
        with block(place, first, 1):
            pass
        with writer(place) as second:
            with pytest.raises(Fenced), block(place, first, 2):
                pass
            with block(place, second, 3):
                pass
    assert both(place, kafka) == ([1, 3], ["1", "3"])


@pytest.mark.parametrize("written", [True, False])
def test_a_writer_resolves_a_commit_without_an_answer(place, kafka, monkeypatch, written):
    kind = type(place.database.store())
    commit, discard, lost = kind.commit, kind.discard, []

    def unanswered(self: Any, handle: Any, **more: Any) -> None:
        if lost:
            commit(self, handle, **more)
            return
        lost.append(1)
        if written:
            commit(self, handle, **more)
        discard(self, handle)
        raise TransactionInDoubt("the answer is missing")

    monkeypatch.setattr(kind, "commit", unanswered)
    monkeypatch.setattr(kind, "with_commit", None)  # an exchange of both is lost in test_commit_with_decision.py
    with writer(place) as owner:
        if written:
            with block(place, owner, 1):
                pass
        else:
            with pytest.raises(TransactionAborted), block(place, owner, 1):
                pass
        with block(place, owner, 2):
            pass
    assert lost
    assert both(place, kafka) == (([1, 2], ["1", "2"]) if written else ([2], ["2"]))


@pytest.mark.parametrize("point", ["write.produced", "write.recorded", "write.decided"])
def test_recovery_completes_or_aborts_what_an_owner_has_left(place, kafka, monkeypatch, point):
    class Dead(BaseException):
        pass

    def die(name: str) -> None:
        if name == point:
            raise Dead

    owner = mortal(writer(place))
    owner.open()
    with monkeypatch.context() as patch:
        patch.setattr("dualwrite.failpoints.hit", die)
        # It can abort nothing any more: it is dead.
        patch.setattr("dualwrite.kafka.producer.TransactionalProducer.abort_transaction", die_quietly)
        with pytest.raises(Dead), block(place, owner, 1):
            pass
    report = recover("orders", kafka=SETTINGS, database=place.database)
    assert report.losses == []
    decided = point == "write.decided"
    assert report.rolled_forward == (["orders"] if decided else [])
    assert not [one for one in status(kafka=SETTINGS, database=place.database) if one.needs_recovery]
    assert both(place, kafka) == (([1], ["1"]) if decided else ([], []))


def die_quietly(*_: object) -> None:
    from dualwrite import Unavailable

    raise Unavailable("the owner is dead")


# After the death of the owner's process


@pytest.mark.parametrize("place", [name for name in THERE if not KINDS[name].dies], indirect=True)
@pytest.mark.parametrize(
    "point",
    [
        point if point in {"decided", "committed"} else pytest.param(point, marks=pytest.mark.thorough)
        for point in POINTS
    ],
)
def test_an_owner_that_is_killed_leaves_both_or_nothing_and_no_lock(place, point):
    if place.kind.alone:
        place.database.close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROOF), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "harness.deciding", place.name, place.text, point],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    if place.kind.alone:
        place.database = place.kind.open(place.text)
        place.database.check()
    store = place.database.store()
    [row] = claim(store, owner="the next")
    assert row.incarnation == 2
    committed = point == "committed"
    assert row.prepared == (prepared(1) if committed else row.prepared)
    assert row.prepared.has_transaction is committed
    assert place.numbers == ([1] if committed else [])
    place.write(place.database.store(), 2, incarnation=2)
    assert place.numbers == ([1, 2] if committed else [2])
