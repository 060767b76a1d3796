"""The time that the broker leaves a transaction is spent once: on the decision, or on Kafka."""

import itertools

from dualwrite.protocol.process import allow

LEFT_S = (0.0, 0.5, 1.0, 9.9, 10.0, 10.001, 11.0, 12.0, 30.0, 60.0, 899.0, 2_147_483.0)
MARGIN_S = (0.0, 0.5, 1.0, 10.0, 60.0, 300.0)
ENDING_S = (0.0, 0.1, 8.0, 60.0, 600.0)
ALL = list(itertools.product(LEFT_S, MARGIN_S, ENDING_S))


def test_a_decision_in_the_last_allowed_moment_leaves_the_whole_margin():
    for left_s, margin_s, ending_s in ALL:
        found = allow(left_s, margin_s, ending_s)
        if left_s <= margin_s:
            assert found is None
            continue
        assert found.decide_s >= 0
        # Whatever the record itself took: where it fits at all, the margin is left when the decision falls at the last moment.
        for record_s in (0.0, 0.01, 0.4, 5.0, 100.0):
            if found.fits(left_s - record_s):
                assert left_s - record_s - found.decide_s >= margin_s
        assert found.fits(left_s), "a record that takes no time always fits"
        # What takes less than half of what is spare is not refused.
        assert found.fits(left_s - (left_s - margin_s) / 2.001)


def test_a_commit_that_is_not_answered_leaves_time_to_find_out_and_to_complete():
    for left_s, margin_s, ending_s in ALL:
        found = allow(left_s, margin_s, ending_s)
        if found is not None:
            assert 0 <= found.answer_s <= ending_s / 2
            assert left_s - found.answer_s >= margin_s / 2


def test_the_decision_gets_no_more_than_the_margin_where_there_is_one():
    assert allow(900, 10, 60).decide_s == 10
    assert allow(900, 0, 60).decide_s == 30
    assert allow(12, 10, 60).decide_s == 1
