"""The life of one lease, as its holder knows it: the right to try to own a numbered id.

A lease permits a member to try, and nothing else. The claim of an id fences its former owner, whatever the lease says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class LeaseState(Enum):
    """The states of one lease."""

    FREE = "free"
    HELD = "held"
    EXPIRED = "expired"
    TAKEN = "taken"


class LeaseEvent(Enum):
    """The events of one lease.

    ``TAKE``: the row names us. ``RENEW``: a heartbeat found our name there. ``EXPIRE``: no heartbeat has come through for the
    lease's time, so any other member may take it. ``LOSE``: a heartbeat found another name there, or none. ``GIVE_BACK``: we
    have given it up.
    """

    TAKE = "take"
    RENEW = "renew"
    EXPIRE = "expire"
    LOSE = "lose"
    GIVE_BACK = "give back"


_S, _E = LeaseState, LeaseEvent

LEASE_LIFE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = MappingProxyType(
    {
        _S.FREE: {_E.TAKE: _S.HELD},
        _S.HELD: {_E.RENEW: _S.HELD, _E.EXPIRE: _S.EXPIRED, _E.LOSE: _S.TAKEN, _E.GIVE_BACK: _S.FREE},
        # Renewed late, but not too late: nobody has taken it. After an outage of the database all members are here at once.
        _S.EXPIRED: {_E.RENEW: _S.HELD, _E.EXPIRE: _S.EXPIRED, _E.LOSE: _S.TAKEN, _E.GIVE_BACK: _S.FREE},
        _S.TAKEN: {_E.GIVE_BACK: _S.FREE},
    }
)
