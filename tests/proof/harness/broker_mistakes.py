"""Mistakes of the simulated broker in transactions of version 2: each gives up one rule that a protocol may rest on.

A mistake stands in for `simulator.broker.handle`. Each comes with a sequence of steps that shows it on a real broker.
"""

from __future__ import annotations

from simulator import requests as sim
from simulator.broker import handle
from simulator.requests import ErrorCode
from simulator.state import partition, transaction, with_partition, with_transaction


def _known(broker, request):
    return transaction(broker, request.transactional_id or "")


def ends_what_is_open(broker, request):
    """An end of an earlier transaction ends the one that is open (KAFKA-17754)."""
    if isinstance(request, sim.EndTxn):
        known = _known(broker, request)
        if known is not None and known.state == sim.ONGOING and request.producer_epoch < known.producer_epoch:
            request = request._replace(producer_epoch=known.producer_epoch)
    return handle(broker, request)


def joins_what_is_open(broker, request):
    """A message of an earlier transaction joins the one that is open."""
    if isinstance(request, sim.Produce) and request.transactional_id is not None:
        known = _known(broker, request)
        if known is not None and known.state == sim.ONGOING and request.producer_epoch < known.producer_epoch:
            request = request._replace(producer_epoch=known.producer_epoch)
    return handle(broker, request)


def keeps_the_epoch(broker, request):
    """An end does not raise the epoch: all transactions of a producer share it."""
    if isinstance(request, sim.EndTxn):
        broker, answer = handle(broker, request._replace(transaction_version=1))
        ended = answer.error_code is ErrorCode.NONE
        identity = (request.producer_id, request.producer_epoch) if ended else (-1, -1)
        return broker, sim.EndTxnResponse(answer.error_code, *identity)
    return handle(broker, request)


def forgets_how_it_ended(broker, request):
    """A repeated end is answered with success, whatever the outcome was."""
    if isinstance(request, sim.EndTxn):
        known = _known(broker, request)
        if known is not None and request.producer_epoch == known.producer_epoch - 1:
            ended = known.state in {sim.COMPLETE_COMMIT, sim.COMPLETE_ABORT}
            request = request._replace(committed=known.state == sim.COMPLETE_COMMIT) if ended else request
    return handle(broker, request)


def repeats_no_epoch(broker, request):
    """A repeated end is answered with the epoch that it names, not with the next one."""
    after, answer = handle(broker, request)
    if isinstance(answer, sim.EndTxnResponse) and after is broker and answer.error_code is ErrorCode.NONE:
        answer = answer._replace(producer_epoch=request.producer_epoch)
    return after, answer


def aborts_nothing(broker, request):
    """An abort with nothing written is answered, and raises no epoch."""
    if isinstance(request, sim.EndTxn) and not request.committed:
        known = _known(broker, request)
        if known is not None and known.state == sim.EMPTY and request.producer_epoch == known.producer_epoch:
            return broker, sim.EndTxnResponse(ErrorCode.NONE, known.producer_id, known.producer_epoch)
    return handle(broker, request)


def commits_nothing(broker, request):
    """A commit with nothing written succeeds."""
    after, answer = handle(broker, request)
    known = _known(broker, request) if isinstance(request, sim.EndTxn) else None
    if known is not None and request.committed and answer.error_code is ErrorCode.INVALID_TXN_STATE:
        return broker, sim.EndTxnResponse(ErrorCode.NONE, known.producer_id, known.producer_epoch)
    return after, answer


def fences_nobody(broker, request):
    """An initialisation over an open transaction aborts it under its own epoch."""
    after, answer = handle(broker, request)
    if isinstance(request, sim.InitProducerId):
        before, known = _known(broker, request), _known(after, request)
        if before is not None and before.state == sim.ONGOING:
            known = known._replace(producer_epoch=before.producer_epoch, transaction_version=1)
            after = with_transaction(after, known)
    return after, answer


def goes_on_with_the_sequence(broker, request):
    """A transaction's sequence numbers go on where the last one's ended."""
    if isinstance(request, sim.Produce) and request.base_sequence > 0:
        found = partition(broker, request.partition)
        idle = all(entry.txn_start < 0 for entry in found.producers)
        if idle and found.producers:
            after, answer = handle(broker, request._replace(base_sequence=0))
            return after, answer
    return handle(broker, request)


def takes_any_marker(broker, request):
    """A marker is written although the partition has seen its epoch, in the transaction that is open."""
    if isinstance(request, sim.WriteTxnMarkers):
        request = request._replace(transaction_version=1)
    return handle(broker, request)


def adds_nothing(broker, request):
    """A message does not add its partition to the transaction."""
    return handle(broker, request._replace(transaction_version=1) if isinstance(request, sim.Produce) else request)


def writes_twice(broker, request):
    """A repeated message is written again."""
    if isinstance(request, sim.Produce) and request.transactional_id is not None:
        found = partition(broker, request.partition)
        forgetful = tuple(
            entry._replace(kept=tuple(kept for kept in entry.kept if kept.first_sequence != request.base_sequence))
            for entry in found.producers
        )
        broker = with_partition(broker, found._replace(producers=forgetful))
    return handle(broker, request)


def takes_offsets_of_any_generation(broker, request):
    """Offsets of a transaction are taken from a member of an earlier generation, and from one that was expelled."""
    if isinstance(request, sim.TxnOffsetCommit):
        request = request._replace(member_id="", generation=-1)
    return handle(broker, request)


def tells_offsets_that_are_pending(broker, request):
    """A consumer is told the committed offset that an open transaction is about to replace."""
    return handle(broker, request._replace(require_stable=False) if isinstance(request, sim.OffsetFetch) else request)


_INIT, _WRITE = ("init", "a"), ("produce", "a", 0)
_COMMIT, _ABORT = ("end", "a", True), ("end", "a", False)
MISTAKES = {
    ends_what_is_open: (_INIT, _WRITE, _COMMIT, _WRITE, ("repeat end", "a")),
    joins_what_is_open: (_INIT, _WRITE, _COMMIT, _WRITE, ("late", "a", 1)),
    keeps_the_epoch: (_INIT, _WRITE, _COMMIT),
    forgets_how_it_ended: (_INIT, _WRITE, _COMMIT, ("end", "a", False, -1)),
    repeats_no_epoch: (_INIT, _WRITE, _COMMIT, ("repeat end", "a")),
    aborts_nothing: (_INIT, _ABORT),
    commits_nothing: (_INIT, _COMMIT),
    fences_nobody: (_INIT, _WRITE, ("init", "b")),
    goes_on_with_the_sequence: (_INIT, _WRITE, _COMMIT, ("produce", "a", 0, 1)),
    takes_any_marker: (_INIT, _WRITE, ("mark", "a", 0, False)),
    adds_nothing: (_INIT, _WRITE),
    writes_twice: (_INIT, _WRITE, ("repeat", "a")),
}
"""Each mistake, with steps of two clients of version 2, "a" and "b", that share an id."""
