"""Detects decisions that the database has lost: transactions that Kafka has committed but the row does not name.

Kafka only ever commits what the database has decided, and the row names the newest decision. So a commit newer than every
transaction that the row or a recorded incident names was decided by a database that has gone back since: it was restored
from a backup, or failed over to a copy that was behind.

The coordinator keeps the start of an id's newest transaction after its end. If the start of the newest known transaction is
recorded, comparing the two suffices. Otherwise the logs of its partitions are read on from it.

Native transactions have an epoch each, and ending one raises the coordinator's by 1. So the coordinator shows which one has
ended last, and whether by commit. But settlers raise the epoch, too: by their fence, which aborts, and by repairs, some of
which commit. The fence in the row tells these apart, read after the coordinator was asked. Below, S is the newest known
transaction, E its epoch, L the epoch of the one that has ended last, and F the fence:

=============================  =====================  =========================================================
coordinator                    fence                  then
=============================  =====================  =========================================================
another producer id            any                    read the logs
L is E or less                 any                    nothing is lost
L is F or greater              F                      settlers have ended L: as for F - 2, ended somehow
L is F - 1, aborted            F                      the fence has ended L: as for F - 2, ended somehow
L was committed                any                    lost
L was aborted                  any                    read the logs
=============================  =====================  =========================================================

The first match applies. If a database has lost the fence, and Kafka shows the commit of a repair, that is reported, too: the
database has gone back, although it misses no decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import TransactionStatus, TransactionView

CLOCKS_DIFFER_MS: Final = 10_000
"""How far the brokers' clocks may differ without a false alarm, in ms."""
_COMMITTED: Final = frozenset({TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT})


@dataclass(frozen=True)
class Later:
    """The producer's later activity, as the logs of a transaction's partitions show it.

    ``commit`` is the newest committed transaction after it, and names only these partitions; of native ones, the newest of all
    partitions, which may name fewer. ``idle_since_ms`` says since when the producer has written nothing there, not even a
    marker, by the leaders' clocks (ms since 1970); None if no leader knows it.
    """

    commit: PreparedTxnState | None = None
    idle_since_ms: int | None = None


class Lookup(Enum):
    """The answer of the coordinator's view to whether an incarnation has lost decisions."""

    NOTHING = "nothing is lost"
    LOST = "the coordinator shows a commit that the database does not name"
    READ = "only the logs can tell"


@dataclass(frozen=True)
class Known:
    """The transactions of one incarnation that the database names, in the row or in incidents.

    ``newest`` has the newest of them in each partition, as one state. ``started_ms`` is the latest of their starts; None if
    one of them, which may be the newest, has no start recorded.
    """

    newest: PreparedTxnState | None
    started_ms: int | None


def known_of(states: Iterable[PreparedTxnState], incarnation: int) -> Known:
    """Collect the transactions of an incarnation among the row's prepared state and those of the incidents of its id."""
    own = [state for state in states if state.has_transaction and state.incarnation == incarnation]
    if not own:
        return Known(None, None)
    # Epochs only rise, and all states of one incarnation have the same producer id.
    last = max(own, key=lambda state: (state.producer_id, state.epoch))
    started = [state.started_ms for state in own if state.started_ms is not None]
    newest_started_ms = max(started) if len(started) == len(own) else None
    if last.is_native:
        return Known(last, newest_started_ms)
    firsts: dict[tuple[str, int, str | None], FirstOffset] = {}
    for state in own:
        for first in state.first_offsets:
            key = (first.topic, first.partition, first.topic_id)
            firsts[key] = max(first, firsts.get(key, first), key=lambda one: one.offset)
    by_place: dict[tuple[str, int], FirstOffset] = {(one.topic, one.partition): one for one in firsts.values()}
    newest = PreparedTxnState(last.producer_id, last.epoch, incarnation, tuple(by_place.values()))
    return Known(newest, newest_started_ms)


def look_up(known: Known, view: TransactionView, fence: int | None = None) -> Lookup:
    """Look for lost decisions of an incarnation in the coordinator's view of its Kafka id.

    ``fence`` is the row's, read after the view. Only native transactions have one.
    """
    if known.newest is None:
        return Lookup.LOST if view.status in _COMMITTED else Lookup.NOTHING
    if known.newest.is_native:
        return _look_up_native(known.newest, view, fence)
    if _shows_commit_of(view, known.newest) and known.started_ms is not None and view.newest_started_ms is not None:
        return Lookup.LOST if view.newest_started_ms > known.started_ms else Lookup.NOTHING
    return Lookup.READ if known.newest.first_offsets else Lookup.NOTHING


def _look_up_native(newest: PreparedTxnState, view: TransactionView, fence: int | None) -> Lookup:
    read = Lookup.READ if newest.first_offsets else Lookup.NOTHING
    if view.producer_id != newest.producer_id:
        return read
    ended_last = view.epoch - 1
    committed = view.status in _COMMITTED
    if fence is not None and (fence <= ended_last or (fence - 1 == ended_last and not committed)):
        ended_last, committed = fence - 2, False
    if ended_last <= newest.epoch:
        return Lookup.NOTHING
    return Lookup.LOST if committed else read


def lost_decision(
    known: Known, view: TransactionView, incarnation: int, answer: Lookup, later: Later | None
) -> PreparedTxnState | None:
    """The newest decision of an incarnation that the database has lost, if any. It names the partitions where it was seen.

    A commit that the coordinator shows may have been written to partitions other than those whose logs were read. If it began
    long after the producer's last write to these, it is not a known one.

    A commit that has records in none of them, but began before the producer's last marker there, wrote nothing: a late copy of
    the known transaction's AddPartitionsToTxn began it, and a second EndTxn committed it.

    ``later`` is None if the logs were not read.
    """
    if known.newest is not None and known.newest.is_native:
        return _lost_native(known.newest, view, answer, later)
    commit, idle_since_ms = (later.commit, later.idle_since_ms) if later is not None else (None, None)
    newest = known.newest
    shows_commit = newest is not None and _shows_commit_of(view, newest)
    started_ms = view.newest_started_ms if shows_commit or answer is Lookup.LOST else None
    began_later = started_ms is not None and idle_since_ms is not None and started_ms > idle_since_ms + CLOCKS_DIFFER_MS
    if commit is None and started_ms is not None and idle_since_ms is not None and started_ms <= idle_since_ms:
        return None
    if answer is Lookup.LOST or (answer is Lookup.READ and (commit is not None or began_later)):
        firsts = commit.first_offsets if commit is not None else ()
        producer = newest if newest is not None and answer is Lookup.READ else view
        return PreparedTxnState(producer.producer_id, producer.epoch, incarnation, firsts, started_ms)
    return None


def _lost_native(
    newest: PreparedTxnState, view: TransactionView, answer: Lookup, later: Later | None
) -> PreparedTxnState | None:
    commit = later.commit if later is not None and answer is not Lookup.NOTHING else None
    if answer is not Lookup.LOST or (commit is not None and commit.epoch >= view.epoch - 1):
        return commit
    return PreparedTxnState.native(view.producer_id, view.epoch - 1, newest.incarnation, {}, {})


def contradiction(
    incarnation: int, newest: PreparedTxnState, shown_incarnation: int, shown: PreparedTxnState
) -> str | None:
    """Why a row contradicts what its owner knows, in words; None if it does not.

    Only the owner changes the state as long as the incarnation is its own.
    """
    if shown_incarnation > incarnation:
        return None  # another owner has claimed the row
    if shown != newest:
        return f"the row shows {str(shown) or 'none'!r} as the newest decision, which was {str(newest) or 'none'!r}"
    if shown_incarnation < incarnation:
        return f"the row names incarnation {shown_incarnation}, although {incarnation} was claimed"
    return None


def _shows_commit_of(view: TransactionView, state: PreparedTxnState) -> bool:
    same_producer = (view.producer_id, view.epoch) == (state.producer_id, state.epoch)
    return same_producer and view.status in _COMMITTED
