"""The demands on every state of a batch: after one complete settling, after a second one, and when late requests have arrived."""

from __future__ import annotations

from itertools import permutations
from typing import Final

from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.partition import committed_values, last_stable_offset
from simulator.state import Broker

from dualwrite.protocol.values import Outcome
from search.batches.lab import Kept, Lab, Number
from search.batches.programs import SLOTS, written_by

RUNS: Final = (1, 2)
_LONGEST: Final = 200


class Judge:
    """Settles a state to its end by the product's recipes, and holds it against what must hold.

    Args:
        lab: What runs them.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._start: Number | None = None
        self._settled: dict[tuple[object, Broker], tuple[Kept, Broker, str | None]] = {}

    def verdict(self, kept: Kept, broker: Broker, late: tuple[sim.Request, ...], *, timed_out: bool) -> str | None:
        """The fault found; None if there is none."""
        ends = [kept._replace(sessions=())]
        ends += [
            self._lab.end_orphan(kept, held, committed=True)._replace(sessions=())
            for held in kept.sessions
            if held.committing
        ]
        for end in ends:
            wrong = self._verdict(end, broker, late, timed_out=timed_out)
            if wrong is not None:
                return wrong
        return None

    def _verdict(self, kept: Kept, broker: Broker, late: tuple[sim.Request, ...], *, timed_out: bool) -> str | None:
        kept, broker, wrong = self._settle(kept, broker)
        wrong = wrong or look("after settling", kept, broker, timed_out=timed_out)
        if wrong is not None:
            return wrong
        again, broker_again, wrong = self._settle(kept, broker)
        if wrong is None and again.incidents != kept.incidents:
            wrong = "a second settling changes what the first has recorded"
        wrong = wrong or look("after settling twice", again, broker_again, timed_out=timed_out)
        for order in dict.fromkeys(permutations(late)) if late and wrong is None else ():
            arrived = broker
            for request in order:
                arrived = environment.write_markers(handle(arrived, request)[0])
                when = f"after settling, when {told(request)} has arrived late"
                wrong = wrong or look(when, kept, arrived, timed_out=timed_out)
        return wrong

    def _settle(self, kept: Kept, broker: Broker) -> tuple[Kept, Broker, str | None]:
        key = repr(kept), broker
        if key not in self._settled:
            self._settled[key] = self._run(kept, broker)
        return self._settled[key]

    def _run(self, kept: Kept, broker: Broker) -> tuple[Kept, Broker, str | None]:
        if self._start is None:
            self._start = self._lab.start("settling")
        at = self._start
        for _ in range(_LONGEST):
            broker = environment.write_markers(broker)
            point = self._lab.points[at]
            if point.server is None:
                return kept, broker, point.error and f"settling ends with {point.error!r}"
            served = self._lab.serve(at, kept, broker)
            assert served is not None, "it is alone"
            if served == (at, kept, broker):
                break
            at, kept, broker = served
        return kept, broker, f"settling does not end: {self._lab.points[at].label}"


def look(when: str, kept: Kept, broker: Broker, *, timed_out: bool) -> str | None:
    """Compare both sides."""
    written = [run for run in RUNS if written_by(run) in kept.user_rows]
    if len(written) > 1:
        return f"{when}: the batch is written twice"
    for run in RUNS:
        for slot in SLOTS:
            if (f"{run}{slot}" in kept.user_rows) != (run in written):
                there = "is not" if run in written else "is"
                return f"{when}: the batch is {'' if run in written else 'not '}written by run {run}, and the row of {slot} {there} there"
    for found in broker.partitions:
        wrong = _one(written, found.topic_partition[1], committed_values(found), kept, timed_out=timed_out)
        if wrong is None and last_stable_offset(found) != found.log_end:
            wrong = f"a transaction stays open in partition {found.topic_partition[1]}: readers wait"
        if wrong is not None:
            return f"{when}: {wrong}"
    return None


def _one(written: list[int], number: int, shown: tuple[object, ...], kept: Kept, *, timed_out: bool) -> str | None:
    slot = SLOTS[number]
    expected = [f"{run}{slot}" for run in written]
    for label in shown:
        if label not in expected:
            return f"{label} is not decided, and readers see it"
    if len(shown) > len(expected):
        return f"readers see {shown[0]} twice"
    lost = [one for one in kept.incidents if one.transactional_id == slot]
    if expected and not shown:
        if not lost:
            return f"{expected[0]} is decided, readers do not see it, and nobody was told"
        if not timed_out:
            return f"{expected[0]} was decided, and the protocol itself has aborted it"
    elif lost:
        return f"{slot}: a transaction is recorded as {lost[0].outcome.value}, and nothing is lost"
    if any(one.outcome is not Outcome.LOST for one in lost):
        return f"{slot}: a loss is recorded as unverifiable, and its records are there"
    return None


def told(request: sim.Request) -> str:
    """A request for people."""
    what = type(request).__name__
    match request:
        case sim.EndTxn(committed=committed):
            return f"{what}({'commit' if committed else 'abort'}) of {request.transactional_id}, epoch {request.producer_epoch}"
        case sim.Produce(values=values):
            return f"{what} of {values[0]}"
        case sim.InitProducerId() | sim.AddPartitionsToTxn():
            return f"{what} of {request.transactional_id}"
    return what
