"""What an open transaction blocks, whose it is, and what comes first."""

import pytest

from dualwrite.protocol.blocking import (
    Blocker,
    HeldPartition,
    PartitionEnds,
    StandingGroup,
    blockers,
    standing_groups,
    withheld,
)
from dualwrite.protocol.values import NEVER_MS, TransactionStatus, TransactionView

NOW_MS = 1_000_000
A, B = ("a", 0), ("b", 3)


def view(producer_id, *partitions, age_s=60.0, timeout_ms=900_000, status=TransactionStatus.ONGOING):
    return TransactionView(status, producer_id, 4, NOW_MS - int(age_s * 1000), timeout_ms, partitions)


def found(opened, ends):
    return {one.kafka_id: one for one in blockers(opened, ends, NOW_MS)}


def test_it_withholds_what_is_behind_its_first_offset_and_stops_the_groups_there():
    ends = {A: PartitionEnds(10, 110, {7: 10}, {"g": 9}), B: PartitionEnds(5, 25, {7: 20, 8: 5}, {"g": 5, "h": 5})}
    one = found({"mine": view(7, B, A), "theirs": view(8, B)}, ends)
    assert one["mine"].partitions == (HeldPartition("a", 0, 10, 100), HeldPartition("b", 3, 20, 5))
    assert one["mine"].groups == (StandingGroup("g", "a", 0, 9, 100),), "in b another one is first"
    assert (one["mine"].records, one["theirs"].records) == (105, 20)
    assert one["theirs"].groups == (StandingGroup("g", "b", 3, 5, 20), StandingGroup("h", "b", 3, 5, 20))
    assert one["theirs"].standing == {"g": 20, "h": 20}
    assert (one["mine"].open_for_s, one["mine"].aborted_in_s) == (60.0, 840.0)
    assert withheld(one.values()) == 120, "in each partition from the first one on"
    assert standing_groups(one.values()) == {"g", "h"}


def test_what_has_written_nothing_or_is_first_no_more_blocks_nothing():
    ends = {A: PartitionEnds(30, 30, {8: 30}, {"g": 30}), B: PartitionEnds(30, 40, {8: 30}, {"g": 30})}
    one = found({"idle": view(7, A, B)}, ends)["idle"]
    assert one.partitions == (HeldPartition("a", 0, None, 0), HeldPartition("b", 3, None, 0))
    assert (one.records, one.groups) == (0, ())


def test_what_is_not_known_is_not_nothing():
    assert found({"x": view(7, A)}, {})["x"].records is None
    one = found({"x": view(7, A, B)}, {B: PartitionEnds(30, 40, {7: 30})})["x"]
    assert (one.partitions[0].records, one.records) == (None, 10)


def test_where_the_leader_does_not_tell_first_offsets_any_of_them_may_be_first():
    ends = {A: PartitionEnds(10, 110, None, {"g": 10})}
    one = found({"x": view(7, A), "y": view(8, A)}, ends)
    assert [(each.records, each.standing) for each in one.values()] == [(100, {"g": 100})] * 2
    assert withheld(one.values()) == 100
    assert found({"x": view(7, A)}, {A: PartitionEnds(10, 10, None, {"g": 10})})["x"].records == 0


def test_what_stops_most_groups_comes_first_then_what_withholds_most_then_the_oldest():
    ends = {A: PartitionEnds(0, 10, {1: 0, 2: 5, 3: 5}, {"g": 0}), B: PartitionEnds(0, 500, {4: 0})}
    opened = {"old": view(2, A, age_s=70.0), "young": view(3, A), "groups": view(1, A), "records": view(4, B)}
    assert list(found(opened, ends)) == ["groups", "records", "old", "young"]


@pytest.mark.parametrize("timeout_ms", [NEVER_MS, None])
def test_what_has_no_time_limit_says_so(timeout_ms):
    one = found({"x": view(7, timeout_ms=timeout_ms)}, {})["x"]
    assert (one.aborted_in_s, one.records) == (None, 0)
    assert one.way_on.startswith("its program ends it.")


@pytest.mark.parametrize(
    ("kafka_id", "maker", "writer"),
    [
        ("orders#1.0123456789ab.3", "dualwrite", "orders"),
        ("word-count-4ba4cf9c-fb7b-4a4e-a1e9-2a19f5aa0b9a-3", "Kafka Streams, by its id", None),
        ("billing-sink-0-17", "Flink, by its id", None),
        ("orders.x.1", "another program", None),
        ("me", "another program", None),
    ],
)
def test_the_form_of_its_id_speaks_for_its_maker(kafka_id, maker, writer):
    one = found({kafka_id: view(7)}, {})[kafka_id]
    assert (one.maker, one.writer) == (maker, writer)


def test_what_can_be_done_depends_on_whose_it_is():
    def way_on(kafka_id, **changed):
        return found({kafka_id: view(7, **changed)}, {})[kafka_id].way_on

    assert "dualwrite recover job-0-1 --state 7:4` commits it; `dualwrite terminate job-0-1` aborts it" in way_on(
        "job-0-1"
    )
    assert "`dualwrite recover orders` with that one" in way_on("orders#1.0123456789ab.3")
    ending = way_on("job-0-1", status=TransactionStatus.PREPARE_ABORT)
    assert ending == "nothing: its coordinator is ending it"
    assert Blocker("x", TransactionStatus.ONGOING, 7, 4, 0.0, None).records == 0
