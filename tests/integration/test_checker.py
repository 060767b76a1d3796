"""The checker on real servers: nothing to find after a kill and a settling; whatever is wrong is found."""

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.checker import Case
from harness.worker import QUERY
from sqlalchemy import text

from dualwrite import recover
from dualwrite.testing import Checker, Follower, Journal, Kind

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    """One worker was killed after its second decision; a second one was not started."""
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.decided:2", killed=True)
    return case


@pytest.fixture
def check(case):
    def run(follower=None, **settings):
        made = {
            "journal": case.journal,
            "kafka": case.kafka,
            "topics": [case.topic],
            "database": case.url,
            "query": QUERY,
            "messages_per_operation": 2,
        }
        return Checker(**{**made, **settings}).check(follower)

    return run


def kinds(verdict):
    return [(finding.kind, finding.subject) for finding in verdict.findings]


def test_what_a_killed_worker_left_is_settled_and_nothing_is_wrong(case, check):
    with Follower(case.kafka, [case.topic]) as follower:
        verdict = check(follower)
    assert verdict.findings == []
    assert (verdict.operations, verdict.acknowledged, verdict.present) == (2, 1, 2)


def test_a_row_without_messages_is_torn(case, check, engine):
    with Journal(case.journal) as journal:
        journal.begun("alone")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO operations (id) VALUES ('alone')"))
    assert kinds(check()) == [(Kind.TORN, "alone")]


def test_messages_of_nobody_are_foreign_and_torn(case, check):
    producer = Producer(case.kafka)
    producer.produce(case.topic, "nobody", partition=0)
    assert producer.flush(120) == 0
    assert kinds(check()) == [(Kind.FOREIGN, "nobody"), (Kind.TORN, "nobody")]


def test_a_transaction_that_stays_open_hangs(case, check):
    producer = Producer({**case.kafka, "transactional.id": f"another-writer-{case.topic}"})
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(case.topic, "open", partition=0)
    assert producer.flush(120) == 0
    (finding,) = check(timeout_s=3).findings
    assert (finding.kind, "stays open" in finding.detail) == (Kind.HANGING, True)
    producer.abort_transaction(120)
    assert check().findings == []


def test_a_loss_that_is_on_record_is_lost(case, check, engine):
    """An operator aborts the decided transaction before anybody settles."""
    from dualwrite.stores.sql.store import SqlStateStore

    (row,) = SqlStateStore(engine).read(["case"])
    Producer({**case.kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
    assert recover(open_for_s=0, kafka=case.kafka, database=engine).losses
    found = kinds(check())
    assert (Kind.LOST, "case") in found
    assert (Kind.TORN, "w1-1") in found


def test_what_changes_by_settling_again_is_unstable(case, check, engine):
    recover(open_for_s=0, kafka=case.kafka, database=engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE SEQUENCE readings"))
    verdict = check(query=f"{QUERY} UNION ALL SELECT 'reading ' || nextval('readings')")
    assert (Kind.UNSTABLE, "rows") in [(kind, subject) for kind, subject in kinds(verdict)]


def test_messages_that_only_the_consumer_saw_that_ran_all_the_time_are_a_disagreement(case, check, engine):
    recover(open_for_s=0, kafka=case.kafka, database=engine)
    with Follower(case.kafka, [case.topic]) as follower:
        follower.seen({case.topic: {0: 4, 1: 4}}, timeout_s=60)  # two transactions: a message and a marker each
        admin = AdminClient(case.kafka)  # kept until the answer is there
        for future in admin.delete_records([TopicPartition(case.topic, 0, 2)]).values():
            future.result(120)
        verdict = check(follower)
    assert (Kind.DISAGREEING, f"{case.topic}[0]") in kinds(verdict)
