"""The short proof, from one answer to a reader of committed records, agrees with the long one over the log."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import partition as rules
from simulator.outside import SeenBatch
from simulator.requests import READ_COMMITTED, ErrorCode

from dualwrite.kafka.log import Scan
from dualwrite.protocol.prepared_state import FirstOffset
from dualwrite.protocol.values import LogProof

PRODUCERS = st.integers(1, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PRODUCERS, st.integers(1, 3)),
        st.tuples(st.just("end"), PRODUCERS, st.booleans()),
        st.tuples(st.just("plain"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("next epoch"), PRODUCERS, st.just(0)),
        st.tuples(st.just("lose the end"), st.just(0), st.integers(0, 4)),
    ),
    max_size=30,
)


def log_of(steps):
    """A log in which that has happened, and where each transaction begins: (producer id, epoch, offset)."""
    log, epochs, began = rules.Partition(("topic", 0), "id"), dict.fromkeys((1, 2, 3), 0), set()
    for what, producer_id, number in steps:
        entry = rules.producer(log, producer_id)
        if what == "write":
            if entry is None or entry.txn_start < 0:
                began.add((producer_id, epochs[producer_id], log.log_end))
            values = tuple(range(number))
            log, _ = rules.append(log, producer_id, epochs[producer_id], 0, values, checks_sequence=False)
        elif what == "end":
            log, _ = rules.append_marker(log, producer_id, epochs[producer_id], committed=number, coordinator_epoch=0)
        elif what == "plain":
            log, _ = rules.append_plain(log, tuple(range(number)))
        elif what == "next epoch":
            epochs[producer_id] += 1
        else:
            log = rules.truncated(log, log.log_end - number)
    return log, sorted(began)


def both_ways(log, producer_id, epoch, offset):
    """The proof by a glance, and the proof by the scan."""
    scan = Scan(FirstOffset("topic", 0, offset), producer_id, epoch)
    stable = rules.fetch(log, offset, READ_COMMITTED)
    if stable.error_code is not ErrorCode.NONE:
        return None, None
    batches = [SeenBatch(batch) for batch in stable.batches]
    glance = scan.glance(batches, stable.aborted_transactions)
    all_batches = rules.fetch(log, offset, 0).batches
    proof = scan.read([SeenBatch(batch) for batch in all_batches])
    return glance, proof or (LogProof.OPEN if scan.begun else LogProof.UNKNOWABLE)


@settings(max_examples=1000, deadline=None)
@given(STEPS)
def test_a_glance_tells_what_the_scan_tells_wherever_all_before_it_has_ended(steps):
    log, began = log_of(steps)
    for producer_id, epoch, offset in began:
        glance, proof = both_ways(log, producer_id, epoch, offset)
        ended = rules.last_stable_offset(log) > offset
        assert glance == (proof if ended else None)


@pytest.mark.parametrize(
    ("steps", "glance"),
    [
        ([("write", 1, 2), ("end", 1, True)], LogProof.COMMITTED),
        ([("write", 1, 2), ("end", 1, False)], LogProof.ABORTED),
        ([("write", 1, 2)], None),
        ([("write", 2, 1), ("write", 1, 2), ("end", 1, True)], None),
        ([("write", 1, 2), ("write", 2, 1), ("end", 1, True)], LogProof.COMMITTED),
        ([("write", 1, 2), ("end", 1, True), ("write", 1, 2), ("end", 1, False)], LogProof.COMMITTED),
        ([("write", 1, 2), ("end", 1, False), ("write", 1, 2), ("end", 1, True)], LogProof.ABORTED),
    ],
    ids=["commit", "abort", "open", "behind another's", "before another's", "an abort later", "a commit later"],
)
def test_what_a_glance_tells(steps, glance):
    log, began = log_of(steps)
    first_of_ours = next(place for place in began if place[0] == 1)
    assert both_ways(log, *first_of_ours)[0] is glance
