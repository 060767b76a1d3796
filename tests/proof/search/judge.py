"""The demands on every state: after one complete settling, and again when the last late request has arrived.

As the checker of the real runs: what the database has is whole in Kafka, or its loss is recorded; what it does not have is
not there at all; nothing twice, nothing out of order, nothing left open; a second settling changes nothing.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.partition import committed_values, last_stable_offset
from simulator.state import Broker

from dualwrite.protocol.values import Outcome
from search.process import Walk
from search.rules import Rules
from search.stepping import arrived, committed
from search.values import DONE, STOPPED, Budgets, Database, Label, Process, name

_STOPS = "settling stops"
LONGEST = 200  # steps of one settling: a longer one is taken for one without an end
_AT_REST = frozenset({sim.EMPTY, sim.COMPLETE_COMMIT, sim.COMPLETE_ABORT})


class Excuses(NamedTuple):
    """The events that excuse a loss. Nothing else may cost a decided transaction."""

    loses: bool
    halves: bool
    forgets: bool

    @classmethod
    def of(cls, given: Budgets, left: Budgets) -> Excuses:
        """From the budgets that are spent."""
        spent = Budgets(*(had - has for had, has in zip(given, left, strict=True)))
        ended = bool(spent.timeout or spent.terminate)
        # What a settler has begun to end in one partition, since its marker was skipped there, may be timed out as well.
        return cls(
            ended or bool(spent.marker), bool(spent.marker or (ended and spent.forgotten)), bool(spent.retention)
        )


class Judge:
    """Settles a state to its end and holds it against what must hold. Remembers what it has judged.

    Args:
        rules: The rules that the settler goes by.
        open_is_fine: Whether a transaction that stays open is no fault: to see what else a mistake does.
        forgets: Whether markers may be skipped. An operator then ends what was undecided, and is open nonetheless.
    """

    def __init__(self, rules: Rules, *, open_is_fine: bool = False, forgets: bool = False) -> None:
        self._rules = rules
        self._walk = Walk(rules, forgets=forgets)
        self._open_is_fine = open_is_fine
        self._settled: dict[tuple[Database, Broker], tuple[Database, Broker, str | None]] = {}
        self._words: dict[object, str | None] = {}

    def verdict(
        self, database: Database, broker: Broker, late: tuple[sim.Request, ...], excuses: Excuses
    ) -> str | None:
        """The fault found; None if there is none."""
        lock = database.lock
        ends = [database._replace(lock=None, flying=None)]
        if landed := arrived(database._replace(lock=None)):
            ends.append(landed)
        if lock is not None and lock.orphan:
            ends.append(committed(database)._replace(flying=None))
        for end in ends:
            wrong = self._verdict(end, broker, late, excuses)
            if wrong is not None:
                return wrong
        return None

    def _verdict(
        self, database: Database, broker: Broker, late: tuple[sim.Request, ...], excuses: Excuses
    ) -> str | None:
        database, broker, wrong = self._settle(database, broker)
        if wrong == _STOPS:
            return self._after_a_stop(database, broker)
        if self._walk.forgets and wrong is None:
            broker = _without_what_hangs(database, _timed_out(broker))
        wrong = wrong or self._judge("after settling", database, broker, excuses)
        if wrong is not None:
            return wrong
        again, broker_again, wrong = self._settle(database, broker)
        if wrong is None and (again.incidents, again.prepared, again.completed) != (
            database.incidents,
            database.prepared,
            database.completed,
        ):
            wrong = "a second settling changes what the first has recorded"
        wrong = wrong or self._judge("after settling twice", again, broker_again, excuses)
        for order in dict.fromkeys(permutations(late)) if late and wrong is None else ():
            arrived = broker
            for request in order:
                arrived = environment.write_markers((self._rules.handle or handle)(arrived, request)[0])
                when = f"after settling, when {told(request)} has arrived late"
                wrong = wrong or self._judge(when, database, arrived, excuses)
        return wrong

    @staticmethod
    def _after_a_stop(database: Database, broker: Broker) -> str | None:
        """A person has to end what is open: until then nothing may be told of it."""
        shown = [committed_values(found._replace(log_start=0)) for found in broker.partitions]
        if database.completed is Outcome.COMMITTED:
            label = database.label_of(database.prepared)
            if not all(label in values for values in shown):
                return f"{name(label)} is recorded as committed, and Kafka has not all of it"
        return Judge._too_much(shown, [decision.label for decision in database.decided])

    def _settle(self, database: Database, broker: Broker) -> tuple[Database, Broker, str | None]:
        key = (database, broker)
        if key not in self._settled:
            self._settled[key] = self._run(database, broker)
        return self._settled[key]

    def _run(self, database: Database, broker: Broker) -> tuple[Database, Broker, str | None]:
        settler = Process("claim")
        for _ in range(LONGEST):
            broker = environment.write_markers(broker)
            if settler in {DONE, STOPPED}:
                return database, broker, None if settler == DONE else _STOPS
            moves = [move for move in self._walk.moves(settler, database, broker) if move.spends is None]
            if not moves:
                break
            _, settler, database, broker, _, _, wrong = moves[0]
            if wrong is not None:
                return database, broker, wrong
        return database, broker, f"settling does not end: {self._walk.next_step(settler)}"

    def _judge(self, when: str, database: Database, broker: Broker, excuses: Excuses) -> str | None:
        key = (database.decided, database.incidents, broker.partitions, excuses)
        if key not in self._words:
            self._words[key] = self._look(database, broker, excuses)
        wrong = self._words[key]
        return wrong and f"{when}: {wrong}"

    def _look(self, database: Database, broker: Broker, excuses: Excuses) -> str | None:
        # As a consumer saw them that ran all the time: also what retention has deleted since.
        shown = [committed_values(found._replace(log_start=0)) for found in broker.partitions]
        decided = [decision.label for decision in database.decided]
        incidents = dict(database.incidents)
        wrong = self._too_much(shown, decided)
        for label in decided:
            there = sum(label in values for values in shown)
            wrong = wrong or self._one(label, there, len(shown), incidents.get(label), excuses)
        if wrong is not None or self._open_is_fine:
            return wrong
        for found in broker.partitions:
            if last_stable_offset(found) != found.log_end:
                return f"a transaction stays open in partition {found.topic_partition[1]}: readers wait"
        return None

    @staticmethod
    def _too_much(shown: list[tuple[Label, ...]], decided: list[Label]) -> str | None:
        for number, values in enumerate(shown):
            for label in values:
                if label not in decided:
                    part = "all of it" if all(label in other for other in shown) else "a part of it"
                    return f"{name(label)} is not in the database, and Kafka shows {part}"
            if len(set(values)) < len(values):
                return f"partition {number} shows a transaction twice"
            if list(values) != [label for label in decided if label in values]:
                return f"partition {number} shows another order than the database"
        return None

    @staticmethod
    def _one(label, there: int, all_: int, incident: Outcome | None, excuses: Excuses) -> str | None:
        what = name(label)
        if incident is None:
            if there < all_:
                part = "a part" if there else "nothing"
                return f"{what} is in the database, Kafka shows {part} of it, and nobody was told"
            return None
        if incident is Outcome.LOST:
            if not excuses.loses:
                return f"{what} was decided, and the protocol itself has aborted it"
            if there == all_:
                return f"{what} is recorded as lost, and whole on both sides"
        elif not excuses.forgets:
            return f"{what} is recorded as unverifiable, and its records were there all the time"
        if there not in {0, all_} and not excuses.halves:
            return f"{what} is recorded as {incident.value}, and Kafka shows a part of it"
        return None


def _timed_out(broker: Broker) -> Broker:
    """Without what a settler has begun to end a transaction that was forgotten, and has left: the broker gives it a second."""
    for known in broker.transactions:
        broker = environment.write_markers(environment.time_out(broker, known.transactional_id))
    return broker


def _without_what_hangs(database: Database, broker: Broker) -> Broker:
    """As an operator does (docs/limits.md): ends undecided transactions whose abort was skipped unnoticed."""
    ongoing = {known.producer_id for known in broker.transactions if known.state == sim.ONGOING}
    decided = {decision.label for decision in database.decided}
    for found in broker.partitions:
        for entry in found.producers:
            written = (
                batch.values
                for batch in found.batches
                if batch.producer_id == entry.producer_id and batch.base_offset >= entry.txn_start
            )
            if (
                entry.txn_start < 0
                or entry.producer_id in ongoing
                or decided & {one for some in written for one in some}
            ):
                continue
            marker = sim.WriteTxnMarkers(entry.producer_id, entry.producer_epoch, False, (found.topic_partition,), 0)
            broker = handle(broker, marker)[0]
    return broker


def told(request: sim.Request) -> str:
    """A request for people."""
    match request:
        case sim.EndTxn(committed=committed):
            return f"EndTxn({'commit' if committed else 'abort'}) of {request.transactional_id}, epoch {request.producer_epoch}"
        case sim.InitProducerId():
            return f"InitProducerId of {request.transactional_id}"
        case sim.AddPartitionsToTxn():
            return f"AddPartitionsToTxn of {request.transactional_id}"
        case sim.Produce(values=values):
            return f"Produce of {name(values[0])} to {request.partition[1]}"
    raise AssertionError(request)
