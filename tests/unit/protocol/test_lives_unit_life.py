"""The lives of units: the whole matrix of states and events, for readers and for the writer, and what readers show."""

import itertools

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import Machine
from dualwrite.units.records import (
    EFFECTS,
    UNIT_LIFE,
    UNIT_WRITER_LIFE,
    Effect,
    UnitEvent,
    UnitState,
    UnitWriterEvent,
    UnitWriterState,
    found_at_the_end,
)

S, E, F = UnitState, UnitEvent, Effect
W, V = UnitWriterState, UnitWriterEvent

# Written down a second time, from KIP-868's invariants and what retention may delete.
READER = {
    (S.START, E.RECORD): (S.OUTSIDE, F.SHOW),
    (S.START, E.BEGIN): (S.INSIDE, F.SKIP),
    (S.START, E.PART): (S.CUT, F.SKIP),
    (S.START, E.END): (S.OUTSIDE, F.SKIP),
    (S.START, E.ABORT): (S.OUTSIDE, F.SKIP),
    (S.CUT, E.PART): (S.CUT, F.SKIP),
    (S.CUT, E.END): (S.OUTSIDE, F.SKIP),
    (S.CUT, E.ABORT): (S.OUTSIDE, F.SKIP),
    (S.OUTSIDE, E.RECORD): (S.OUTSIDE, F.SHOW),
    (S.OUTSIDE, E.BEGIN): (S.INSIDE, F.SKIP),
    (S.INSIDE, E.PART): (S.INSIDE, F.HOLD),
    (S.INSIDE, E.END): (S.OUTSIDE, F.PUBLISH),
    (S.INSIDE, E.ABORT): (S.OUTSIDE, F.REVERT),
}
WRITER = {
    (W.CLAIMED, V.FIND_ENDED): W.BETWEEN,
    (W.CLAIMED, V.FIND_UNFINISHED): W.WITHIN,
    (W.BETWEEN, V.BEGIN): W.WITHIN,
    (W.BETWEEN, V.WHOLE): W.BETWEEN,
    (W.WITHIN, V.PART): W.WITHIN,
    (W.WITHIN, V.END): W.BETWEEN,
    (W.WITHIN, V.ABORT): W.BETWEEN,
    **{(state, V.FAIL): W.BROKEN for state in W},
}


def hold_against(machine, target, event):
    state = machine.state
    if target is None:
        assert not machine.allows(event)
        with pytest.raises(IllegalStateError, match=event.value):
            machine.apply(event)
        assert machine.state is state
    else:
        assert machine.apply(event) is target


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_a_reader_moves_and_shows_as_its_tables_say_and_no_other_way(state, event):
    target, effect = READER.get((state, event), (None, None))
    hold_against(Machine("reader", UNIT_LIFE, state), target, event)
    assert EFFECTS[state].get(event) is effect


@pytest.mark.parametrize(("state", "event"), list(itertools.product(W, V)))
def test_a_writer_moves_as_its_table_says_and_no_other_way(state, event):
    hold_against(Machine("writer", UNIT_WRITER_LIFE, state), WRITER.get((state, event)), event)


def test_what_is_held_is_published_or_reverted_before_anything_else_is_shown():
    for state, events in EFFECTS.items():
        if F.HOLD in events.values():
            assert {events[event] for event in events if UNIT_LIFE[state][event] is not state} == {F.PUBLISH, F.REVERT}
            assert F.SHOW not in events.values()


def test_nothing_of_a_unit_without_its_begin_is_ever_shown():
    assert set(EFFECTS[S.CUT].values()) == {F.SKIP}
    assert E.RECORD not in UNIT_LIFE[S.CUT]


def test_a_broken_writer_can_do_nothing_more():
    assert set(UNIT_WRITER_LIFE[W.BROKEN].values()) == {W.BROKEN}


@pytest.mark.parametrize("last", [None, *E])
def test_the_next_writer_finds_a_unit_unfinished_if_the_log_ends_inside_it(last):
    expected = V.FIND_UNFINISHED if last in {E.BEGIN, E.PART} else V.FIND_ENDED
    assert found_at_the_end(last) is expected


@pytest.mark.parametrize(("table", "states"), [(UNIT_LIFE, S), (EFFECTS, S), (UNIT_WRITER_LIFE, W)])
def test_every_state_has_a_row_and_cannot_be_changed(table, states):
    assert set(table) == set(states)
    with pytest.raises(TypeError):
        table[next(iter(states))] = {}
