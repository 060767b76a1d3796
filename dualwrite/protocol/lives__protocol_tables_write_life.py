"""The life of one dual write, in KIP-939's order.

The database commit is the decision. Before it, any failure aborts both sides; after it, Kafka must follow. Between the two
lies only a COMMIT whose answer is missing: it is *in doubt* until the row resolves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class WriteState(Enum):
    """The states of one dual write."""

    BEGUN = "begun"
    CHECKED = "checked"
    PREPARED = "prepared"
    RECORDED = "recorded"
    IN_DOUBT = "in doubt"
    DECIDED = "decided"
    COMPLETED = "completed"
    HANDED_OVER = "handed over"
    LOST = "lost"
    ABORTED = "aborted"


class WriteEvent(Enum):
    """The events of one dual write.

    ``CHECK``: the row named our incarnation, before the first produce. ``PRODUCE``: a message or offsets. ``EXECUTE``: a
    user's statement. ``PREPARE``: every message is acknowledged. ``RECORD``: the row was updated to the prepared state or, if
    nothing was produced, still names our incarnation. ``COMMIT``: the database has committed. ``LOSE_ANSWER``: the answer to
    COMMIT is missing. ``COMPLETE``: Kafka has answered. ``FIND_LOST``: there is proof that the broker aborted it. ``ABORT``:
    both sides have rolled back. ``HAND_OVER``: both sides are prepared, and another process decides.
    """

    CHECK = "check"
    PRODUCE = "produce"
    EXECUTE = "execute"
    PREPARE = "prepare"
    RECORD = "record"
    COMMIT = "commit"
    LOSE_ANSWER = "lose the answer"
    COMPLETE = "complete"
    FIND_LOST = "find lost"
    ABORT = "abort"
    HAND_OVER = "hand over"


_S, _E = WriteState, WriteEvent

WRITE_LIFE: Mapping[WriteState, Mapping[WriteEvent, WriteState]] = MappingProxyType(
    {
        _S.BEGUN: {_E.CHECK: _S.CHECKED, _E.ABORT: _S.ABORTED},
        _S.CHECKED: {
            _E.PRODUCE: _S.CHECKED,
            _E.EXECUTE: _S.CHECKED,
            _E.PREPARE: _S.PREPARED,
            _E.ABORT: _S.ABORTED,
        },
        _S.PREPARED: {_E.RECORD: _S.RECORDED, _E.HAND_OVER: _S.HANDED_OVER, _E.ABORT: _S.ABORTED},
        _S.RECORDED: {_E.COMMIT: _S.DECIDED, _E.LOSE_ANSWER: _S.IN_DOUBT, _E.ABORT: _S.ABORTED},
        _S.IN_DOUBT: {_E.COMMIT: _S.DECIDED, _E.ABORT: _S.ABORTED, _E.FIND_LOST: _S.LOST},
        _S.DECIDED: {_E.COMPLETE: _S.COMPLETED, _E.FIND_LOST: _S.LOST},
        _S.COMPLETED: {},
        _S.HANDED_OVER: {},
        _S.LOST: {},
        _S.ABORTED: {},
    }
)
