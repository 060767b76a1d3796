"""A whole state of a batch: the servers, requests on their way, budgets, and where each recipe stands; and what may follow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

from harness.simulated import TOPIC
from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.process import Server
from simulator.state import Broker, new_broker

from dualwrite.protocol.prepared_state import Engine
from search.batches.judge import Judge, told
from search.batches.lab import Breaking, Held, Kept, Lab, Number
from search.batches.programs import SLOTS, HandedOver, Told, programs, written_by
from search.ends import Ends
from search.world import State, Table, cache_of

_LATE: Final = "stays in the network, no answer"


class BatchBudgets(NamedTuple):
    """How often each misfortune may still happen.

    Attributes:
        delay: A request stays in the network, or its answer is lost.
        answer: A COMMIT of the database is not answered.
        session: The database ends a session that is inside a transaction.
        timeout: The broker times an open transaction out.
    """

    delay: int = 0
    answer: int = 0
    session: int = 0
    timeout: int = 0


class BatchBounds(NamedTuple):
    """The bounds of a search.

    Attributes:
        others: The processes besides the two participants and the driver.
        budgets: How often each misfortune happens.
        prepared: Whether the search begins when both participants have handed over.
        goes_on: Whether the participants try to go on with their producers.
        markers_late: Whether markers reach the partitions later than the coordinator has answered.
        engine: What sends the messages.
        needed: How many participants have handed over before the driver begins. Fewer than there are is a mistake.
    """

    others: tuple[str, ...] = ()
    budgets: BatchBudgets = BatchBudgets()
    prepared: bool = False
    goes_on: bool = False
    markers_late: bool = True
    engine: Engine = Engine.LIBRDKAFKA
    needed: int = len(SLOTS)


class Step(NamedTuple):
    """One step of a recipe."""

    text: str
    at: Number
    kept: Kept
    broker: Broker
    sent: sim.Request | None = None
    spends: str | None = None


class BatchWorld:
    """The states within some bounds.

    Args:
        bounds: What may happen.
        broken: Breaks a rule of the product.
    """

    def __init__(self, bounds: BatchBounds, broken: Breaking | None = None) -> None:
        self.bounds = bounds
        self._lab = Lab(programs(bounds.engine.value), broken)
        self._judge = Judge(self._lab)
        self._kept: Table[Hashable] = Table()
        self._databases: list[Kept] = []
        self._brokers: Table[Broker] = Table()
        self._late: Table[tuple[sim.Request, ...]] = Table()
        self._budgets: Table[BatchBudgets] = Table()
        self._texts: Table[str] = Table()
        self._names = [*(f"participant {slot}" for slot in SLOTS), "driver", *bounds.others]

    def close(self) -> None:
        """End all recipes."""
        self._lab.close()

    def text(self, number: Number) -> str:
        """The words of a step."""
        return self._texts.parts[number]

    def first(self) -> State:
        """The participants have claimed their ids and have their producers; everybody else is about to begin."""
        version = 2 if self.bounds.engine is Engine.NATIVE else 1
        broker = new_broker({TOPIC: len(SLOTS)}, offsets_partitions=0, transaction_version=version)
        kept, points = Kept(), []
        for name in self._names:
            at = self._lab.start(name)
            if name.startswith("participant"):
                at, kept, broker = self._until_commanded(at, kept, broker)
                at, kept, broker = self._lab.command(at, "prepare", kept, broker)
                if self.bounds.prepared:
                    at, kept, broker = self._until_commanded(at, kept, broker)
            points.append(at)
        return (
            self._database(kept),
            self._brokers.number(broker),
            self._late.number(()),
            self._budgets.number(self.bounds.budgets),
            *points,
        )

    def _until_commanded(self, at: Number, kept: Kept, broker: Broker) -> tuple[Number, Kept, Broker]:
        while self._lab.points[at].server is not Server.COMMAND:
            served = self._lab.serve(at, kept, broker)
            assert served is not None, "nobody else is there"
            at, kept, broker = served
            broker = environment.write_markers(broker)
        return at, kept, broker

    def following(self, state: State) -> Iterator[tuple[Number, State, str | None]]:
        """Every step from a state: its words, where it leads, and what is wrong with it at once."""
        database, broker, late, budgets, *points = state
        for index, at in enumerate(points):
            steps = self._steps(at, database, broker)
            if self._lab.points[at].server is Server.COMMAND:
                steps = self._commanded(at, database, broker, self._handed_over(points))
            for text, at_, database_, broker_, sent, spends in steps:
                left = budgets if spends is None else self._spend(budgets, spends)
                if left is None:
                    continue
                others = points.copy()
                others[index] = at_
                after = self._shortened(database_, broker_, self._sent(late, sent), left, others)
                yield text, after, self._at_once(at_)
        for text, database_, broker_, late_, spends in self._others(database, broker, late):
            left = budgets if spends is None else self._spend(budgets, spends)
            if left is not None:
                yield text, self._shortened(database_, broker_, late_, left, points), None

    def wrong(self, state: State) -> str | None:
        """The fault that shows if nothing more happens than one settling, and late requests arriving; None if there is none."""
        database, broker, late, budgets, *points = state
        kept = self._databases[database]
        for at in points:
            for what in self._lab.points[at].told:
                if isinstance(what, Told) and (wrong := _told_wrongly(what, kept)) is not None:
                    return wrong
        spent = self._budgets.parts[budgets].timeout < self.bounds.budgets.timeout
        return self._verdict(database, broker, late, spent)

    @cache_of
    def _verdict(self, database: Number, broker: Number, late: Number, timed_out: bool) -> str | None:
        return self._judge.verdict(
            self._databases[database], self._brokers.parts[broker], self._late.parts[late], timed_out=timed_out
        )

    def _at_once(self, at: Number) -> str | None:
        error = self._lab.points[at].error
        return None if error is None else f"{self._lab.points[at].program} ends with {error!r}"

    def _handed_over(self, points: list[Number]) -> tuple[HandedOver, ...]:
        return tuple(what for at in points for what in self._lab.points[at].told if isinstance(what, HandedOver))

    @cache_of
    def _commanded(self, at: Number, database: Number, broker: Number, parts: tuple[HandedOver, ...]) -> list[tuple]:
        """The steps of a recipe that waits for a command."""
        name = self._lab.points[at].program
        kept, found = self._databases[database], self._brokers.parts[broker]
        if name == "driver" and len(parts) >= self.bounds.needed:
            text = f"driver: is given what {' and '.join(part.transactional_id for part in parts)} have handed over"
            return [self._numbered(Step(text, *self._lab.command(at, parts, kept, found)))]
        if name != "driver" and self.bounds.goes_on:
            text = f"{name}: is given another task"
            return [self._numbered(Step(text, *self._lab.command(at, "prepare", kept, found)))]
        return []

    @cache_of
    def _steps(self, at: Number, database: Number, broker: Number) -> list[tuple]:
        """The steps of a recipe: words, where it stands, database, broker, what is sent, what is spent."""
        point = self._lab.points[at]
        if point.server is None or point.server is Server.COMMAND:
            return []
        moves = self._moves(at, self._databases[database], self._brokers.parts[broker])
        return [self._numbered(move) for move in moves]

    def _moves(self, at: Number, kept: Kept, broker: Broker) -> Iterator[Step]:
        lab, point, budgets = self._lab, self._lab.points[at], self.bounds.budgets
        name = point.program
        what = f"{name}: {point.label if point.request is None else told(point.request)}"
        if any(held.owner == name and not held.broken for held in kept.sessions):
            yield Step(f"{name}: dies, and its session with it", lab.died(at), kept.without(name), broker)
        if lab.is_blocked(at, kept):
            return
        served = lab.serve(at, kept, broker)
        if served is not None and served != (at, kept, broker):
            waits = " waits for a lock" if served[0] == at and served[1] != kept else _locked(name, kept, served[1])
            yield Step(what + waits, *served)
        if point.server is Server.KAFKA and point.request is not None and budgets.delay:
            yield Step(f"{what} {_LATE}", *lab.fail(at, kept, broker), point.request, "delay")
            lost = lab.serve(at, kept, broker, lost=True)
            assert lost is not None
            yield Step(f"{what}: the answer is lost", *lost, spends="delay")
        if point.label == "COMMIT" and budgets.answer:
            done = lab.serve(at, kept, broker, lost=True)
            assert done is not None
            yield Step(f"{what}: the answer is lost; it is done", *done, spends="answer")
            yield Step(f"{what}: the answer is lost; it never arrived", *lab.fail(at, kept, broker), spends="answer")
            working = lab.fail(at, kept, broker, under_way=True)
            yield Step(f"{what}: the answer is lost; the session is still at it", *working, spends="answer")

    def _numbered(self, step: Step) -> tuple:
        return (
            self._texts.number(step.text),
            step.at,
            self._database(step.kept),
            self._broker(step.broker),
            step.sent,
            step.spends,
        )

    @cache_of
    def _others(self, database: Number, broker: Number, late: Number) -> list[tuple]:
        """The events of broker, network and database."""
        kept, found, waiting = self._databases[database], self._brokers.parts[broker], self._late.parts[late]
        events: list[tuple[str, Kept, Broker, tuple[sim.Request, ...], str | None]] = []
        for known in found.transactions:
            kafka_id = known.transactional_id
            marked = environment.write_markers(found, kafka_id)
            events.append((f"broker: the markers of {kafka_id} reach the partitions", kept, marked, waiting, None))
            if self.bounds.budgets.timeout:
                late_ = environment.time_out(found, kafka_id)
                events.append((f"broker: {kafka_id} times out", kept, late_, waiting, "timeout"))
        for index, request in enumerate(waiting):
            after = handle(found, request)[0]
            left = waiting[:index] + waiting[index + 1 :]
            events.append((f"network: {told(request)} arrives late", kept, after, left, None))
        for held in kept.sessions:
            if not held.owner:
                for committed in {held.committing, False}:
                    ended = self._lab.end_orphan(kept, held, committed=committed)
                    words = "commits" if committed else "rolls back"
                    events.append((f"database: the session {words}", ended, found, waiting, None))
            elif self.bounds.budgets.session and not held.broken:
                cut = kept.without(held.owner)
                cut = cut._replace(sessions=(*cut.sessions, Held(held.owner, held.index, broken=True)))
                events.append((f"database: ends the session of the {held.owner}", cut, found, waiting, "session"))
        return [
            (self._texts.number(text), self._database(kept_), self._broker(broker_), self._late.number(left), spends)
            for text, kept_, broker_, left, spends in events
            if (kept_, broker_, left) != (kept, found, waiting)
        ]

    def _database(self, kept: Kept) -> Number:
        # Two native states are equal if they have the same epoch, also in two histories where they have written something else.
        exact = tuple(str(row.prepared) for rows in (kept.rows, *(one.rows for one in kept.sessions)) for row in rows)
        number = self._kept.number((kept, exact))
        if number == len(self._databases):
            self._databases.append(kept)
        return number

    def _broker(self, broker: Broker) -> Number:
        return self._brokers.number(broker if self.bounds.markers_late else environment.write_markers(broker))

    def _sent(self, late: Number, request: sim.Request | None) -> Number:
        if request is None:
            return late
        return self._late.number(tuple(sorted((*self._late.parts[late], request), key=repr)))

    @cache_of
    def _spend(self, budgets: Number, which: str) -> Number | None:
        left = self._budgets.parts[budgets]
        count = getattr(left, which)
        return self._budgets.number(left._replace(**{which: count - 1})) if count else None

    def _shortened(
        self, database: Number, broker: Number, late: Number, budgets: Number, points: list[Number]
    ) -> State:
        """The state without requests that the broker will refuse whenever they arrive."""
        return (database, broker, self._coming(late, broker), budgets, *points)

    @cache_of
    def _coming(self, late: Number, broker: Number) -> Number:
        found = self._brokers.parts[broker]
        return self._late.number(tuple(one for one in self._late.parts[late] if not Ends.refused(one, found)))


def _told_wrongly(what: Told, kept: Kept) -> str | None:
    """The contradiction to a report, which is final; None if there is none."""
    if what.outcome == "written":
        return (
            None if any(written_by(run) in kept.user_rows for run in (1, 2)) else "told written, and the batch is not"
        )
    if written_by(what.run) in kept.user_rows:
        return f"run {what.run} was told to be aborted, and the database has committed it"
    return None


def _locked(name: str, before: Kept, after: Kept) -> str:
    """The row that a statement has locked, for people."""

    def locks(kept: Kept) -> set[str]:
        return {key for held in kept.sessions if held.owner == name for key, _ in held.locked}

    return "".join(f" of {key}" for key in sorted(locks(after) - locks(before)) if key in SLOTS)
