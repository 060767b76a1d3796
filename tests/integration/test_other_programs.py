"""The recipe for a dead Flink job: its transactions end as its last checkpoint says, and its next attempt can go on."""

import json

import pytest
from harness.kafka_tools import flink_producer
from harness.patience import wait_until

DIED = 137


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_a_dead_flink_job_left_ends_as_its_checkpoint_says(
    dualwrite, kafka, kafka_id, url, dualwrite_topic, visible
):
    servers, sink = kafka["bootstrap.servers"], f"{kafka_id}-sink"
    in_checkpoint, since = f"{sink}-0-17", f"{sink}-0-18"
    code, state = flink_producer("flush", servers, in_checkpoint, dualwrite_topic, "in the checkpoint", "too")
    assert code == DIED
    code, later_state = flink_producer("flush", servers, since, dualwrite_topic, "after it")
    assert code == DIED
    shown = {
        one["kafka_id"]: one
        for one in json.loads(dualwrite("status", "--json", "--url", url).stdout)["open_transactions"]
    }
    assert {f"{shown[one]['producer_id']}:{shown[one]['epoch']}" for one in (in_checkpoint, since)} == {
        state,
        later_state,
    }
    assert {shown[one]["made_by"] for one in (in_checkpoint, since)} == {"Flink, by its id"}
    assert shown[in_checkpoint]["records"] >= 2

    committed = dualwrite("recover", in_checkpoint, "--state", state)
    assert (committed.exit_code, committed.stdout) == (0, f"{in_checkpoint}: committed\n")
    aborted = dualwrite("recover", since, "--state", "")
    assert (aborted.exit_code, aborted.stdout) == (0, f"{since}: aborted\n")
    wait_until(lambda: len(visible()) == 2)
    assert sorted(visible()) == [b"in the checkpoint", b"too"]

    # The job restored from that checkpoint commits once more, and learns that the transaction is not its own any more.
    assert flink_producer("resume", servers, in_checkpoint, state) == (0, "ProducerFencedException")
    assert sorted(visible()) == [b"in the checkpoint", b"too"]
    again = dualwrite("recover", in_checkpoint, "--state", state)
    assert (again.exit_code, again.stdout) == (0, f"{in_checkpoint}: nothing was ongoing\n")


def test_a_transaction_that_its_state_does_not_name_is_aborted(dualwrite, kafka, kafka_id, dualwrite_topic, visible):
    """The state of an earlier checkpoint names another transaction."""
    name = f"{kafka_id}-sink-0-3"
    _, state = flink_producer("flush", kafka["bootstrap.servers"], name, dualwrite_topic, "one")
    producer_id, _, epoch = state.partition(":")
    done = dualwrite("recover", name, "--state", f"{producer_id}:{int(epoch) + 1}")
    assert (done.exit_code, done.stdout) == (0, f"{name}: aborted\n")
    assert visible() == []


def test_the_job_itself_commits_what_nobody_has_settled(kafka, kafka_id, dualwrite_topic, visible):
    """As Flink does it: the same producer, resumed in another process."""
    servers, name = kafka["bootstrap.servers"], f"{kafka_id}-sink-0-4"
    _, state = flink_producer("flush", servers, name, dualwrite_topic, "one")
    assert flink_producer("resume", servers, name, state) == (0, "committed")
    wait_until(lambda: visible() == [b"one"])
