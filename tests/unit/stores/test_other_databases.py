"""A writer whose database is not SQL: a dictionary behind the port, and a simulated Kafka."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from harness.death import mortal
from harness.dictionary import DictionaryDatabase
from harness.served import SETTINGS, TOPIC, ServedKafka

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DualWriter,
    Fenced,
    Transaction,
    TransactionAborted,
    TransactionInDoubt,
    WriterLimits,
    recover,
    status,
)
from dualwrite.errors import IllegalStateError
from dualwrite.operations import forget, terminate
from dualwrite.stores.sql.database import _OTHERS


@dataclass
class Place:
    kafka: ServedKafka
    database: DictionaryDatabase = field(default_factory=DictionaryDatabase)

    def writer(self, **kwargs) -> DualWriter:
        return DualWriter(
            "orders", **{"kafka": SETTINGS, "database": self.database, "limits": WriterLimits(max_lanes=1), **kwargs}
        )

    @property
    def pairs(self) -> dict[str, str]:
        return self.database.keys.pairs

    @property
    def messages(self) -> list[object]:
        return self.kafka.visible()


@pytest.fixture
def place(monkeypatch):
    kafka = ServedKafka()
    kafka.plant(monkeypatch)
    return Place(kafka)


def put(tx: Transaction, name: str) -> None:
    tx.batch.put(name, "ordered")
    tx.produce(TOPIC, name, partition=0)


def test_both_sides_commit_or_neither(place):
    with place.writer() as writer:
        with writer.transaction() as tx:
            put(tx, "1")
        with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
            put(tx, "2")
            raise ZeroDivisionError
        with writer.transaction() as tx:
            tx.batch.put("3", "ordered")  # no message
        with pytest.raises(TransactionAborted, match="a condition of the user's"), writer.transaction() as tx:
            put(tx, "refused")
    assert (place.pairs, place.messages) == ({"1": "ordered", "3": "ordered"}, ["1"])
    assert place.database.closed == 0, "it is the caller's"
    assert [item.needs_recovery for item in status(kafka=SETTINGS, database=place.database)] == [False]


@pytest.mark.parametrize("asked", ["connection", "session", "multi"])
def test_what_the_database_does_not_have_is_refused_with_what_it_has(place, asked):
    with place.writer() as writer:
        with (
            writer.transaction() as tx,
            pytest.raises(IllegalStateError, match=f"no tx.{asked}.*Dictionary.*use tx.batch"),
        ):
            getattr(tx, asked)
        with writer.transaction() as tx:
            batch = tx.batch
        with pytest.raises(IllegalStateError):
            _ = tx.batch
        with pytest.raises(IllegalStateError, match="has ended"):
            batch.put("late", "")
    assert place.pairs == {}


def test_what_only_sql_can_do_is_refused(place):
    from sqlalchemy.orm import sessionmaker

    with place.writer() as writer:
        with pytest.raises(ConfigurationError, match="sessions need a SQL database.*Dictionary"):
            writer.bind(sessionmaker())
        with pytest.raises(IllegalStateError, match="takes no str.*Dictionary"), writer.transaction("a connection"):
            pass
    with pytest.raises(ConfigurationError, match="Dictionary has no leases"):
        DualWriter.leased("fleet", kafka=SETTINGS, database=place.database).open()
    with pytest.raises(ConfigurationError, match="schema"):
        place.writer(schema="s")
    with pytest.raises(ConfigurationError, match="Dictionary has no forgetting"):
        forget("orders", kafka=SETTINGS, database=place.database)


def test_units_run_one_in_each_dual_write(place):
    def fail(tx: Transaction) -> None:
        put(tx, "no")
        raise ZeroDivisionError

    with place.writer() as writer:
        kept = [writer.submit(lambda tx, n=n: put(tx, str(n))) for n in range(3)]
        failed = writer.submit(fail)
        for one in kept:
            one.result(60)
        with pytest.raises(ZeroDivisionError):
            failed.result(60)
    assert (list(place.pairs), place.messages) == (["0", "1", "2"], ["0", "1", "2"])


def test_a_second_writer_fences_the_first(place):
    with place.writer() as first:
        with first.transaction() as tx:
            put(tx, "1")
        with place.writer() as second:
            with pytest.raises(Fenced), first.transaction() as tx:
                pass
            with second.transaction() as tx:
                put(tx, "2")
    assert (list(place.pairs), place.messages) == (["1", "2"], ["1", "2"])


def test_a_claim_between_the_decision_and_its_commit_aborts_both_sides(place):
    def before() -> None:
        recover("orders", kafka=SETTINGS, database=place.database)

    with place.writer() as writer:
        with pytest.raises(TransactionAborted), writer.transaction() as tx:
            put(tx, "1")
            place.database.keys.planted = before
        with pytest.raises(Fenced), writer.transaction() as tx:
            pass
    assert (place.pairs, place.messages) == ({}, [])


@pytest.mark.parametrize("produces", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_a_lost_answer_is_found_out(place, produces, written):
    def lost() -> None:
        raise TransactionInDoubt("the answer is missing")

    def before() -> None:
        raise TransactionInDoubt("the answer is missing")

    with place.writer() as writer:
        place.database.keys.planted = lost if written else before
        try:
            with writer.transaction() as tx:
                tx.batch.put("1", "ordered")
                if produces:
                    tx.produce(TOPIC, "1", partition=0)
        except TransactionAborted:
            assert not written
        else:
            assert written
        with writer.transaction() as tx:
            put(tx, "2")
    assert list(place.pairs) == (["1", "2"] if written else ["2"])
    assert place.messages == (["1", "2"] if written and produces else ["2"])


def test_a_commit_still_on_its_way_can_no_longer_happen_once_it_was_found_aborted(place):
    late = []

    def before() -> None:
        raise TransactionInDoubt("the answer is missing")

    keys = place.database.keys
    commit = keys.commit

    def delayed(handle, changes, **kwargs):
        late.append(list(changes))
        return commit(handle, changes, **kwargs)

    with place.writer() as writer:
        keys.commit, keys.planted = delayed, before
        with pytest.raises(TransactionAborted), writer.transaction() as tx:
            put(tx, "1")
        keys.commit = commit
        assert keys.write(late[0]) is False


def test_recovery_completes_what_a_dead_owner_has_decided(place, monkeypatch):
    writer = mortal(place.writer(limits=WriterLimits(max_lanes=1, timeout_s=5)))
    writer.open()
    monkeypatch.setattr("dualwrite.writing.lane.Lane.complete", die)
    with pytest.raises(CompletionPending), writer.transaction() as tx:
        put(tx, "1")
    [left] = status("orders", kafka=SETTINGS, database=place.database)
    assert left.needs_recovery
    report = recover("orders", kafka=SETTINGS, database=place.database)
    assert (report.rolled_forward, report.losses) == (["orders"], [])
    assert (list(place.pairs), place.messages) == (["1"], ["1"])
    assert not terminate("orders", kafka=SETTINGS, database=place.database).terminated


def die(*_: object) -> None:
    raise CompletionPending("the owner is dead", transactional_id="orders")


def test_a_loss_is_an_incident_that_a_person_acknowledges(place, monkeypatch):
    writer = mortal(place.writer(limits=WriterLimits(max_lanes=1, timeout_s=5)))
    writer.open()
    with monkeypatch.context() as patch:
        patch.setattr("dualwrite.writing.lane.Lane.complete", die)
        with pytest.raises(CompletionPending), writer.transaction() as tx:
            put(tx, "1")
    store = place.database.store()
    [row] = store.read(["orders"])
    place.kafka.abort_by_timeout(row.kafka_id(row.incarnation))
    report = recover("orders", kafka=SETTINGS, database=place.database)
    [loss] = report.losses
    [incident] = store.incidents()
    assert incident.state == loss.row.prepared
    assert incident.reported_at is not None
    assert store.acknowledge("orders", incident.state)
    assert not store.acknowledge("orders", incident.state)
    assert (store.incidents(), store.incidents(acknowledged=True)[0].state) == ([], incident.state)


def test_a_url_names_a_database_that_is_closed_with_its_writer(place, monkeypatch):
    made = []

    class Named(DictionaryDatabase):
        @classmethod
        def from_url(cls, url: str) -> Named:
            made.append((url, cls()))
            return made[-1][1]

    monkeypatch.setitem(_OTHERS, "dictionary", f"{__name__}.Named")
    monkeypatch.setattr(f"{__name__}.Named", Named, raising=False)
    with place.writer(database="dictionary:///here") as writer, writer.transaction() as tx:
        put(tx, "1")
    [(url, database)] = made
    assert (url, database.closed, list(database.keys.pairs)) == ("dictionary:///here", 1, ["1"])
