"""The life of one transactional producer, with KIP-939's gating.

``prepare_transaction`` waits until every message is acknowledged, those too that delivery callbacks produce meanwhile. The
producer is *flushed* then, and nothing more may be produced: the name of the transaction lists what it wrote. Once it has its
name it is prepared, and only commit, abort and complete are allowed.

``init_transactions(keep_prepared_txn=True)`` keeps an open transaction until one of the three is called. A request that may
have been sent twice, or whose answer is missing, leaves the producer *doubtful*: a delayed copy of the request may still be on
its way and would end the next transaction of the same producer (KAFKA-17754), so there must be no next transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class ProducerState(Enum):
    """The states of a producer."""

    __hash__ = object.__hash__  # for speed, as for the events

    CREATED = "created"
    KEPT = "kept"
    READY = "ready"
    BEGUN = "begun"
    FLUSHED = "flushed"
    PREPARED = "prepared"
    FAILED = "failed"
    DOUBTFUL = "doubtful"
    CLOSED = "closed"


class ProducerEvent(Enum):
    """The events in a producer's life."""

    __hash__ = object.__hash__  # Enum's own is slow Python code, and every message looks up its event

    INIT = "init_transactions"
    INIT_KEEPING = "init_transactions(keep_prepared_txn=True)"
    BEGIN = "begin_transaction"
    PRODUCE = "produce"
    SEND_OFFSETS = "send_offsets_to_transaction"
    PREPARE = "prepare_transaction"
    NAME = "the transaction has its name"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"
    COMPLETE = "complete_transaction"
    FAIL = "failure"
    DOUBT = "doubt"
    CLOSE = "close"


_S, _E = ProducerState, ProducerEvent

PRODUCER_LIFE: Mapping[ProducerState, Mapping[ProducerEvent, ProducerState]] = MappingProxyType(
    {
        _S.CREATED: {
            _E.INIT: _S.READY,
            _E.INIT_KEEPING: _S.KEPT,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.KEPT: {
            _E.COMMIT: _S.READY,
            _E.ABORT: _S.READY,
            _E.COMPLETE: _S.READY,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.READY: {
            _E.BEGIN: _S.BEGUN,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.BEGUN: {
            _E.PRODUCE: _S.BEGUN,
            _E.SEND_OFFSETS: _S.BEGUN,
            _E.PREPARE: _S.FLUSHED,
            _E.COMMIT: _S.READY,
            _E.ABORT: _S.READY,
            _E.FAIL: _S.FAILED,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.FLUSHED: {
            _E.NAME: _S.PREPARED,
            _E.ABORT: _S.READY,
            _E.FAIL: _S.FAILED,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.PREPARED: {
            _E.COMMIT: _S.READY,
            _E.ABORT: _S.READY,
            _E.COMPLETE: _S.READY,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.FAILED: {
            _E.ABORT: _S.READY,
            _E.FAIL: _S.FAILED,
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.DOUBTFUL: {
            _E.DOUBT: _S.DOUBTFUL,
            _E.CLOSE: _S.CLOSED,
        },
        _S.CLOSED: {
            _E.CLOSE: _S.CLOSED,
        },
    }
)

WAY_ON: Mapping[ProducerState, str] = MappingProxyType(
    {
        _S.CREATED: "call init_transactions first",
        _S.KEPT: "commit, abort or complete the transaction that was kept",
        _S.READY: "begin a transaction first",
        _S.BEGUN: "commit or abort the transaction first",
        _S.FLUSHED: "the transaction is being prepared: wait until it is, or abort it",
        _S.PREPARED: "the transaction is prepared: commit, abort or complete it",
        _S.FAILED: "abort the transaction",
        _S.DOUBTFUL: "close this producer and make a new one: a request of this one may still be on its way",
        _S.CLOSED: "make a new producer",
    }
)
"""By state, the advice to a caller whose event the table does not allow."""
