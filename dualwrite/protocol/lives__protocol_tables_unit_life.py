"""The life of the units in one partition, as its readers and its one writer see them (KIP-868).

A unit is a begin marker, any number of records in any number of Kafka transactions, and an end or abort marker. Three rules
keep it whole: one unit at a time, nothing between its records, no marker inside it. Every record of a unit says that it is one,
so that a reader that begins in the middle of a unit, because retention has deleted its begin, knows that it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class UnitState(Enum):
    """Where a reader stands.

    ``START``: at the beginning of the log, or of what retention has left; nothing is read. ``CUT``: in a unit whose begin is
    deleted. ``OUTSIDE``: in no unit. ``INSIDE``: in a unit that may yet end or abort.
    """

    START = "start"
    CUT = "cut"
    OUTSIDE = "outside"
    INSIDE = "inside"


class UnitEvent(Enum):
    """The records that a reader may find.

    ``RECORD``: a record that belongs to no unit. ``BEGIN``, ``END``, ``ABORT``: the markers. ``PART``: a record of a unit.
    """

    RECORD = "record"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    ABORT = "abort"


class Effect(Enum):
    """The effect of a record on what a reader shows.

    ``HOLD``: apply it where nobody sees it yet. ``SHOW``: apply it and publish. ``PUBLISH``: publish what was held. ``REVERT``:
    forget what was held. ``SKIP``: nothing.
    """

    HOLD = "hold"
    SHOW = "show"
    PUBLISH = "publish"
    REVERT = "revert"
    SKIP = "skip"


_S, _E, _F = UnitState, UnitEvent, Effect

UNIT_LIFE: Mapping[UnitState, Mapping[UnitEvent, UnitState]] = MappingProxyType(
    {
        _S.START: {
            _E.RECORD: _S.OUTSIDE,
            _E.BEGIN: _S.INSIDE,
            _E.PART: _S.CUT,
            _E.END: _S.OUTSIDE,
            _E.ABORT: _S.OUTSIDE,
        },
        _S.CUT: {_E.PART: _S.CUT, _E.END: _S.OUTSIDE, _E.ABORT: _S.OUTSIDE},
        _S.OUTSIDE: {_E.RECORD: _S.OUTSIDE, _E.BEGIN: _S.INSIDE},
        _S.INSIDE: {_E.PART: _S.INSIDE, _E.END: _S.OUTSIDE, _E.ABORT: _S.OUTSIDE},
    }
)

EFFECTS: Mapping[UnitState, Mapping[UnitEvent, Effect]] = MappingProxyType(
    {
        _S.START: {
            _E.RECORD: _F.SHOW,
            _E.BEGIN: _F.SKIP,
            _E.PART: _F.SKIP,
            _E.END: _F.SKIP,
            _E.ABORT: _F.SKIP,
        },
        _S.CUT: {_E.PART: _F.SKIP, _E.END: _F.SKIP, _E.ABORT: _F.SKIP},
        _S.OUTSIDE: {_E.RECORD: _F.SHOW, _E.BEGIN: _F.SKIP},
        _S.INSIDE: {_E.PART: _F.HOLD, _E.END: _F.PUBLISH, _E.ABORT: _F.REVERT},
    }
)
"""The visibility rule, for every event that `UNIT_LIFE` allows."""


class UnitWriterState(Enum):
    """Where the writer of a partition stands.

    ``CLAIMED``: it owns the partition, and has not looked at the end of the log. ``BETWEEN``: no unit is unfinished.
    ``WITHIN``: a unit is begun in the log. ``BROKEN``: it does not know what the log holds.
    """

    CLAIMED = "claimed"
    BETWEEN = "between"
    WITHIN = "within"
    BROKEN = "broken"


class UnitWriterEvent(Enum):
    """The steps of a writer: its own records count once their Kafka transaction is complete.

    ``FIND_ENDED``, ``FIND_UNFINISHED``: what the last record of the log says. ``WHOLE``: a whole unit in one transaction.
    ``FAIL``: a transaction may or may not be in the log.
    """

    FIND_ENDED = "find ended"
    FIND_UNFINISHED = "find unfinished"
    BEGIN = "begin"
    PART = "part"
    END = "end"
    WHOLE = "whole unit"
    ABORT = "abort"
    FAIL = "fail"


_W, _V = UnitWriterState, UnitWriterEvent

UNIT_WRITER_LIFE: Mapping[UnitWriterState, Mapping[UnitWriterEvent, UnitWriterState]] = MappingProxyType(
    {
        _W.CLAIMED: {_V.FIND_ENDED: _W.BETWEEN, _V.FIND_UNFINISHED: _W.WITHIN, _V.FAIL: _W.BROKEN},
        _W.BETWEEN: {_V.BEGIN: _W.WITHIN, _V.WHOLE: _W.BETWEEN, _V.FAIL: _W.BROKEN},
        _W.WITHIN: {_V.PART: _W.WITHIN, _V.END: _W.BETWEEN, _V.ABORT: _W.BETWEEN, _V.FAIL: _W.BROKEN},
        _W.BROKEN: {_V.FAIL: _W.BROKEN},
    }
)


def found_at_the_end(last: UnitEvent | None) -> UnitWriterEvent:
    """The failover rule: what the last record of the log, or None, tells its next writer. An unfinished unit must be aborted.

    Only the end of the log can hold an unfinished unit, since a writer begins none before the last one has ended.
    """
    unfinished = last in {UnitEvent.BEGIN, UnitEvent.PART}
    return UnitWriterEvent.FIND_UNFINISHED if unfinished else UnitWriterEvent.FIND_ENDED
