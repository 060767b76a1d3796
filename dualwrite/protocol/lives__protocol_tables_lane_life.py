"""The life of one lane: an owner's transactional id, claimed again whenever its producer must not be reused.

Every incarnation has a Kafka id of its own, which exactly one producer initialises: initialising it a second time would abort
what may be decided by then. So a lane starts a producer only right after it was settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class LaneState(Enum):
    """The states of one lane."""

    UNCLAIMED = "unclaimed"
    UNSETTLED = "unsettled"
    SETTLED = "settled"
    STARTED = "started"


class LaneEvent(Enum):
    """The events of one lane.

    ``CLAIM``: the row names a new incarnation of ours. ``SETTLE``: nothing of earlier incarnations is open in Kafka any more.
    ``START``: a producer is about to use the incarnation's Kafka id. ``DISCARD``: that producer is closed; what it has left
    open stays open.
    """

    CLAIM = "claim"
    SETTLE = "settle"
    START = "start"
    DISCARD = "discard"


_S, _E = LaneState, LaneEvent

LANE_LIFE: Mapping[LaneState, Mapping[LaneEvent, LaneState]] = MappingProxyType(
    {
        _S.UNCLAIMED: {_E.CLAIM: _S.UNSETTLED},
        _S.UNSETTLED: {_E.CLAIM: _S.UNSETTLED, _E.SETTLE: _S.SETTLED},
        _S.SETTLED: {_E.CLAIM: _S.UNSETTLED, _E.START: _S.STARTED},
        _S.STARTED: {_E.DISCARD: _S.UNSETTLED},
    }
)
