"""Whether an open transaction may be terminated by force (KIP-939's ``forceTerminateTransaction``), and how.

=====================  =================  =================  ==============================================
row                    Kafka              ``lose_decided``   step
=====================  =================  =================  ==============================================
names what is open     Ongoing            no                 refuse: recovery completes it
names what is open     Ongoing            yes                abort it, then settle, which records the loss
names something else   something is left  any                settle, which aborts what is undecided
any                    nothing is left    any                nothing
there is none          no such id         any                unknown
there is none          not Ongoing        any                nothing
there is none, but     Ongoing            no                 refuse: the row of another database may name it
the name is ours
there is none, but     Ongoing            yes                abort it; there is no row to record a loss in
the name is ours
there is none          Ongoing            any                abort it: only its own application could tell
=====================  =================  =================  ==============================================

The transaction of another program may have been decided elsewhere. KIP-939 leaves that to the operator, and so does this
table: such a transaction has no row that could say so.
"""

from __future__ import annotations

from enum import Enum

from dualwrite.protocol.values import TransactionStatus


class TerminateStep(Enum):
    """The step for one transactional id."""

    UNKNOWN = "nobody knows the id"
    NOTHING = "nothing is open"
    REFUSE = "leave a decided transaction to recovery"
    SETTLE = "claim and settle: what is undecided is aborted"
    LOSE = "claim, abort what the database has decided, and settle, which records the loss"
    ABORT = "abort a transaction that has no row"


def step_with_row(*, needs_settling: bool, decided_is_open: bool, lose_decided: bool) -> TerminateStep:
    """The step for an id that has a row.

    Args:
        needs_settling: Whether anything of the id is left to settle.
        decided_is_open: Whether the open transaction is the one that the row names.
        lose_decided: Whether the caller gives up what the database has decided.
    """
    if decided_is_open:
        return TerminateStep.LOSE if lose_decided else TerminateStep.REFUSE
    return TerminateStep.SETTLE if needs_settling else TerminateStep.NOTHING


def step_without_row(status: TransactionStatus, *, is_ours: bool, lose_decided: bool) -> TerminateStep:
    """The step for a Kafka id that has no row.

    Args:
        status: The coordinator's status of the id, out of transition.
        is_ours: Whether the id has the form that this library gives its own.
        lose_decided: Whether the caller gives up what a database may have decided.
    """
    if status is TransactionStatus.NO_SUCH_ID:
        return TerminateStep.UNKNOWN
    if status is not TransactionStatus.ONGOING:
        return TerminateStep.NOTHING
    return TerminateStep.REFUSE if is_ours and not lose_decided else TerminateStep.ABORT
