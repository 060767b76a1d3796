"""Consumed offsets as rows: only the last member to claim a partition moves its offset."""

import pytest

from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset, ConsumedOffsets

AT = ("payments", 3)


@pytest.fixture
def member(database):
    def make(name, group="g"):
        return ConsumedOffsets(database.engine(), database.schema, group, name)

    return make


def move(rows, connection, claimed, to, at=AT):
    with connection.begin():
        return rows.move(connection, at, claimed, to)


def test_a_claim_finds_where_the_last_member_has_stopped(member, connection):
    first = member("0")
    claimed = first.claim({AT: "id"})[AT]
    assert claimed == ClaimedOffset(1, NOTHING_YET)
    assert move(first, connection, claimed, 7)
    assert move(first, connection, ClaimedOffset(1, 7), 9)
    assert member("1").claim({AT: "id"})[AT] == ClaimedOffset(2, 9)


def test_a_member_that_lost_its_partition_moves_nothing(member, connection):
    """Neither back, nor forward: what it has read belongs to the other one, even if that has written nothing yet."""
    slow, quick = member("slow"), member("quick")
    read = slow.claim({AT: "id"})[AT]
    taken = quick.claim({AT: "id"})[AT]
    assert not move(slow, connection, read, 5)
    assert move(quick, connection, taken, 8)
    assert not move(slow, connection, read, 5)
    assert not move(slow, connection, ClaimedOffset(read.epoch, 8), 12)
    assert quick.claim({AT: "id"})[AT].next_offset == 8


def test_an_offset_is_moved_only_from_where_the_member_knows_it(member, connection):
    rows = member("0")
    claimed = rows.claim({AT: None})[AT]
    assert not move(rows, connection, ClaimedOffset(claimed.epoch, 4), 9)


def test_a_rolled_back_move_is_none(member, connection):
    rows = member("0")
    claimed = rows.claim({AT: None})[AT]
    with connection.begin() as transaction:
        assert rows.move(connection, AT, claimed, 5)
        transaction.rollback()
    assert rows.claim({AT: None})[AT].next_offset == NOTHING_YET


def test_a_topic_made_anew_begins_again(member, connection):
    rows = member("0")
    move(rows, connection, rows.claim({AT: "old"})[AT], 5)
    assert rows.claim({AT: None})[AT].next_offset == 5, "a broker that tells no id proves nothing"
    assert rows.claim({AT: "new"})[AT].next_offset == NOTHING_YET


def test_groups_and_partitions_have_rows_of_their_own(member, connection):
    rows, others = member("0"), member("0", group="h")
    claimed = rows.claim({AT: "id", ("payments", 4): "id"})
    move(rows, connection, claimed[AT], 5)
    assert rows.claim({("payments", 4): "id"})[("payments", 4)].next_offset == NOTHING_YET
    assert others.claim({AT: "id"})[AT].next_offset == NOTHING_YET
    assert rows.claim({}) == {}
