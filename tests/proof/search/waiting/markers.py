"""Markers that a broker skips in one partition (KAFKA-20734), and what the product's rules make of them.

A transaction without its marker stays open in that partition: readers wait there, and the next marker of the same producer ends
it as it ends its own transaction. Whether a producer goes on, and how a settler repairs what it finds, are the product's decisions. A settling
is one step here: :mod:`search.native` takes it apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.protocol.values import ShownProducer, TransactionStatus
from search import native
from search.waiting.rules import Rules
from search.waiting.values import Budgets, Kafka, Tx

End = tuple[str, Kafka, Budgets]
"""How a transaction may end: the words for a marker that is skipped, and what is left."""


def outcome(kafka: Kafka, transaction: Tx) -> bool | None:
    """What the coordinator says of a transaction; None: it has not ended."""
    return next((committed for one, committed in kafka.ended if one == transaction), None)


def ends(kafka: Kafka, budgets: Budgets, transaction: Tx, *, committed: bool) -> Iterator[End]:
    """The ways in which a transaction ends; one, without a change, if it has ended already."""
    yield "", _ended(kafka, transaction, committed=committed), budgets
    if budgets.forgotten and outcome(kafka, transaction) is None:
        less = budgets._replace(forgotten=budgets.forgotten - 1)
        for partition in _partitions(kafka, transaction):
            skipped = _ended(kafka, transaction, committed=committed, skipped=partition)
            yield f", and its marker in partition {partition} is skipped", skipped, less


def _ended(kafka: Kafka, transaction: Tx, *, committed: bool, skipped: int | None = None) -> Kafka:
    if outcome(kafka, transaction) is not None:
        return kafka
    marked = [partition for partition in _partitions(kafka, transaction) if partition != skipped]
    closed = {one for one in kafka.skipped if one[0][:2] == transaction[:2] and one[1] in marked}
    otherwise = {(*one, committed) for one in closed if outcome(kafka, one[0]) is not committed}
    return kafka._replace(
        ended=kafka.ended | {(transaction, committed)},
        skipped=(kafka.skipped - closed) | ({(transaction, skipped)} if skipped is not None else set()),
        otherwise=kafka.otherwise | otherwise,
    )


def _partitions(kafka: Kafka, transaction: Tx) -> list[int]:
    return [number for number, log in enumerate(kafka.log) if any(one == transaction for _, one in log)]


def is_end_known(kafka: Kafka, row: int, incarnation: int, rules: Rules) -> bool:
    """Whether the producer of this incarnation may begin another transaction, by what the leaders show of its last one."""
    own = [(one, committed) for one, committed in kafka.ended if one[:2] == (row, incarnation)]
    if not own or not kafka.skipped:  # every leader shows the marker
        return True
    last, committed = max(own)
    shown = {
        ("t", partition): ShownProducer(
            last[2] + ((last, partition) not in kafka.skipped), _offset(kafka, incarnation, row, partition)
        )
        for partition in _partitions(kafka, last)
    }
    return rules.knows_end(Ended(_state(kafka, last, epoch=last[2]), committed), shown)


def _offset(kafka: Kafka, incarnation: int, row: int, partition: int) -> int | None:
    """Where what the incarnation has open in a partition begins."""
    still_open = {one for one, where in kafka.skipped if one[:2] == (row, incarnation) and where == partition}
    return next((offset for offset, (_, one) in enumerate(kafka.log[partition]) if one in still_open), None)


def _state(kafka: Kafka, transaction: Tx, *, epoch: int) -> PreparedTxnState:
    offsets = {
        ("t", partition): next(at for at, (_, one) in enumerate(kafka.log[partition]) if one == transaction)
        for partition in _partitions(kafka, transaction)
    }
    return PreparedTxnState.native(0, epoch, 1, offsets, {"t": "id"})


def settled(kafka: Kafka, named: Tx | None, rules: Rules) -> Kafka:
    """What a settler, by its own rules and alone, makes of the markers that the incarnation of this transaction lacks."""
    if named is None or outcome(kafka, named) is None or not _partitions(kafka, named):
        return kafka
    if not any(one[:2] == named[:2] for one, _ in kafka.skipped):
        return kafka
    last, committed = max((one, how) for one, how in kafka.ended if one[:2] == named[:2])
    epoch = 1 if last == named else 2
    logs = tuple(_log(kafka, named, partition) for partition in range(len(kafka.log)))
    began = native.State(
        status=TransactionStatus.COMPLETE_COMMIT if committed else TransactionStatus.COMPLETE_ABORT,
        epoch=epoch,
        due=frozenset(),
        logs=logs,  # type: ignore[arg-type] # two of them
        has_forgotten=True,
    )
    offsets = {("t", partition): native.S_OFFSET for partition in _partitions(kafka, named)}
    found = native.finished(began, rules.settling, PreparedTxnState.native(0, 0, 1, offsets, {"t": "id"}))
    assert not isinstance(found, str), found
    skipped, otherwise = set(), set(kafka.otherwise)
    for one, partition in kafka.skipped:
        log, name = found.logs[partition], "S" if one == named else "U"
        if one[:2] != named[:2] or name in log.open:
            skipped.add((one, partition))
        elif (name in log.committed) is not outcome(kafka, one):
            otherwise.add((one, partition, name in log.committed))
    return kafka._replace(skipped=frozenset(skipped), otherwise=frozenset(otherwise))


def _log(kafka: Kafka, named: Tx, partition: int) -> native.Log:
    still_open = {one for one, where in kafka.skipped if one[:2] == named[:2] and where == partition}
    log = native.Log()
    if partition in _partitions(kafka, named):
        log = replace(log, open=frozenset("S"), epoch=0)
        if named not in still_open:
            log = log.marked(1, committed=(named, partition, False) not in kafka.otherwise)
    if still_open - {named}:
        log = replace(log, open=log.open | {"U"}, epoch=1)
    return log
