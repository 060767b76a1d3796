"""The life of one batch that is decided at once: many participants have prepared, and one database commit decides on all.

A failure before the commit leaves the batch undecided, and nothing of it is visible on either side. After it, Kafka must
follow for every participant. If the answer to the commit is missing, the batch is *in doubt* until a claim of the participants'
ids has ended the old session and the batch's own row has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class BatchState(Enum):
    """The states of one batch."""

    PREPARED = "prepared"
    IN_DOUBT = "in doubt"
    DECIDED = "decided"
    FOLLOWING = "following"
    WRITTEN = "written"
    UNDECIDED = "undecided"


class BatchEvent(Enum):
    """The events of one batch.

    ``COMMIT``: the database has committed the decision on every participant. ``FIND``: the batch's own row is there, so a
    decision was committed. ``LOSE_ANSWER``: the answer to COMMIT is missing. ``ABORT``: the database has certainly rolled back.
    ``COMPLETE``: the participants' transactions that need no claim are committed in Kafka and recorded. ``SETTLE``: all others
    were claimed and settled.
    """

    COMMIT = "commit"
    FIND = "find it written"
    LOSE_ANSWER = "lose the answer"
    ABORT = "abort"
    COMPLETE = "complete"
    SETTLE = "settle"


_S, _E = BatchState, BatchEvent

BATCH_LIFE: Mapping[BatchState, Mapping[BatchEvent, BatchState]] = MappingProxyType(
    {
        _S.PREPARED: {
            _E.COMMIT: _S.DECIDED,
            _E.FIND: _S.FOLLOWING,
            _E.LOSE_ANSWER: _S.IN_DOUBT,
            _E.ABORT: _S.UNDECIDED,
        },
        _S.IN_DOUBT: {_E.FIND: _S.WRITTEN, _E.ABORT: _S.UNDECIDED},
        _S.DECIDED: {_E.COMPLETE: _S.FOLLOWING},
        _S.FOLLOWING: {_E.SETTLE: _S.WRITTEN},
        _S.WRITTEN: {},
        _S.UNDECIDED: {},
    }
)
