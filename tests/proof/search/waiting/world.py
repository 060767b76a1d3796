"""All successors of a state: one statement, one request or one misfortune each.

Kafka is away or there; a request to it is answered, or lost before or after it was carried out. The order of statements is that of
the product: a block reads its row and the mode, sends or not, decides; a sender reads, makes its lane ready, sends, deletes and
decides. Which way a block goes, and whether a send may be the last one, are the product's own decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dualwrite.protocol.outbox import Way, setting_of_block
from dualwrite.protocol.process import DatabaseVerdict, Doubt, DoubtStep
from dualwrite.protocol.values import FirstLook, OutboxMode
from dualwrite.stores.sql.outbox import Floor, Seen
from search.values import NOTHING
from search.waiting import markers
from search.waiting.judge import wrong
from search.waiting.rules import PRODUCT, Rules
from search.waiting.values import (
    SENDER,
    Block,
    Budgets,
    Database,
    FloorState,
    Flying,
    Kafka,
    Lane,
    Late,
    Message,
    Owner,
    Process,
    Row,
    Sender,
    State,
    Tx,
    Written,
)


class Bounds(NamedTuple):
    """What there is.

    Attributes:
        owners: The processes; the first owns the writer already, the others claim it at any moment, in order.
        budgets: What may go wrong.
        later: Whether the writer begins with messages that wait for nothing: its mode is *later*.
        floors: Whether senders raise the floor of their reads, which the product does after thousands of rows.
    """

    owners: tuple[Owner, ...]
    budgets: Budgets = Budgets()
    later: bool = False
    floors: bool = False


Step = tuple[str, State]
_SERVER = "the only one"
_VERDICTS = {DoubtStep.COMMITTED: True, DoubtStep.ABORTED: False, DoubtStep.IN_DOUBT: None}


class World:
    """The states of one configuration, for :func:`search.explore.explore`."""

    def __init__(self, bounds: Bounds, rules: Rules = PRODUCT) -> None:
        self.bounds = bounds
        self.rules = rules
        self._owners = {owner.name: owner for owner in bounds.owners}
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def first(self) -> State:
        """The first owner has claimed, nothing waits, nothing was sent."""
        processes = tuple(
            Process(
                owner.name,
                "new" if number else "owner",
                (Lane(), Lane()),
                Sender(left=owner.sends),
                mode_known=not number,
            )
            for number, owner in enumerate(self.bounds.owners)
        )
        later = self.bounds.later or self.bounds.owners[0].outbox == "always"
        first = self.bounds.owners[0].name
        row = Row(1, first)
        return State(Database((row, row, row), later=later), Kafka(), processes, (), self.bounds.budgets)

    def following(self, state: State) -> Iterator[tuple[int, State, str | None]]:
        """Every step."""
        if state.fault is not None:
            return
        steps = list(self._steps(state))
        for text, after in steps:
            yield self._number(text), after, None
        if not steps and (at_rest := self._at_rest(state)) is not None:
            yield self._number("nothing more can happen"), state._replace(fault=at_rest), at_rest

    def wrong(self, state: State) -> str | None:
        """The fault of a state."""
        return state.fault or wrong(state)

    def text(self, number: int) -> str:
        """The words of a step."""
        return self._texts[number]

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return number

    def _at_rest(self, state: State) -> str | None:
        database = state.database
        if database.shares or database.alone:
            return f"stuck: a lock on the mode is held by {sorted(database.shares) or database.alone}"
        busy = [
            f"{process.name}{number}"
            for process in state.processes
            if process.state == "owner"
            for number, lane in enumerate(process.lanes)
            if lane.step not in {"idle", "over"}
        ]
        if busy:
            return f"stuck: {', '.join(busy)} cannot go on"
        if database.waiting and not database.later:
            return "messages wait, and the mode is direct: nobody sends them"
        return None

    # The world around

    def _steps(self, state: State) -> Iterator[Step]:
        yield from self._misfortunes(state)
        for index, process in enumerate(state.processes):
            if process.state == "owner":
                for number, lane in enumerate(process.lanes):
                    yield from _LaneSteps(self, state, index, number, lane).steps()
                yield from _SenderSteps(self, state, index, process.sender).steps()
            elif process.state != "dead":
                if not _is_flying(state):  # a claim waits for whoever has locked the row
                    yield self._claim(state, index)
                return  # they claim one after the other

    def _misfortunes(self, state: State) -> Iterator[Step]:
        kafka, budgets, first = state.kafka, state.budgets, state.processes[0]
        if kafka.up and budgets.outage:
            budgets = budgets._replace(outage=budgets.outage - 1)
            yield "Kafka goes away", state._replace(kafka=kafka._replace(up=False), budgets=budgets)
        if not kafka.up:
            yield "Kafka is back", state._replace(kafka=kafka._replace(up=True))
        if budgets.restore and state.copy is None:
            kept = state.database._replace(shares=frozenset(), alone=None)
            there = frozenset(one.name for one in state.written if one.decided)
            yield "the database is copied", state._replace(copy=(kept, there))
        elif budgets.restore:
            yield "the database is put back to its copy", self._restored(state)
        if budgets.death and first.state == "owner" and not _is_flying(state):
            yield f"{first.name} dies", self._dead(state, 0)

    def _dead(self, state: State, index: int) -> State:
        name = state.processes[index].name
        return state._replace(
            processes=_at(state.processes, index, state.processes[index]._replace(state="dead")),
            database=_released_all(state.database, name),
            budgets=state.budgets._replace(death=state.budgets.death - 1),
        )

    def _restored(self, state: State) -> State:
        assert state.copy is not None
        database, there = state.copy
        written = tuple(one._replace(gone=one.gone or one.name not in there) for one in state.written)
        processes = tuple(
            process._replace(
                state="dead",
                lanes=tuple(lane._replace(late=None) for lane in process.lanes),
                sender=process.sender._replace(flying=None),
            )
            if process.state == "owner"
            else process
            for process in state.processes
        )
        budgets = state.budgets._replace(restore=0)
        return state._replace(
            database=database, written=written, processes=processes, budgets=budgets, copy=None, restored=True
        )

    def _claim(self, state: State, index: int) -> Step:
        process, database = state.processes[index], state.database
        owner, name, rules = self._owners[process.name], process.name, self.rules
        if owner.outbox == "never" and rules.never_looks_first and process.state == "new":
            read = process._replace(state="has read the mode", mode_known=not database.later)
            return f"{name} reads the mode, before it claims", state._replace(
                processes=_at(state.processes, index, read)
            )
        known = owner.outbox == "fallback"  # its blocks read the mode
        if owner.outbox == "never":
            known = process.mode_known if rules.never_looks_first else not rules.never_looks
        rows = tuple(row._replace(incarnation=row.incarnation + 1, owner=name) for row in database.rows)
        claimed = Process(
            name,
            "owner",
            tuple(Lane(incarnation=row.incarnation, readiness="claimed") for row in rows[:SENDER]),
            Sender(left=owner.sends, incarnation=rows[SENDER].incarnation, readiness="claimed"),
            mode_known=known,
        )
        return f"{name} claims", state._replace(
            database=database._replace(rows=rows), processes=_at(state.processes, index, claimed)
        )


class _Steps:
    """What the steps of lanes and of the sender share."""

    def __init__(self, world: World, state: State, index: int, number: int) -> None:
        self.world, self.rules, self.state = world, world.rules, state
        self.index, self.number = index, number
        self.process = state.processes[index]
        self.owner = world._owners[self.process.name]
        self.database, self.kafka = state.database, state.kafka
        self.row = state.database.rows[number]
        self.actor = (self.process.name, number)
        self.name = f"{self.process.name}{number}" if number != SENDER else f"{self.process.name}'s sender"

    def after(
        self,
        mine: Lane | Sender,
        *,
        database: Database | None = None,
        kafka: Kafka | None = None,
        written: tuple[Written, ...] | None = None,
        budgets: Budgets | None = None,
    ) -> State:
        if self.number == SENDER:
            process = self.process._replace(sender=mine)
        else:
            process = self.process._replace(lanes=_at(self.process.lanes, self.number, mine))
        return self.state._replace(
            database=self.database if database is None else database,
            kafka=self.kafka if kafka is None else kafka,
            processes=_at(self.state.processes, self.index, process),
            written=self.state.written if written is None else written,
            budgets=self.state.budgets if budgets is None else budgets,
        )

    def released(self, database: Database | None = None) -> Database:
        database = self.database if database is None else database
        return database._replace(
            shares=database.shares - {self.actor}, alone=None if database.alone == self.actor else database.alone
        )

    def with_row(self, row: Row, database: Database | None = None) -> Database:
        database = self.database if database is None else database
        return database._replace(rows=_at(database.rows, self.number, row))

    def free_to_share(self) -> bool:
        """Whoever turns the mode leaves shares to others; they read it as it was before. The sender does not."""
        alone = self.database.alone
        return alone in {None, self.actor} or alone[1] != SENDER

    def free_to_turn(self) -> bool:
        return self.database.alone in {None, self.actor}

    def free_alone(self) -> bool:
        return self.free_to_turn() and not self.database.shares - {self.actor}

    def is_locked(self) -> bool:
        """Whether a COMMIT without an answer has this row."""
        if self.number == SENDER:
            return any(process.sender.flying is not None for process in self.state.processes)
        return any(process.lanes[self.number].late is not None for process in self.state.processes)

    def outcome(self, transaction: Tx) -> bool | None:
        return markers.outcome(self.kafka, transaction)

    def ends(self, transaction: Tx, *, committed: bool, budgets: Budgets | None = None) -> Iterator[markers.End]:
        return markers.ends(self.kafka, budgets or self.state.budgets, transaction, committed=committed)

    def knows_end(self, mine: Lane | Sender) -> bool:
        """Whether the lane's producer may go on. If not, waiting for the marker is in vain: the producer is discarded."""
        return markers.is_end_known(self.kafka, self.number, mine.incarnation, self.rules)

    def sent(self, messages: tuple[Message, ...], transaction: Tx) -> Kafka:
        log = list(self.kafka.log)
        for message in messages:
            log[message[2]] = (*log[message[2]], (message, transaction))
        return self.kafka._replace(log=tuple(log), known=self.kafka.known | {transaction[:2]})

    def left_open(self, incarnation: int | None = None) -> list[Tx]:
        """Transactions of this id that nobody has ended, in order."""
        found = {
            transaction
            for partition in self.kafka.log
            for _, transaction in partition
            if transaction[0] == self.number and (incarnation is None or transaction[1] == incarnation)
        }
        return sorted(one for one in found if self.outcome(one) is None)

    def readying(self, mine: Lane | Sender) -> Iterator[Step]:
        """Claim the id anew, and settle what was left of it."""
        row = self.row
        if mine.readiness == "discarded":
            if self.is_locked():
                return
            guarded = self.number != SENDER or self.rules.guards_the_sender
            if guarded and self.database.rows[0].owner != self.process.name:
                return  # it finds out, and does nothing any more
            raised = row._replace(incarnation=row.incarnation + 1, owner=self.process.name)
            after = mine._replace(incarnation=raised.incarnation, readiness="claimed")
            yield f"{self.name} claims its id anew", self.after(after, database=self.with_row(raised))
        elif mine.readiness == "claimed" and self.kafka.up and row.incarnation == mine.incarnation:
            if self.rules.checks_ids_before_sending and (self.number, mine.incarnation) in self.kafka.known:
                return  # DatabaseWentBack: a person must look
            committed = [what for what, how in self.kafka.ended if how and what[0] == self.number]
            newest = max(committed, default=None)
            if self.rules.finds_lost_decisions and newest is not None and (row.state is None or newest > row.state):
                return
            for words, kafka, budgets in self._settlings():
                ready = mine._replace(readiness="ready")
                yield f"{self.name} settles{words}", self.after(ready, kafka=kafka, budgets=budgets)
        elif mine.readiness == "ready" and not self.knows_end(mine):
            yield f"{self.name} misses a marker", self.after(mine._replace(readiness="discarded"))

    def _settlings(self) -> list[markers.End]:
        """End what was left open, and then repair what lacks its marker, as settling does one after the other."""
        found: list[markers.End] = [("", self.kafka, self.state.budgets)]
        if not (self.rules.settles_the_sender if self.number == SENDER else self.rules.ends_what_is_open):
            return found
        named = self.row.state
        for transaction in self.left_open():
            committed = transaction == named or not self.rules.ends_only_what_is_not_named
            found = [
                (words + more, after, left)
                for words, kafka, budgets in found
                for more, after, left in markers.ends(kafka, budgets, transaction, committed=committed)
            ]
        return [(words, markers.settled(kafka, named, self.rules), budgets) for words, kafka, budgets in found]


class _LaneSteps(_Steps):
    """The steps of one lane."""

    def __init__(self, world: World, state: State, index: int, number: int, lane: Lane) -> None:
        super().__init__(world, state, index, number)
        self.lane = lane
        script = self.owner.blocks[number]
        self.block: Block | None = script[lane.block] if lane.block < len(script) else None

    def steps(self) -> Iterator[Step]:
        lane = self.lane
        if lane.late is not None:
            yield from self._land(lane.late)
        if lane.step == "over":
            return
        if lane.step == "idle":
            yield from self.readying(lane)
            if self.block is not None and lane.readiness != "discarded":
                yield from self._begin(self.block)
            return
        yield from getattr(self, f"_{lane.step}")(self.block)

    # Beginning

    def _begin(self, block: Block) -> Iterator[Step]:
        lane, name = self.lane, block.name
        if self.row.incarnation != lane.incarnation:
            yield f"{self.name} is fenced", self.after(Lane("over"))
            return
        if not self.process.mode_known:
            yield from self._look_at_the_mode()
            return
        way = self._way(block, shared=False)
        if way is Way.REFUSE:
            yield f"{self.name}: {name} is refused, as messages wait", self.after(self._next())
        elif way is Way.WAIT:
            yield from self._begun(block, "put", "its messages will wait")
        elif way is Way.SHARE:
            yield from self._begun(block, "share", "later?")
        elif way is Way.DIRECT and self._can_send():
            yield from self._begun(block, "direct", "directly")
        elif way is Way.TURN and (self._setting(block) == "always" or not self.kafka.up):
            yield from self._begun(block, "anew", "its messages will wait")
        # Else it makes its lane ready first.

    def _can_send(self) -> bool:
        return self.lane.readiness == "ready" and self.knows_end(self.lane)

    def _setting(self, block: Block) -> str:
        return setting_of_block(self.owner.outbox, block.outbox)

    def _way(self, block: Block, *, shared: bool) -> Way:
        """The product's choice. A writer of *never* looks at the mode before its first block, and at none in its blocks."""
        rules, later = self.rules, self.database.later
        if not shared and (self.owner.outbox == "never" or not rules.heeds_the_mode):
            later = False
        return rules.way_of(
            self._setting(block),
            OutboxMode.LATER if later or (shared and not rules.looks_again) else OutboxMode.DIRECT,
            can_send=self._can_send(),
            shared=shared,
            always=self.owner.outbox == "always" and not rules.always_takes_shares,
        )

    def _look_at_the_mode(self) -> Iterator[Step]:
        """Before an owner's first block: one of ``never`` waits until nothing waits, one of ``always`` turns the mode."""
        seen = _at(self.state.processes, self.index, self.process._replace(mode_known=True))
        if self.owner.outbox == "never" and not self.database.later:
            yield f"{self.process.name} sees that nothing waits", self.state._replace(processes=seen)
        if self.owner.outbox == "always" and self.free_alone():
            yield (
                f"{self.process.name} turns the mode to later",
                self.state._replace(processes=seen, database=self.database._replace(later=True)),
            )

    def _begun(self, block: Block, step: str, how: str) -> Iterator[Step]:
        after = frozenset(one.name for one in self.state.written if one.decided and not one.gone)
        every = tuple(range(len(block.partitions)))
        for kept in (every, every[:-1]) if block.savepoint else (every,):
            words = "" if kept == every else ", whose savepoint is rolled back"
            written = (*self.state.written, Written(block.name, False, after, _messages(block, kept)))
            lane = self.lane._replace(step=step, kept=kept, turns=False, counted=self.row.count)
            yield (
                f"{self.name} begins {block.name}{words}: {how}",
                self.after(lane, written=written),
            )

    def _next(self, readiness: str | None = None) -> Lane:
        lane = self.lane
        return Lane("idle", lane.block + 1, lane.incarnation, readiness or lane.readiness, late=lane.late)

    def _aborted(self, why: str, readiness: str | None = None, kafka: Kafka | None = None) -> Step:
        return f"{self.name}: {why}", self.after(self._next(readiness), database=self.released(), kafka=kafka)

    # The mode

    def _share(self, block: Block, *, again: bool = False) -> Iterator[Step]:
        """Take a share of the lock; what it reads is the newest. ``again``: the block turns the mode unless it is *later*."""
        if not self.free_to_share():
            return
        lane, kafka_first = self.lane, self._setting(block) == "fallback" and self.kafka.up
        way = self._way(block, shared=True)
        if again and way is Way.DIRECT:
            way = Way.TURN
        database = self.database._replace(shares=self.database.shares | {self.actor})
        if way is Way.WAIT:
            if not self.rules.share_to_the_end:
                database = self.database
            yield (
                f"{self.name} has a share of the mode: later",
                self.after(lane._replace(step="put"), database=database),
            )
        elif way is Way.TURN and kafka_first and not again:
            yield from self.readying(lane)  # settles first, and then looks again
            yield self._aborted(f"cannot settle: {block.name} aborts")
        else:
            step = "direct" if way is Way.DIRECT else "alone"
            yield (
                f"{self.name} has a share of the mode: direct by now",
                self.after(lane._replace(step=step), database=database),
            )

    def _share_again(self, block: Block) -> Iterator[Step]:
        yield from self._share(block, again=True)

    def _anew(self, _: Block) -> Iterator[Step]:
        step = "share_again" if self.database.later else "alone"
        yield (
            f"{self.name} reads the mode anew: {'later' if self.database.later else 'direct'}",
            self.after(self.lane._replace(step=step)),
        )

    def _alone(self, block: Block) -> Iterator[Step]:
        turning = self.lane._replace(step="put", turns=True)
        if not self.rules.locks_to_turn:
            yield f"{self.name} turns the mode without a lock", self.after(turning)
        elif self.free_to_turn():
            database = self.database._replace(alone=self.actor)
            yield f"{self.name} locks the mode to turn it", self.after(turning, database=database)
        if not self.free_alone():
            # MariaDB has one lock for both: there it is also the end of a deadlock of two that share the lock.
            yield self._aborted(f"does not get the mode in time: {block.name} aborts")

    # Directly

    def _direct(self, block: Block) -> Iterator[Step]:
        lane, kept = self.lane, self.lane.kept
        never = (block.outbox or self.owner.outbox) == "never"
        silent = "idle" if never else "anew"
        if not self.kafka.up:
            yield self._silence(block, silent, "Kafka does not answer", None)
            return
        open_ones = self.left_open(lane.incarnation)
        transaction = open_ones[0] if open_ones else (self.number, lane.incarnation, lane.block)
        if self.outcome(transaction) is not None:
            yield self._aborted(f"{block.name}'s transaction has ended: it aborts", "discarded")
            return
        messages = _messages(block, kept)
        everything = self.sent(messages, transaction)
        sent = lane._replace(step="sent", transaction=transaction)
        yield f"{self.name} sends {block.name}", self.after(sent, kafka=everything)
        yield self._silence(block, silent, f"sends {block.name}, no answer", everything)
        if len(messages) > 1:
            yield self._silence(
                block, silent, f"sends a part of {block.name}, no answer", self.sent(messages[:1], transaction)
            )

    def _silence(self, block: Block, silent: str, why: str, kafka: Kafka | None) -> Step:
        if silent == "idle":
            return self._aborted(f"{why}: {block.name} aborts", "discarded", kafka)
        readiness = "discarded" if self.rules.ends_what_is_open or kafka is None else "ready"
        lane = self.lane._replace(step=silent, readiness=readiness)
        return f"{self.name}: {why}: its messages will wait", self.after(lane, kafka=kafka)

    def _sent(self, block: Block) -> Iterator[Step]:
        lane, budgets = self.lane, self.state.budgets
        assert lane.transaction is not None
        if self.is_locked():
            return
        if self.row.incarnation == lane.incarnation:
            database = self.with_row(self.row._replace(state=lane.transaction), self.released())
            yield (
                f"{self.name} decides {block.name}",
                self.after(lane._replace(step="ending"), database=database, written=self._decided(block)),
            )
        else:
            yield self._aborted(f"is fenced: {block.name} aborts", "discarded")
        if budgets.abort:
            less = budgets._replace(abort=budgets.abort - 1)
            if self.kafka.up:
                for words, ended, left in self.ends(lane.transaction, committed=False, budgets=less):
                    yield (
                        f"{self.name}: {block.name} fails, and aborts{words}",
                        self.after(self._next(), database=self.released(), kafka=ended, budgets=left),
                    )
            yield (
                f"{self.name}: {block.name} fails; Kafka is not told",
                self.after(self._next("discarded"), database=self.released(), budgets=less),
            )

    def _decided(self, block: Block) -> tuple[Written, ...]:
        return tuple(one._replace(decided=True) if one.name == block.name else one for one in self.state.written)

    def _ending(self, block: Block) -> Iterator[Step]:
        lane = self.lane
        assert lane.transaction is not None
        if self.kafka.up and self.outcome(lane.transaction) is not False:
            for words, ended, budgets in self.ends(lane.transaction, committed=True):
                yield (
                    f"{self.name} commits {block.name} in Kafka{words}",
                    self.after(self._next(), kafka=ended, budgets=budgets),
                )
        yield f"{self.name}: no answer to the commit of {block.name} in Kafka", self.after(self._next("discarded"))

    # As rows

    def _put(self, block: Block) -> Iterator[Step]:
        kept = self.lane.kept if self.rules.rows_follow_savepoints else tuple(range(len(block.partitions)))
        first = self.database.next_number
        numbers = tuple(range(first, first + len(kept)))
        database = self.database._replace(next_number=first + len(kept))
        lane = self.lane._replace(step="rows", kept=kept, numbers=numbers)
        yield (
            f"{self.name} inserts the rows of {block.name}: {', '.join(map(str, numbers))}",
            self.after(lane, database=database),
        )

    def _rows(self, block: Block) -> Iterator[Step]:
        lane, rules, budgets = self.lane, self.rules, self.state.budgets
        if self.is_locked():
            return
        ours = self.row.incarnation == lane.incarnation
        if not ours and rules.fences_rows:
            yield self._aborted(f"is fenced: {block.name} aborts", "discarded")
            return
        readiness = lane.readiness
        rows = tuple(zip(lane.numbers, _messages(block, lane.kept), strict=True))
        row = self.row._replace(count=FirstLook(lane.incarnation, OutboxMode.LATER, lane.counted).next_decision)
        if not rules.leaves_state:
            row = row._replace(state=None)
        database = self.with_row(row, self.released())
        database = database._replace(
            waiting=tuple(sorted((*database.waiting, *rows))), later=database.later or lane.turns
        )
        committed = self._decided(block)
        done = self.after(self._next(readiness), database=database, written=committed)
        yield f"{self.name} decides {block.name}: it waits", done
        if budgets.abort:
            less = budgets._replace(abort=budgets.abort - 1)
            yield (
                f"{self.name}: {block.name} fails, and rolls back",
                self.after(self._next(readiness), database=self.released(), budgets=less),
            )
        if budgets.answer:
            less = budgets._replace(answer=budgets.answer - 1)
            doubt = lane._replace(step="doubt", transaction=None, numbers=(row.count,))
            yield (
                f"{self.name}: no answer to the COMMIT of {block.name}, which is done",
                self.after(doubt._replace(truth=True), database=database, written=committed, budgets=less),
            )
            yield (
                f"{self.name}: no answer to the COMMIT of {block.name}, which is rolled back",
                self.after(doubt._replace(truth=False), database=self.released(), budgets=less),
            )
            yield self._out_of_reach(block, Late(block.name, rows, row.count, lane.turns), less)

    def _out_of_reach(self, block: Block, late: Late, budgets: Budgets) -> Step:
        """No answer to the COMMIT, and nobody to ask: the block is in doubt, and ends for its caller."""
        keeps = self.lane.readiness == "claimed" and not self.rules.claims_after_a_doubt
        lane = self._next(None if keeps else "discarded")._replace(late=late)
        return (
            f"{self.name}: no answer to the COMMIT of {block.name}, and the database is out of reach",
            self.after(lane, budgets=budgets),
        )

    def _land(self, late: Late) -> Iterator[Step]:
        """The COMMIT without an answer ends. Nobody has changed the row meanwhile."""
        lane = self.lane._replace(late=None)
        database = self.with_row(self.row._replace(count=late.count), self.released())
        database = database._replace(
            waiting=tuple(sorted((*database.waiting, *late.rows))), later=database.later or late.turns
        )
        written = tuple(one._replace(decided=True) if one.name == late.block else one for one in self.state.written)
        yield f"{self.name}: the COMMIT of {late.block} is done", self.after(lane, database=database, written=written)
        yield f"{self.name}: the COMMIT of {late.block} is rolled back", self.after(lane, database=self.released())

    def _doubt(self, block: Block) -> Iterator[Step]:
        """On a fresh connection, under the row's lock."""
        lane = self.lane
        known = Doubt(NOTHING, NOTHING, DatabaseVerdict.UNKNOWN, waits=lane.numbers[0], counted=self.row.count)
        verdict = _VERDICTS[self.rules.next_doubt_step(known)]
        words = {True: "committed", False: "rolled back", None: "it cannot be known"}[verdict]
        after = self.after(self._next("discarded"))
        if verdict is not None and verdict is not lane.truth:
            after = after._replace(fault=f"{block.name} is told as {words}, and is not")
        yield f"{self.name} asks what became of {block.name}: {words}", after


class _SenderSteps(_Steps):
    """The steps of the sender of a process."""

    def __init__(self, world: World, state: State, index: int, sender: Sender) -> None:
        super().__init__(world, state, index, SENDER)
        self.sender = sender

    def steps(self) -> Iterator[Step]:
        step = self.sender.step
        if self.sender.flying is not None:
            yield from self._land(self.sender.flying)
        if step == "idle":
            yield from self._idle()
        else:
            yield from getattr(self, f"_{step}")()

    def _idle(self) -> Iterator[Step]:
        sender, rules, database = self.sender, self.rules, self.database
        if not sender.left:
            return
        yield from self.readying(sender)
        if not self.kafka.up or not (database.later or database.waiting):
            return
        waiting = self._visible()
        if waiting:
            # By a transaction of its own, whether or not its lane is ready.
            for count in sorted({1, len(waiting)}):
                took = waiting[:count]
                read = sender._replace(step="took", took=took, last=False, floor=self._read_at_floor(took))
                yield f"{self.name} reads {_names(took)}", self.after(read)
        turns_back = self.owner.outbox != "always" or not rules.keeps_always
        caught_up = rules.sends(turns_back=turns_back, caught_up=True)
        ready = sender.readiness == "ready" and self.knows_end(sender)
        if caught_up.next().last and ready and not self._fenced():
            if rules.locks_the_last:
                looked = sender._replace(step="lock", last=True, took=() if rules.reads_under_the_lock else waiting)
                yield f"{self.name} wants the mode alone, to end later", self.after(looked)
            else:
                yield (
                    f"{self.name} reads all without a lock, to end later: {_names(waiting)}",
                    self.after(sender._replace(step="read", took=waiting, last=True)),
                )

    def _read_at_floor(self, took: tuple[tuple[int, Message], ...]) -> FloorState:
        """The floor after a read, which began at it."""
        if not self.world.bounds.floors:
            return self.sender.floor
        reads = self.sender.floor.reads + 1
        floor = _floor_of(self.sender.floor)
        floor.read(reads, [number for number, _ in took])
        return _kept_of(floor, reads)

    def _look_at_lanes(self) -> Iterator[Step]:
        """After a read, in another transaction, a sender may look whether lower numbers can come yet."""
        kept, took = self.sender.floor, self.sender.took
        if not self.world.bounds.floors or not took or kept.proved_in is not None:
            return
        locked = {
            f"row {number}"
            for process in self.state.processes
            for number, lane in enumerate(process.lanes)
            if lane.step == "rows" or lane.late is not None
        }
        locked |= {"row 2"} if self.is_locked() else set()
        locked |= {"mode"} if self.database.alone is not None else set()
        counts: dict[str, object] = {f"row {number}": row.count for number, row in enumerate(self.database.rows)}
        counts["mode"] = None
        floor = _floor_of(kept)
        free = counts.keys() - locked if self.rules.proves_the_floor else counts.keys()
        floor.look(kept.reads, took[-1][0], Seen(_SERVER, counts, free))
        looked = self.sender._replace(floor=_kept_of(floor, kept.reads))
        if looked != self.sender:
            yield f"{self.name} looks who may hold lower numbers", self.after(looked)

    def _took(self) -> Iterator[Step]:
        """Make the lane ready, and begin."""
        yield from self._look_at_lanes()
        sender = self.sender
        if sender.readiness != "ready" or not self.knows_end(sender):
            yield from self.readying(sender)
        elif self._fenced():
            yield self._given_up("is fenced", None, "discarded")
        else:
            yield f"{self.name} begins", self.after(sender._replace(step="read"))

    def _visible(self) -> tuple[tuple[int, Message], ...]:
        return tuple(row for row in self.database.waiting if row[0] > self.sender.floor.number)

    def _fenced(self) -> bool:
        return self.row.incarnation != self.sender.incarnation and self.rules.fences_sender

    def _lock(self) -> Iterator[Step]:
        if self.free_alone():
            took = self._visible() if self.rules.reads_under_the_lock else self.sender.took
            if not self.rules.last_reads_all:
                took = took[:1]
            yield (
                f"{self.name} has the mode alone and reads {_names(took)}",
                self.after(
                    self.sender._replace(step="read", took=took, floor=self._read_at_floor(took)),
                    database=self.database._replace(alone=self.actor),
                ),
            )
        else:
            yield self._given_up("does not get the mode alone in time", None)

    def _given_up(self, why: str, kafka: Kafka | None, readiness: str | None = None) -> Step:
        sender = self.sender
        after = Sender("idle", sender.left - 1, sender.incarnation, readiness or sender.readiness, floor=sender.floor)
        assert sender.flying is None  # it holds the locks that are given back here
        return f"{self.name} {why}", self.after(after, database=self.released(), kafka=kafka)

    def _read(self) -> Iterator[Step]:
        sender = self.sender
        if not sender.took:
            yield f"{self.name} has nothing to send", self.after(sender._replace(step="sent", transaction=None))
            return
        if not self.kafka.up:
            yield self._given_up("gives up: Kafka does not answer", None)
            return
        transaction = (SENDER, sender.incarnation, self.owner.sends - sender.left)
        messages = tuple(message for _, message in sender.took)
        if self._is_fenced_in_kafka(transaction):
            yield self._given_up("is fenced in Kafka", None, "discarded")
            return
        everything = self.sent(messages, transaction)
        yield (
            f"{self.name} sends {_names(sender.took)}",
            self.after(sender._replace(step="sent", transaction=transaction), kafka=everything),
        )
        yield self._given_up("sends, and has no answer", everything, "discarded")
        if len(messages) > 1:
            yield self._given_up("sends a part, and has no answer", self.sent(messages[:1], transaction), "discarded")

    def _is_fenced_in_kafka(self, transaction: Tx) -> bool:
        """Whether a settler has retired this incarnation's id."""
        return any(
            process.sender.incarnation > transaction[1] and process.sender.readiness == "ready"
            for process in self.state.processes
            if process.state != "new"
        )

    def _sent(self) -> Iterator[Step]:
        sender, rules, database = self.sender, self.rules, self.database
        there = all(row in database.waiting for row in sender.took)
        fenced = self._fenced() and (bool(sender.took) or rules.fences_the_empty_last)
        if fenced or (rules.counts_deleted and not there):
            yield self._given_up("is fenced" if fenced else "finds fewer rows to delete, and aborts", None, "discarded")
            return
        decision = Flying(sender.took, sender.transaction, sender.last)
        after = self._decided(decision)
        floor = sender.floor
        if rules.floor_is_what_was_sent and sender.took:
            floor = floor._replace(number=max(number for number, _ in sender.took))
        if sender.transaction is None:
            done = Sender("idle", sender.left - 1, sender.incarnation, sender.readiness, floor=floor)
        else:
            done = sender._replace(step="ending", took=(), last=False, floor=floor)
        words = f"decides on {_names(sender.took)}" + (", and the mode is direct" if sender.last else "")
        yield f"{self.name} {words}", self.after(done, database=after)
        if self.state.budgets.answer:
            budgets = self.state.budgets._replace(answer=self.state.budgets.answer - 1)
            flying = Sender(
                "idle", sender.left - 1, sender.incarnation, "discarded", floor=sender.floor, flying=decision
            )
            yield f"{self.name} {words}, and has no answer", self.after(flying, budgets=budgets)
        if self.state.budgets.abort:
            budgets = self.state.budgets._replace(abort=self.state.budgets.abort - 1)
            text, given_up = self._given_up("fails", None, "discarded" if sender.transaction else None)
            yield text, given_up._replace(budgets=budgets)

    def _decided(self, decision: Flying) -> Database:
        row = self.row if decision.transaction is None else self.row._replace(state=decision.transaction)
        after = self.with_row(row, self.released())
        return after._replace(
            waiting=tuple(one for one in after.waiting if one not in decision.took),
            later=after.later and not decision.last,
        )

    def _land(self, decision: Flying) -> Iterator[Step]:
        """The COMMIT without an answer ends. Nobody has claimed the row meanwhile, nor taken the rows that are deleted."""
        landed = self.sender._replace(flying=None)
        yield f"{self.name}: the COMMIT without an answer is done", self.after(landed, database=self._decided(decision))
        yield f"{self.name}: the COMMIT without an answer is rolled back", self.after(landed, database=self.released())

    def _ending(self) -> Iterator[Step]:
        sender = self.sender
        assert sender.transaction is not None
        less = sender._replace(step="idle", left=sender.left - 1, transaction=None)
        if self.kafka.up and self.outcome(sender.transaction) is not False:
            for words, ended, budgets in self.ends(sender.transaction, committed=True):
                yield f"{self.name} commits in Kafka{words}", self.after(less, kafka=ended, budgets=budgets)
        yield f"{self.name}: no answer to its commit in Kafka", self.after(less._replace(readiness="discarded"))


def _floor_of(kept: FloorState) -> Floor:
    return Floor(
        number=kept.number,
        server=_SERVER,
        candidate=kept.candidate,
        unseen=dict(kept.unseen),
        proved_in=kept.proved_in,
    )


def _kept_of(floor: Floor, reads: int) -> FloorState:
    assert floor.proved_in is None or isinstance(floor.proved_in, int)
    return FloorState(floor.number, floor.candidate, tuple(sorted(floor.unseen.items())), floor.proved_in, reads)


def _is_flying(state: State) -> bool:
    return any(
        process.sender.flying is not None or any(lane.late is not None for lane in process.lanes)
        for process in state.processes
    )


def _names(took: tuple[tuple[int, Message], ...]) -> str:
    return ", ".join(f"{name}.{number}" for _, (name, number, _) in took) or "nothing"


def _messages(block: Block, kept: tuple[int, ...]) -> tuple[Message, ...]:
    return tuple((block.name, number, block.partitions[number]) for number in kept)


def _released_all(database: Database, name: str) -> Database:
    alone = database.alone
    return database._replace(
        shares=frozenset(one for one in database.shares if one[0] != name),
        alone=None if alone is not None and alone[0] == name else alone,
    )


def _at(items, index, item):  # type: ignore[no-untyped-def]
    return (*items[:index], item, *items[index + 1 :])
