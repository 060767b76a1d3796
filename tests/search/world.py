"""A whole state: row, broker, requests on their way, budgets, processes; and every state that follows it.

Each part is kept once and known by a number, so a state is a handful of small numbers, and a step that was worked out for
one state serves all others in which the same process meets the same row and the same broker. Processes are kept in a fixed
order: none is told from another but by what it knows, so states that differ in who is called first are one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from dualwrite.testing.simulator import environment
from dualwrite.testing.simulator import requests as sim
from dualwrite.testing.simulator.broker import handle
from dualwrite.testing.simulator.partition import last_stable_offset
from dualwrite.testing.simulator.state import Broker, new_broker, partition, with_partition
from search.judge import Excuses, Judge, told
from search.process import Walk
from search.rules import PRODUCT, Rules
from search.stepping import Move, committed
from search.values import DONE, PLACES, Budgets, Database, Process

Part = TypeVar("Part", bound=Hashable)
Number = int
State = tuple[Number, ...]
"""Numbers of: row, broker, requests on their way, budgets, then the processes."""


class Bounds(NamedTuple):
    """What a search goes through.

    Attributes:
        transactions: For each process how many it does; a process of 0 only settles.
        incarnations: How many there may be.
        budgets: How often each misfortune happens.
        verdicts: Whether the database knows what became of its own transactions (PostgreSQL does, SQLite does not).
        one_by_one: Whether markers reach the partitions, and questions their leaders, one after the other.
        dies: Whether an owner ends with its first decision.
    """

    transactions: tuple[int, ...]
    incarnations: int
    budgets: Budgets = Budgets()
    verdicts: bool = False
    one_by_one: bool = False
    dies: bool = False


class Table(Generic[Part]):
    """Parts by number and numbers by part."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._numbers: dict[Part, Number] = {}

    def number(self, part: Part) -> Number:
        """The part's number, a new one if it has none."""
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = len(self.parts)
            self.parts.append(part)
        return number


class World:
    """The states within some bounds, by some rules.

    Args:
        bounds: What may happen.
        rules: What the processes go by.
        open_is_fine: See `Judge`.
    """

    def __init__(self, bounds: Bounds, rules: Rules = PRODUCT, *, open_is_fine: bool = False) -> None:
        self.bounds = bounds
        self._rules = rules
        self._walk = Walk(
            rules, most=bounds.incarnations, verdicts=bounds.verdicts, dies=bounds.dies, one_by_one=bounds.one_by_one
        )
        self._judge = Judge(rules, open_is_fine=open_is_fine)
        self._databases: Table[Database] = Table()
        self._brokers: Table[Broker] = Table()
        self._late: Table[tuple[sim.Request, ...]] = Table()
        self._budgets: Table[Budgets] = Table()
        self._processes: Table[Process] = Table()
        self._texts: Table[str] = Table()
        self._steps: dict[tuple[Number, Number, Number], list[tuple]] = {}
        self._brokers_own: dict[Number, list[tuple]] = {}
        self._arrivals: dict[tuple[Number, Number], list[tuple]] = {}
        self._sent: dict[tuple[Number, Number], Number] = {}
        self._spent: dict[tuple[Number, int], Number | None] = {}
        self._verdicts: dict[tuple[Number, Number, Number, Number], str | None] = {}
        self._excuses: dict[Number, Number] = {}
        self._kinds: Table[Excuses] = Table()
        self._ends: dict[Number, list[tuple]] = {}
        self._requests: Table[sim.Request] = Table()
        self._done = self._processes.number(DONE)

    def first(self) -> State:
        """Nothing has happened."""
        processes = sorted(self._processes.number(Process(todo=count)) for count in self.bounds.transactions)
        return (
            self._databases.number(Database()),
            self._brokers.number(new_broker({PLACES[0][0]: len(PLACES)}, offsets_partitions=0)),
            self._late.number(()),
            self._budgets.number(self.bounds.budgets),
            *processes,
        )

    def text(self, number: Number) -> str:
        """The words of a step."""
        return self._texts.parts[number]

    def following(self, state: State) -> Iterator[tuple[Number, State, str | None]]:
        """Every step from a state: its words, where it leads, and what is wrong with it at once."""
        yield from self._by_processes(state)
        yield from self._by_others(state)

    def _by_processes(self, state: State) -> Iterator[tuple[Number, State, str | None]]:
        database, broker, late, budgets, *processes = state
        last = -1
        for index, process in enumerate(processes):
            if process in {self._done, last}:  # two alike have the same steps
                continue
            last = process
            key = (process, database, broker)
            steps = self._steps.get(key)
            if steps is None:
                steps = self._steps[key] = self._work_out(*key)
            for text, process_, database_, broker_, sent, spends, wrong in steps:
                budgets_ = budgets if spends < 0 else self._spend(budgets, spends)
                if budgets_ is None:
                    continue
                late_ = late if sent < 0 else self._with(late, sent)
                others = processes.copy()
                others[index] = process_
                others.sort()
                yield text, (database_, broker_, late_, budgets_, *others), wrong

    def _by_others(self, state: State) -> Iterator[tuple[Number, State, None]]:
        """What the broker, the network, tools and the database do."""
        database, broker, late, budgets, *processes = state
        own = self._brokers_own.get(broker)
        if own is None:
            own = self._brokers_own[broker] = list(self._own(self._brokers.parts[broker]))
        for text, broker_, spends in own:
            budgets_ = budgets if spends < 0 else self._spend(budgets, spends)
            if budgets_ is not None:
                yield text, (database, broker_, late, budgets_, *processes), None
        arrivals = self._arrivals.get((broker, late))
        if arrivals is None:
            arrivals = self._arrivals[broker, late] = list(self._arriving(broker, late))
        for text, broker_, late_ in arrivals:
            yield text, (database, broker_, late_, budgets, *processes), None
        if self.bounds.budgets.marker and (left := self._spend(budgets, Budgets._fields.index("marker"))) is not None:
            for text, broker_ in self._tools(self._databases.parts[database], self._brokers.parts[broker]):
                yield self._texts.number(text), (database, self._brokers.number(broker_), late, left, *processes), None
        ends = self._ends.get(database)
        if ends is None:
            ends = self._ends[database] = list(self._sessions(self._databases.parts[database]))
        for text, database_ in ends:
            yield text, (database_, broker, late, budgets, *processes), None

    def wrong(self, state: State) -> str | None:
        """What would be wrong if nothing more happened here than one settling, and late requests arriving."""
        database, broker, late, budgets, *_ = state
        excuses = self._excuses.get(budgets)
        if excuses is None:
            of = Excuses.of(self.bounds.budgets, self._budgets.parts[budgets])
            excuses = self._excuses[budgets] = self._kinds.number(of)
        key = (database, broker, late, excuses)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge.verdict(
                self._databases.parts[database],
                self._brokers.parts[broker],
                self._late.parts[late],
                self._kinds.parts[excuses],
            )
        return self._verdicts[key]

    def _work_out(self, process: Number, database: Number, broker: Number) -> list[tuple]:
        moves = self._walk.moves(
            self._processes.parts[process], self._databases.parts[database], self._brokers.parts[broker]
        )
        return [self._numbered(move) for move in moves if self._possible(move)]

    def _possible(self, move: Move) -> bool:
        return move.spends is None or getattr(self.bounds.budgets, move.spends) > 0

    def _numbered(self, move: Move) -> tuple:
        return (
            self._texts.number(move.text),
            self._processes.number(move.process),
            self._databases.number(move.database),
            self._brokers.number(move.broker),
            -1 if move.sent is None else self._requests.number(move.sent),
            -1 if move.spends is None else Budgets._fields.index(move.spends),
            move.wrong,
        )

    def _spend(self, budgets: Number, which: int) -> Number | None:
        key = (budgets, which)
        if key not in self._spent:
            left = self._budgets.parts[budgets]
            spent = left._replace(**{Budgets._fields[which]: left[which] - 1})
            self._spent[key] = self._budgets.number(spent) if left[which] > 0 else None
        return self._spent[key]

    def _with(self, late: Number, request: Number) -> Number:
        key = (late, request)
        if key not in self._sent:
            added = [*self._late.parts[late], self._requests.parts[request]]
            self._sent[key] = self._late.number(tuple(sorted(added, key=repr)))
        return self._sent[key]

    def _arriving(self, broker: Number, late: Number) -> Iterator[tuple]:
        waiting = self._late.parts[late]
        for index, request in enumerate(waiting):
            after = handle(self._brokers.parts[broker], request)[0]
            left = self._late.number(waiting[:index] + waiting[index + 1 :])
            yield self._texts.number(f"network: {told(request)} arrives late"), self._brokers.number(after), left

    def _own(self, broker: Broker) -> Iterator[tuple]:
        """What the broker does by itself, and what others do to it."""

        def after(text: str, after_: Broker, spends: str | None = None) -> Iterator[tuple]:
            if after_ != broker and (spends is None or getattr(self.bounds.budgets, spends) > 0):
                which = -1 if spends is None else Budgets._fields.index(spends)
                yield self._texts.number(text), self._brokers.number(after_), which

        for known in broker.transactions:
            kafka_id = known.transactional_id
            if self.bounds.one_by_one:
                for place in known.unmarked if known.state.startswith("Prepare") else ():
                    yield from after(
                        f"broker: the marker of {kafka_id} reaches partition {place[1]}",
                        environment.write_marker(broker, kafka_id, place),
                    )
            else:
                yield from after(
                    f"broker: the markers of {kafka_id} reach the partitions",
                    environment.write_markers(broker, kafka_id),
                )
            yield from after(f"broker: {kafka_id} times out", environment.time_out(broker, kafka_id), "timeout")
            yield from after(
                f"broker: {kafka_id} is forgotten", environment.expire_transactional_id(broker, kafka_id), "expire"
            )
            if known.state == sim.ONGOING:
                yield from after(
                    f"operator: {kafka_id} is force-terminated",
                    handle(broker, sim.InitProducerId(kafka_id, 1))[0],
                    "terminate",
                )
        for place in PLACES:
            found = partition(broker, place)
            stable = last_stable_offset(found)
            # The batches stay where the judge sees them; nobody can read below the beginning of the log.
            yield from after(
                f"broker: retention deletes partition {place[1]} up to {stable}",
                with_partition(broker, found._replace(log_start=stable)),
                "retention",
            )

    def _tools(self, database: Database, broker: Broker) -> Iterator[tuple[str, Broker]]:
        """What an operator does to the transaction of an owner that is none any more."""
        for place in PLACES:
            for entry in partition(broker, place).producers:
                owner = next(known for known in broker.transactions if known.producer_id == entry.producer_id)
                if entry.txn_start >= 0 and owner.transactional_id != self._rules.kafka_id(database.incarnation):
                    marker = sim.WriteTxnMarkers(entry.producer_id, entry.producer_epoch, False, (place,), 0)
                    yield (
                        f"operator: an abort marker of {owner.transactional_id} in {place[1]}",
                        handle(broker, marker)[0],
                    )

    def _sessions(self, database: Database) -> Iterator[tuple[Number, Number]]:
        """What the database does by itself: a session whose owner has turned away comes to its end."""
        lock = database.lock
        if lock is not None and lock.orphan:
            text = f"database: the session of owner {lock.holder} commits"
            yield self._texts.number(text), self._databases.number(committed(database))
            text = f"database: the session of owner {lock.holder} rolls back"
            yield self._texts.number(text), self._databases.number(database._replace(lock=None))
