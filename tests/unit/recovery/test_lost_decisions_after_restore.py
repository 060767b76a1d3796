"""After a restore: the Kafka ids that the database has forgotten, and which of them are this database's own."""

from dataclasses import replace

import pytest
from harness.simulated import TIMEOUT_S

from dualwrite.clock import Deadline
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import StateRow, TransactionStatus, TransactionView
from dualwrite.recovery.recover import (
    Forgotten,
    find_forgotten,
    next_incarnations,
    retire_without_rows,
    went_back,
)

OURS, OTHERS = "0123456789ab", "ba9876543210"
OPEN, UNKNOWN = TransactionStatus.ONGOING, TransactionStatus.NO_SUCH_ID
SOON = Deadline(TIMEOUT_S)


class Kafka:
    """Knows these ids; each has something open."""

    def __init__(self, *kafka_ids, status=OPEN):
        self.kafka_ids = kafka_ids
        self.status = status
        self.retired = []

    def list_ids(self, prefix, _deadline):
        return [one for one in self.kafka_ids if one.startswith(prefix)]

    def describe(self, kafka_ids, _deadline):
        assert kafka_ids, "nothing to ask about"
        return {one: TransactionView(self.status) for one in kafka_ids}

    def retire(self, kafka_ids, _deadline):
        assert kafka_ids, "nothing to retire"
        self.retired += kafka_ids


def row(name="orders", incarnation=3):
    return StateRow(name, PreparedTxnState(), OURS, incarnation, 0, None, "c", "me", None)


def forgotten(*kafka_ids, rows=(), asked_for=lambda _: True):
    return [
        (one.kafka_id, one.has_row) for one in find_forgotten(rows, Kafka(*kafka_ids), SOON, is_asked_for=asked_for)
    ]


def test_an_incarnation_above_the_rows_is_forgotten_and_the_rows_own_is_not():
    ids = [f"orders.{OURS}.{incarnation}" for incarnation in (2, 3, 4, 5)]
    assert forgotten(*ids, rows=[row()]) == [(ids[2], True), (ids[3], True)]


def test_the_ids_of_another_database_or_of_a_deleted_row_are_left_alone():
    assert forgotten(f"orders.{OTHERS}.9", rows=[row()]) == []


def test_an_id_without_a_row_is_forgotten_only_if_it_was_asked_for():
    ids = [f"orders#1.{OURS}.1", f"payments.{OURS}.1"]
    assert forgotten(*ids, rows=[row()], asked_for=lambda name: name == "orders#1") == [(ids[0], False)]


@pytest.mark.parametrize("other", ["orders", "orders.1", "orders.consumer.1", "my-app-0_1"])
def test_transactional_ids_of_other_programs_are_left_alone(other):
    assert forgotten(other) == []


def test_what_is_found_shows_the_coordinators_status_and_is_not_settled_yet():
    kafka_id = f"orders.{OURS}.4"
    [found] = find_forgotten([row()], Kafka(kafka_id), SOON, is_asked_for=lambda _: False)
    assert found == Forgotten(kafka_id, "orders", 4, OPEN, has_row=True, settled=False)


def test_a_stale_list_alone_makes_nothing_forgotten():
    """A broker may list what it coordinates no more. Retiring such an id would make it anew."""
    ids = [f"orders.{OURS}.4", f"payments.{OURS}.1"]
    kafka = Kafka(*ids, status=UNKNOWN)
    assert find_forgotten([row()], kafka, SOON, is_asked_for=lambda _: True) == []


def one(name, incarnation, *, has_row):
    return Forgotten(f"{name}.{OURS}.{incarnation}", name, incarnation, OPEN, has_row, settled=False)


def test_a_row_goes_on_above_everything_that_kafka_knows_of_it():
    found = [
        one("a", 7, has_row=True),
        one("a", 5, has_row=True),
        one("b", 2, has_row=True),
        one("c", 9, has_row=False),
    ]
    assert next_incarnations(found) == {"a": 8, "b": 3}


def test_only_ids_without_a_row_are_retired(caplog):
    kafka = Kafka()
    retire_without_rows([one("a", 7, has_row=True), one("c", 9, has_row=False)], kafka, SOON)
    assert kafka.retired == [f"c.{OURS}.9"]
    assert f"c.{OURS}.9: retired" in caplog.text
    retire_without_rows([one("a", 7, has_row=True)], kafka, SOON)
    assert kafka.retired == [f"c.{OURS}.9"]


def looking(rows=None):
    def work(here):
        store = here.context.store
        return went_back(store.find("") if rows is None else rows, store, here.context.coordinator, Deadline(TIMEOUT_S))

    return work


def test_no_evidence_no_request_for_the_rows():
    class Silent:
        def describe(self, *_):
            raise AssertionError("asked")

    assert went_back([], None, Silent(), SOON) == {}


def test_a_lost_claim_is_seen_by_the_id_that_the_database_has_not_claimed_yet(servers):
    before = servers.restored("b")
    servers.run(lambda here: here.write(here.lane("a"), "m1"))
    found = servers.run(looking())
    assert found.keys() == {"b"}
    what, claim_lost = found["b"]
    assert claim_lost
    assert before.kafka_id(before.incarnation + 1) in what


def test_a_lost_decision_does_not_count_as_a_lost_claim(servers):
    backups = []

    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        backups.append(servers.row())
        here.write(lane, "m2")

    servers.run(work)
    servers.database.rows["orders"] = backups[0]
    [(what, claim_lost)] = servers.run(looking()).values()
    assert not claim_lost
    assert "which the row does not name" in what


def test_a_row_whose_owner_went_on_meanwhile_is_no_evidence(servers):
    """The row was read first, and Kafka later: an owner may have claimed and decided in between."""
    servers.run(lambda here: here.ready())
    rows = [servers.row()]
    servers.run(lambda here: here.write(here.lane(), "m1"), "next owner")
    assert servers.run(looking(rows)) == {}
    servers.database.rows["orders"] = rows[0]
    assert servers.run(looking(rows)).keys() == {"orders"}


def test_a_row_that_was_deleted_meanwhile_is_no_evidence(servers):
    row = servers.restored("b")
    del servers.database.rows["b"]
    assert servers.run(looking([replace(row)])) == {}
