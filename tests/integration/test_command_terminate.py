"""``dualwrite terminate``, and ``recover --state``, as an operator runs them: ids of this library, and of other programs."""

import json
from contextlib import closing

import pytest
from confluent_kafka import KafkaException, Producer
from harness.checker import Case
from harness.patience import PATIENCE_S

from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.stores.sql.store import SqlStateStore


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_the_database_has_decided_is_refused_or_given_up_as_an_incident(
    dualwrite, tmp_path, kafka, url, engine, dualwrite_topic, visible
):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.decided:2", killed=True)
    [item] = [
        one
        for one in json.loads(dualwrite("status", "--json", "--url", url).stdout)["ids"]
        if one["kafka"] == "Ongoing"
    ]
    for name in (item["transactional_id"], item["kafka_id"]):
        refused = dualwrite("terminate", name, "--url", url)
        assert refused.exit_code == 3, refused.output
        assert "dualwrite recover" in refused.output
    without_its_database = dualwrite("terminate", item["kafka_id"])
    assert without_its_database.exit_code == 3, without_its_database.output
    before = SqlStateStore(engine).find("")

    given_up = dualwrite("terminate", item["kafka_id"], "--url", url, "--lose-decided", "--json")
    assert given_up.exit_code == 4, given_up.output
    document = json.loads(given_up.stdout)
    assert document["terminated"] == [item["kafka_id"]]
    assert [loss["outcome"] for loss in document["losses"]] == ["lost"]
    [incident] = SqlStateStore(engine).incidents()
    assert incident.reported_at is not None
    assert "given up by" in incident.detail
    assert {row.incarnation for row in SqlStateStore(engine).find("")} == {before[0].incarnation + 1}
    assert set(visible()) == {b"w1-0"}
    assert dualwrite("status", "--url", url).exit_code == 4
    again = dualwrite("terminate", item["transactional_id"], "--url", url)
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_is_undecided_is_aborted(dualwrite, tmp_path, kafka, url, dualwrite_topic, visible):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.recorded:2", killed=True)
    shown = json.loads(dualwrite("status", "--json", "--url", url).stdout)["ids"]
    [name] = [one["transactional_id"] for one in shown if one["kafka"] == "Ongoing"]
    done = dualwrite("terminate", name, "--url", url)
    assert done.exit_code == 0, done.output
    assert "1 terminated" in done.stdout
    assert set(visible()) == {b"w1-0"}
    assert dualwrite("status", "--url", url).exit_code == 0
    assert dualwrite("terminate", "nobody", "--url", url).exit_code == 6


def test_the_transaction_of_another_program_is_aborted_without_a_database(
    dualwrite, kafka, kafka_id, dualwrite_topic, visible, url
):
    producer = Producer({**kafka, "transactional.id": kafka_id})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"open")
    producer.flush(PATIENCE_S)
    shown = json.loads(dualwrite("status", "--json", "--url", url).stdout)
    assert shown["ids"] == []
    assert shown["longest_open_s"] > 0  # it has no row, and yet it shows
    assert json.loads(dualwrite("status", kafka_id, "--json", "--url", url).stdout)["longest_open_s"] is None
    done = dualwrite("terminate", kafka_id)
    assert done.exit_code == 0, done.output
    assert f"{kafka_id}: aborted" in done.stdout
    with pytest.raises(KafkaException, match="fenced|FENCED|epoch"):
        producer.commit_transaction(PATIENCE_S)
    assert visible() == []
    assert dualwrite("terminate", f"{kafka_id}-unknown").exit_code == 6


@pytest.mark.parametrize("engine_name", ["librdkafka", "native"])
@pytest.mark.parametrize("named", [True, False])
def test_the_transaction_of_another_program_is_completed_by_its_state_in_kips_form(
    dualwrite, kafka, kafka_id, dualwrite_topic, visible, engine_name, named
):
    with closing(TransactionalProducer({**kafka, "dualwrite.engine": engine_name}, kafka_id)) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(dualwrite_topic, b"prepared")
        state = producer.prepare_transaction()
    done = dualwrite("recover", kafka_id, "--state", f"{state.producer_id}:{state.epoch}" if named else "")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{kafka_id}: {'committed' if named else 'aborted'}\n"
    assert visible() == ([b"prepared"] if named else [])
    assert dualwrite("recover", kafka_id, "--state", "").stdout == f"{kafka_id}: nothing was ongoing\n"
    assert dualwrite("recover", f"{kafka_id}-unknown", "--state", "").exit_code == 6


def test_a_state_is_for_ids_of_other_programs_alone(dualwrite):
    ours = dualwrite("recover", "orders.85c0a8daf1ee.6", "--state", "1:2")
    assert ours.exit_code == 1, ours.output
    assert "its row holds the state" in ours.output
    assert dualwrite("recover", "--prefix", "a", "--state", "1:2").exit_code == 2
    assert dualwrite("recover", "a").exit_code == 2, "no database"
