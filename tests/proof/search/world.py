"""A whole state: row, broker, requests on their way, budgets, processes; and every state that follows it.

Each part is kept once and known by a number, so a state is a handful of small numbers, and a step that was worked out for
one state serves all others in which the same process meets the same row and the same broker. Processes are kept in a fixed
order: only their knowledge tells them apart, so states that differ in their processes' names are one. And what is at
its end is left out, see `ends`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, cached_property
from types import MethodType
from typing import Generic, NamedTuple, TypeVar, cast

from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.partition import last_stable_offset
from simulator.state import Broker, new_broker, partition, with_partition

from dualwrite.protocol.prepared_state import Engine
from search.ends import Ends
from search.judge import Excuses, Judge, told
from search.process import Walk
from search.rules import PRODUCT, Rules
from search.stepping import Move, arrived, committed
from search.values import DONE, PLACES, Budgets, Database, Process

Part = TypeVar("Part", bound=Hashable)
Number = int
State = tuple[Number, ...]
"""Numbers of: row, broker, requests on their way, budgets, then the processes."""


class Bounds(NamedTuple):
    """The bounds of a search.

    Attributes:
        transactions: For each process how many it does; a process of 0 only settles.
        incarnations: How many there may be.
        budgets: How often each misfortune happens.
        verdicts: Whether the database knows what became of its own transactions (PostgreSQL does, SQLite does not).
        one_by_one: Whether markers reach the partitions, and questions their leaders, one after the other.
        dies: Whether an owner ends with its first decision.
        epochs: How many a Kafka id may have had; 0 for any number. Two settlers can raise them in turns for as long as they like.
        engines: For each process what sends its messages: librdkafka, if not given.
        witnesses: In how many partitions a native state names an offset.
        answers_late: Whether a native owner reads the answer about ends some time after the leaders have given it.
        tools_hit_owners: Whether a tool writes its marker also while the transaction's owner still owns the row.
        at_once: Whether owners send their decision and its COMMIT in one exchange with the database.
    """

    transactions: tuple[int, ...]
    incarnations: int
    budgets: Budgets = Budgets()
    verdicts: bool = False
    one_by_one: bool = False
    dies: bool = False
    epochs: int = 0
    engines: tuple[Engine, ...] = ()
    witnesses: int = len(PLACES)
    tools_hit_owners: bool = False
    answers_late: bool = False
    at_once: bool = False

    @property
    def of_processes(self) -> tuple[Engine, ...]:
        """The engine of each process."""
        return self.engines or (Engine.LIBRDKAFKA,) * len(self.transactions)


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


Function = TypeVar("Function", bound=Callable[..., object])


def cache_of(function: Function) -> Function:
    """Remember every answer of a method, for as long as its object lives.

    The first use of the method puts a cache written in C into the object, in front of the method: the search asks millions of times.
    """
    return cast("Function", cached_property(lambda self: cache(MethodType(function, self))))


class World:
    """The states within some bounds, by some rules.

    Args:
        bounds: What may happen.
        rules: What the processes go by.
        open_is_fine: See `Judge`.
        entire: Whether states are also told apart by what is at its end (see `ends`).
    """

    def __init__(
        self, bounds: Bounds, rules: Rules = PRODUCT, *, open_is_fine: bool = False, entire: bool = False
    ) -> None:
        self.bounds = bounds
        self._rules = rules
        forgets = bounds.budgets.forgotten > 0
        self._walk = Walk(
            rules,
            most=bounds.incarnations,
            verdicts=bounds.verdicts,
            dies=bounds.dies,
            one_by_one=bounds.one_by_one,
            forgets=forgets,
            native_timeout_ms=60_000 if bounds.budgets.timeout else sim.NEVER_MS,
            witnesses=bounds.witnesses,
            answers_late=bounds.answers_late,
            at_once=bounds.at_once,
        )
        self._judge = Judge(rules, open_is_fine=open_is_fine, forgets=forgets)
        self.entire = entire
        self._ends = Ends(self._walk, forgets=bounds.budgets.expire > 0)
        self._databases: Table[Database] = Table()
        self._brokers: Table[Broker] = Table()
        self._late: Table[tuple[sim.Request, ...]] = Table()
        self._budgets: Table[Budgets] = Table()
        self._processes: Table[Process] = Table()
        self._texts: Table[str] = Table()
        self._kinds: Table[Excuses] = Table()
        self._requests: Table[sim.Request] = Table()
        self.done = self._processes.number(DONE)

    def first(self) -> State:
        """Nothing has happened."""
        engines = self.bounds.of_processes
        started = (
            Process(todo=count, engine=engine) for count, engine in zip(self.bounds.transactions, engines, strict=True)
        )
        version = 2 if Engine.NATIVE in engines else 1
        broker = new_broker(
            {PLACES[0][0]: len(PLACES)}, offsets_partitions=0, max_timeout_ms=sim.NEVER_MS, transaction_version=version
        )
        processes = sorted(self._processes.number(process) for process in started)
        return (
            self._databases.number(Database()),
            self._brokers.number(broker),
            self._late.number(()),
            self._budgets.number(self.bounds.budgets),
            *processes,
        )

    def text(self, number: Number) -> str:
        """The words of a step."""
        return self._texts.parts[number]

    def following(self, state: State) -> Iterator[tuple[Number, State, str | None]]:
        """Every step from a state: its words, where it leads, and what is wrong with it at once."""
        database, broker, late, budgets, *processes = state
        last = -1
        for index, process in enumerate(processes):
            if process in {self.done, last}:  # two alike have the same steps
                continue
            last = process
            for text, process_, database_, broker_, sent, spends, wrong in self._steps(process, database, broker):
                budgets_ = budgets if spends < 0 else self.spend(budgets, spends)
                if budgets_ < 0:
                    continue
                late_ = late if sent < 0 else self.send(late, sent)
                others = processes.copy()
                others[index] = process_
                after = self.shortened(database_, broker_, late_, budgets_, others)
                yield text, after, None if wrong < 0 else self.text(wrong)
        for text, database_, broker_, late_, spends in self._others(database, broker, late):
            budgets_ = budgets if spends < 0 else self.spend(budgets, spends)
            if budgets_ >= 0:
                yield text, self.shortened(database_, broker_, late_, budgets_, processes), None

    def shortened(
        self, database: Number, broker: Number, late: Number, budgets: Number, processes: Iterable[Number]
    ) -> State:
        """The state without what is at its end."""
        if not self.entire:
            processes = [self.living(process, database, broker) for process in processes]
            late = self.coming(late, broker)
        return (database, broker, late, budgets, *sorted(processes))

    @cache_of
    def living(self, process: Number, database: Number, broker: Number) -> Number:
        """The process, or one that is done if it is at its end."""
        parts = self._processes.parts[process], self._databases.parts[database], self._brokers.parts[broker]
        return self.done if self._ends.finished(*parts) else process

    @cache_of
    def coming(self, late: Number, broker: Number) -> Number:
        """The requests on their way, without those that will be refused."""
        found = self._brokers.parts[broker]
        waiting = self._late.parts[late]
        return self._late.number(tuple(request for request in waiting if not self._ends.refused(request, found)))

    def left(self, budgets: Number) -> Budgets:
        """The events that may still happen."""
        return self._budgets.parts[budgets]

    def wrong(self, state: State) -> str | None:
        """The fault that shows if nothing more happens than one settling, and late requests arriving; None if there is none."""
        database, broker, late, budgets, *_ = state
        return self.verdict(database, broker, late, self.excuses(budgets))

    @cache_of
    def verdict(self, database: Number, broker: Number, late: Number, excuses: Number) -> str | None:
        """The judge's."""
        return self._judge.verdict(
            self._databases.parts[database],
            self._brokers.parts[broker],
            self._late.parts[late],
            self._kinds.parts[excuses],
        )

    @cache_of
    def excuses(self, budgets: Number) -> Number:
        """The events so far that excuse a loss."""
        return self._kinds.number(Excuses.of(self.bounds.budgets, self._budgets.parts[budgets]))

    def steps(self, process: Number, database: Number, broker: Number) -> list[tuple]:
        """The steps of a process: words, process, row, broker, what is sent and what is spent (-1: nothing), what is wrong."""
        moves = self._walk.moves(
            self._processes.parts[process], self._databases.parts[database], self._brokers.parts[broker]
        )
        return [self._numbered(move) for move in moves if self._possible(move)]

    def others(self, database: Number, broker: Number, late: Number) -> list[tuple]:
        """The events of broker, network, tools and database: words, row, broker, late requests, what is spent."""
        steps = [(text, database, broker_, late, spends) for text, broker_, spends in self._own(broker)]
        steps += [(text, database, broker_, late_, -1) for text, broker_, late_ in self._arriving(broker, late)]
        if self.bounds.budgets.marker:
            tools = self._tools(self._databases.parts[database], self._brokers.parts[broker])
            spent = Budgets._fields.index("marker")
            numbers = self._texts.number, self._brokers.number
            steps += [(numbers[0](text), database, numbers[1](broker_), late, spent) for text, broker_ in tools]
        ends = self._sessions(self._databases.parts[database])
        return steps + [(text, database_, broker, late, -1) for text, database_ in ends]

    _steps, _others = cache_of(steps), cache_of(others)

    @cache_of
    def spend(self, budgets: Number, which: int) -> Number:
        """The budget left then; -1 if there was none."""
        left = self._budgets.parts[budgets]
        if not left[which]:
            return -1
        return self._budgets.number(left._replace(**{Budgets._fields[which]: left[which] - 1}))

    @cache_of
    def send(self, late: Number, request: Number) -> Number:
        """The requests on their way, with one more."""
        added = [*self._late.parts[late], self._requests.parts[request]]
        return self._late.number(tuple(sorted(added, key=repr)))

    def _possible(self, move: Move) -> bool:
        if self.bounds.epochs and any(known.producer_epoch >= self.bounds.epochs for known in move.broker.transactions):
            return False
        return move.spends is None or getattr(self.bounds.budgets, move.spends) > 0

    def _numbered(self, move: Move) -> tuple:
        return (
            self._texts.number(move.text),
            self._processes.number(move.process),
            self._databases.number(move.database),
            self._broker_number(move.broker),
            -1 if move.sent is None else self._requests.number(move.sent),
            -1 if move.spends is None else Budgets._fields.index(move.spends),
            -1 if move.wrong is None else self._texts.number(move.wrong),
        )

    def _arriving(self, broker: Number, late: Number) -> Iterator[tuple]:
        waiting = self._late.parts[late]
        for index, request in enumerate(waiting):
            after = (self._rules.handle or handle)(self._brokers.parts[broker], request)[0]
            left = self._late.number(waiting[:index] + waiting[index + 1 :])
            yield self._texts.number(f"network: {told(request)} arrives late"), self._broker_number(after), left

    def _broker_number(self, broker: Broker) -> Number:
        """Without what makes no difference: a leader's question about a native batch, which is the first one of its transaction."""
        partitions = broker.partitions
        if any(asked.transaction_version > 1 for found in partitions for asked in found.verifications):
            partitions = tuple(
                found._replace(verifications=tuple(one for one in found.verifications if one.transaction_version < 2))
                for found in partitions
            )
            broker = broker._replace(partitions=partitions)
        return self._brokers.number(broker)

    @cache_of
    def _own(self, number: Number) -> list[tuple]:
        return list(self._by_itself(self._brokers.parts[number]))

    def _by_itself(self, broker: Broker) -> Iterator[tuple]:
        """The events of the broker itself, and what others do to it."""

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
            for place in known.unmarked if known.state.startswith("Prepare") else ():
                yield from after(
                    f"broker: skips the marker of {kafka_id} in partition {place[1]}, which has no leader",
                    environment.forget_marker(broker, kafka_id, place),
                    "forgotten",
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
            # The batches stay visible to the judge; readers cannot read below the beginning of the log.
            yield from after(
                f"broker: retention deletes partition {place[1]} up to {stable}",
                with_partition(broker, found._replace(log_start=stable)),
                "retention",
            )

    def _tools(self, database: Database, broker: Broker) -> Iterator[tuple[str, Broker]]:
        """The acts of an operator on the transaction of a former owner, or of any."""
        spared = None if self.bounds.tools_hit_owners else self._rules.kafka_id(database.incarnation)
        for place in PLACES:
            for entry in partition(broker, place).producers:
                owner = next(known for known in broker.transactions if known.producer_id == entry.producer_id)
                if entry.txn_start >= 0 and owner.transactional_id != spared:
                    marker = sim.WriteTxnMarkers(entry.producer_id, entry.producer_epoch, False, (place,), 0)
                    yield (
                        f"operator: an abort marker of {owner.transactional_id} in {place[1]}",
                        handle(broker, marker)[0],
                    )

    def _sessions(self, database: Database) -> Iterator[tuple[Number, Number]]:
        """The events of the database itself: a session whose owner has turned away ends, or gets what was sent to it."""
        lock, flying = database.lock, database.flying
        if flying is not None and lock is None:
            text = f"database: the decision of owner {flying.holder} with its COMMIT"
            yield self._texts.number(f"{text} is lost"), self._databases.number(database._replace(flying=None))
            if landed := arrived(database):
                yield self._texts.number(f"{text} arrives, and is done"), self._databases.number(landed)
        if lock is not None and lock.orphan:
            text = f"database: the session of owner {lock.holder} commits"
            yield self._texts.number(text), self._databases.number(committed(database))
            text = f"database: the session of owner {lock.holder} rolls back"
            yield self._texts.number(text), self._databases.number(database._replace(lock=None))
