"""Follows logs of units and of what is left of them: an image shows whole units or nothing of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dualwrite import ConfigurationError
from dualwrite.units import AbortTransaction, BeginTransaction, EndTransaction, Follower, KeyedImage, UnitRecord
from dualwrite.units.records import Effect, UnitState, marker_record, part_of_unit

BEGIN, END, ABORT = (marker_record(kind()) for kind in (BeginTransaction, EndTransaction, AbortTransaction))


def part(key, value):
    return part_of_unit(key, value)


def plain(key, value):
    return UnitRecord(key, value)


def followed(log, position=None):
    follower = Follower(KeyedImage(), position)
    for offset, record in enumerate(log):
        follower.read(offset, record)
    return follower


def test_a_unit_is_published_at_its_end_and_not_before():
    follower = followed([plain(b"a", b"1"), BEGIN, part(b"a", b"2"), part(b"b", b"2")])
    assert follower.snapshot().contents == {b"a": b"1"}
    assert follower.state is UnitState.INSIDE
    assert follower.read(4, END) is Effect.PUBLISH
    assert follower.snapshot().contents == {b"a": b"2", b"b": b"2"}


def test_an_aborted_unit_leaves_nothing_not_even_its_deletions():
    follower = followed([plain(b"a", b"1"), BEGIN, part(b"a", None), part(b"b", b"2"), ABORT, plain(b"c", b"3")])
    assert follower.snapshot().contents == {b"a": b"1", b"c": b"3"}


def test_a_unit_whose_begin_is_deleted_is_passed_over():
    follower = followed([part(b"a", b"1"), part(b"b", b"1"), END, plain(b"c", b"1")])
    assert follower.snapshot().contents == {b"c": b"1"}


def test_a_unit_of_which_only_the_end_is_left_is_passed_over():
    assert followed([END, plain(b"c", b"1")]).snapshot().contents == {b"c": b"1"}


@pytest.mark.parametrize(
    ("log", "what"),
    [
        ([BEGIN, plain(b"a", b"1")], "offset 1 holds 'record'.* at 'inside'"),
        ([BEGIN, part(b"a", b"1"), BEGIN], "offset 2 holds 'begin'.* at 'inside'"),
        ([plain(b"a", b"1"), END], "offset 1 holds 'end'.* at 'outside'"),
        ([plain(b"a", b"1"), part(b"a", b"2")], "offset 1 holds 'part'.* at 'outside'"),
        ([part(b"a", b"2"), BEGIN], "offset 1 holds 'begin'.* at 'cut'"),
    ],
)
def test_a_log_that_breaks_the_rules_of_units_is_refused_and_nothing_of_it_shown(log, what):
    follower = followed(log[:-1])
    before = follower.snapshot()
    with pytest.raises(ConfigurationError, match=what):
        follower.read(len(log) - 1, log[-1])
    assert follower.snapshot() == before


def test_a_snapshot_inside_a_unit_is_continued_at_the_units_begin():
    log = [plain(b"a", b"1"), BEGIN, part(b"b", b"2"), END]
    found = followed(log[:3]).snapshot()
    assert (found.position, found.contents) == (1, {b"a": b"1"})
    again = Follower(KeyedImage(found.contents), found.position)
    for offset in range(found.position, len(log)):
        again.read(offset, log[offset])
    assert again.snapshot().contents == {b"a": b"1", b"b": b"2"}
    assert again.snapshot().position == 4


def test_a_snapshot_in_a_unit_whose_begin_is_deleted_begins_at_the_beginning():
    assert followed([part(b"a", b"1")]).snapshot().position is None


units = some.lists(
    some.tuples(
        some.sampled_from(["unit", "aborted", "plain"]),
        some.lists(some.tuples(some.sampled_from([b"a", b"b", b"c"]), some.none() | some.binary(max_size=2)), min_size=1, max_size=4),
    ),
    max_size=6,
)  # fmt: skip


def log_of(units):
    """The log, and after each of its records what a reader may show."""
    log, states, state = [], [], {}
    for kind, changes in units:
        after = dict(state)
        for key, value in changes:
            after[key] = value
            if kind == "plain":
                log.append(plain(key, value))
                states.append(dict(after))
        if kind != "plain":
            log += [BEGIN, *(part(key, value) for key, value in changes), END if kind == "unit" else ABORT]
            states += [dict(state)] * (len(changes) + 1)
            states.append(after if kind == "unit" else dict(state))
        state = after if kind != "aborted" else state
    return log, [{key: value for key, value in one.items() if value is not None} for one in states]


@given(units, some.data())
def test_a_reader_never_shows_a_part_of_a_unit_wherever_it_stops_and_continues(units, data):
    log, states = log_of(units)
    stops = data.draw(some.sets(some.integers(0, max(0, len(log) - 1))))
    follower, offset = Follower(KeyedImage()), 0
    while offset < len(log):
        follower.read(offset, log[offset])
        assert follower.snapshot().contents == states[offset]
        offset += 1
        if offset - 1 in stops:
            stops.remove(offset - 1)
            found = follower.snapshot()
            follower, offset = Follower(KeyedImage(found.contents), found.position), found.position or 0


@given(units, some.data())
def test_a_log_that_retention_has_cut_shows_whole_units_only(units, data):
    log, _ = log_of(units)
    cut = data.draw(some.integers(0, len(log)))
    kinds = [record.headers[0][1] if record.headers else b"" for record in log]
    begins = [at for at in range(cut, len(log)) if kinds[at] in {b"", b"begin"}]
    rest = followed(log[begins[0] :] if begins else [])
    assert followed(log[cut:]).snapshot().contents == rest.snapshot().contents
