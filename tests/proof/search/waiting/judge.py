"""What must hold in every state.

once
    No message is in two transactions that are committed or named by a row, nor waits beside such a one.
kept
    Each message of a decided block waits, or is in such a transaction.
none
    No message of a block that is not decided waits or is in such a transaction; nor is one whose savepoint was rolled back.
order
    If X was decided before Y began, X's messages come before Y's in every partition: both in the log, both waiting, or X in the
    log and Y waiting. So do those of one block.
lost
    No transaction that a row names is aborted.
open
    A committed transaction that lacks its marker in a partition is named by a row: by that, settling finds it.
"""

from __future__ import annotations

from search.waiting.values import Message, State


def wrong(state: State) -> str | None:
    """The fault of a state; None if there is none."""
    named = {row.state for row in state.database.rows if row.state is not None}
    ended = dict(state.kafka.ended)
    lost = next((transaction for transaction in named if ended.get(transaction) is False), None)
    if lost is not None:
        return f"lost: {lost} was decided, and is aborted"
    # Where the database went back, its rows name what it knew then; what Kafka has committed counts all the same.
    counts = named | {transaction for transaction, committed in state.kafka.ended if committed}
    for transaction, partition in state.kafka.skipped:
        if transaction not in named and ended[transaction] and not state.restored:
            return f"open: {transaction} was committed, lacks its marker in partition {partition}, and no row names it"
    otherwise = {one[:2]: one[2] for one in state.kafka.otherwise}
    logged: dict[Message, tuple[int, int]] = {}
    for partition, log in enumerate(state.kafka.log):
        for offset, (message, transaction) in enumerate(log):
            if otherwise.get((transaction, partition), transaction in counts):
                if message in logged:
                    return f"once: {_name(message)} is there twice"
                logged[message] = (partition, offset)
    waiting: dict[Message, int] = {}
    for number, message in state.database.waiting:
        # A database that was put back may have again what is sent. Then nobody may send it again, and a person must look.
        if message in waiting or (message in logged and not state.restored):
            return f"once: {_name(message)} waits, and is sent or waits beside"
        waiting[message] = number
    return _missing(state, {*logged, *waiting}) or _out_of_order(state, logged, waiting)


def _missing(state: State, there: set[Message]) -> str | None:
    """What is decided and nowhere, or there and not decided. What a database has lost by going back is not looked at."""
    for block in state.written:
        kept = set(block.messages) if block.decided else set()
        for message in () if block.gone else kept - there:
            return f"kept: {_name(message)} is decided, and nowhere"
        for message in () if block.gone else there - kept:
            if message[0] == block.name:
                return f"none: {_name(message)} is there, and was never decided"
    return None


def _out_of_order(state: State, logged: dict[Message, tuple[int, int]], waiting: dict[Message, int]) -> str | None:
    for later in state.written:
        if not later.decided or later.gone:
            continue
        for earlier in state.written:
            if earlier.name in later.after and not earlier.gone:
                for y in later.messages:
                    for x in earlier.messages:
                        if not _in_order(x, y, logged, waiting):
                            return f"order: {_name(y)} comes before {_name(x)}, whose block was decided before {later.name} began"
    return None


def _in_order(x: Message, y: Message, logged: dict[Message, tuple[int, int]], waiting: dict[Message, int]) -> bool:
    """Whether x comes before y, or they are in different partitions."""
    if x[2] != y[2]:
        return True
    if x in logged and y in logged:
        return logged[x] < logged[y]
    if x in waiting and y in waiting:
        return waiting[x] < waiting[y]
    return x in logged


def _name(message: Message) -> str:
    return f"{message[0]}.{message[1]}"
