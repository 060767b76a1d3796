"""A gap in the sequence numbers before a transaction's first record shows that earlier ones were its own."""

from dualwrite.kafka.librdkafka.evidence import Sequences

IDS, NEXT_EPOCH = (7, 0), (7, 1)
HERE, THERE = ("orders", 0), ("orders", 1)


def test_transactions_that_follow_each_other_leave_no_gap():
    known = Sequences()
    assert known.take(IDS, {HERE: (0, 4)}) is None
    assert known.take(IDS, {HERE: (5, 5), THERE: (0, 2)}) is None
    assert known.take(IDS, {HERE: (6, 2**31 - 1)}) is None
    assert known.take(IDS, {HERE: (0, 1), THERE: (3, 3)}) is None


def test_messages_before_the_first_record_are_a_gap():
    known = Sequences()
    assert known.take(IDS, {HERE: (1, 4), THERE: (0, 1)}) == HERE
    assert known.take(IDS, {HERE: (5, 5), THERE: (3, 3)}) == THERE


def test_a_transaction_may_be_taken_twice():
    known = Sequences()
    for _ in range(2):
        assert known.take(IDS, {HERE: (0, 4)}) is None
    assert known.take(IDS, {HERE: (6, 7)}) == HERE
    assert known.take(IDS, {HERE: (6, 7)}) is None, "both sides abort: what is shown is all that is open"


def test_a_new_epoch_begins_at_zero():
    known = Sequences()
    assert known.take(IDS, {HERE: (0, 4)}) is None
    assert known.take(NEXT_EPOCH, {HERE: (0, 4)}) is None
    assert known.take(IDS, {HERE: (5, 5)}) == HERE


def test_what_is_not_known_is_no_gap():
    known = Sequences()
    assert known.take(IDS, {HERE: (0, 4), THERE: None}) is None
    assert known.take(IDS, {HERE: (5, 5), THERE: (9, 9)}) is None
    known.forget()
    assert known.take(IDS, {HERE: (8, 9), THERE: (12, 12)}) is None
    assert known.take(IDS, {HERE: (11, 11), THERE: (13, 13)}) == HERE
    assert known.take(NEXT_EPOCH, {HERE: (1, 1)}) == HERE


def test_what_was_forgotten_may_have_been_written_under_the_next_ids():
    """A first transaction whose messages failed, and was aborted: its ids are learnt with the next one."""
    known = Sequences()
    known.forget()
    assert known.take(IDS, {HERE: (700, 701)}) is None
    assert known.take(IDS, {HERE: (703, 703)}) == HERE
    known.forget()
    assert known.take(NEXT_EPOCH, {HERE: (9, 9)}) is None
