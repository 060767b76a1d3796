"""The parts of every step of a process: where it leads, its request to the broker, and the answer to its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from simulator import requests as sim
from simulator.broker import handle
from simulator.requests import ErrorCode
from simulator.state import Broker

from dualwrite.protocol import settle, settle_native
from dualwrite.protocol.lives import PRODUCER_LIFE, WRITE_LIFE, ProducerEvent, ProducerState, WriteEvent, WriteState
from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.settle import Knowledge, SettleStep
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep
from dualwrite.protocol.values import LogProof, Outcome, Partition
from search.values import DONE, NOTHING, Database, Decision, Process, name
from search.views import prove

if TYPE_CHECKING:
    from search.process import Walk

OK = ErrorCode.NONE
LATER = frozenset({ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS})


class Move(NamedTuple):
    """One possible step and where it leads. ``sent`` is a request that stays in the network; ``wrong`` a fault at once."""

    text: str
    process: Process
    database: Database
    broker: Broker
    sent: sim.Request | None = None
    spends: str | None = None
    wrong: str | None = None


class Step:
    """The next step of one process from one state: each way that it can go is one of ``moves``."""

    def __init__(self, walk: Walk, process: Process, database: Database, broker: Broker) -> None:
        self.walk, self.rules = walk, walk.rules
        self.p, self.db, self.broker = process, database, broker
        self.moves: list[Move] = []

    # --- words

    @property
    def who(self) -> str:
        if self.p.incarnation:
            return f"owner {self.p.incarnation}"
        return "a new process"

    def go(
        self, text: str, p: Process | None = None, db: Database | None = None, broker: Broker | None = None, **more: Any
    ):
        following = self.advanced(p or self.p)
        self.moves.append(Move(f"{self.who}: {text}", following, db or self.db, broker or self.broker, **more))

    def advanced(self, p: Process) -> Process:
        """Past what is no request and no statement: an incarnation that is finished, and a wait."""
        while p.doing == "settle":
            step = self.settle_step(p.knowledge)
            if step is SettleStep.FINISH:
                p = self.settle_item(p, p.item + 1)
            elif step is NativeStep.FINISH:
                p = self.settle_item(p, p.row[2] + 1)
            elif step is NativeStep.WAIT:
                return p._replace(knowledge=settle_native.acted(p.knowledge))
            elif step is SettleStep.WAIT:
                known = p.knowledge
                ended = known.ended or known.evidence is False
                return p._replace(knowledge=Knowledge(known.prepared, known.recorded, ended=ended), seen=None)
            else:
                break
        return p

    def settle_step(self, known: Knowledge | NativeKnowledge) -> SettleStep | NativeStep:
        """The product's decision, by the engine that made the transaction."""
        return self.rules.next_native_step(known) if isinstance(known, NativeKnowledge) else self.rules.next_step(known)

    def ask(self, request: sim.Request):
        return (self.rules.handle or handle)(self.broker, request)

    def life(self, *events: ProducerEvent, state: ProducerState | None = None) -> ProducerState:
        state = state or self.p.producer
        for event in events:
            state = PRODUCER_LIFE[state][event]
        return state

    def writes(self, *events: WriteEvent) -> WriteState:
        state = self.p.write
        for event in events:
            state = WRITE_LIFE[state][event]
        return state

    # --- what comes next

    def begin_settling(self, p: Process) -> Process:
        prepared, completed, settled = p.row
        if not self.rules.settles_former:
            return self.settled(p)
        apart = self.settled_apart(p)
        if apart:
            return self.settle_native_item(p._replace(apart=apart))
        return self.settle_item(p._replace(row=(prepared, completed, settled)), settled + 1)

    @staticmethod
    def settled_apart(p: Process) -> int:
        """As ``unsettled_native``: the incarnation with a decided native transaction, which is settled first; 0 if there is none."""
        prepared, _, settled = p.row
        return prepared.incarnation if prepared.is_native and settled < prepared.incarnation < p.incarnation else 0

    def settle_native_item(self, p: Process) -> Process:
        prepared, completed, settled = p.row
        undecided_in = dict(p.undecided).get(p.apart, frozenset())
        knowledge = settle_native.initial_native(prepared, completed, undecided_in)
        return p._replace(doing="settle", item=p.apart, knowledge=knowledge, row=(NOTHING, None, settled))

    def settle_item(self, p: Process, item: int) -> Process:
        prepared, completed, settled = p.row
        item += item == p.apart
        if item >= p.incarnation:
            mark = settled < p.incarnation - 1
            return p._replace(doing="mark", item=0, knowledge=None, seen=None) if mark else self.settled(p)
        undecided_in = dict(p.undecided).get(item, frozenset())
        knowledge = self.rules.initial_knowledge(prepared, completed, item, undecided_in, forgets=self.walk.forgets)
        if (prepared.incarnation or 0) <= item:  # what it says is known, or of no use any more
            p = p._replace(row=(NOTHING, None, settled))
        return p._replace(doing="settle", item=item, knowledge=knowledge, seen=None)

    def settled(self, p: Process) -> Process:
        p = p._replace(item=0, knowledge=None, seen=None, row=None, write=None, ours=None, undecided=(), apart=0)
        return p._replace(doing="init") if p.todo else DONE

    def reusable(self, p: Process) -> Process:
        """The step after a transaction, or a failure: ``Lane.ready``."""
        if p.producer is not ProducerState.READY or p.fenced:
            return again(p, p.todo, undecided=undecided_of(p))
        if p.ended is not None:
            return p._replace(doing="know_end", write=None, ours=None, firsts=(-1, -1), unanswered=frozenset())
        if not p.todo:
            owner = p.owner if p.engine is Engine.NATIVE else 0  # who may have to claim again
            return Process("close", owner=owner, incarnation=p.incarnation, known=p.known, engine=p.engine)
        nothing = frozenset()
        return p._replace(doing="begin", write=None, ours=None, firsts=(-1, -1), sent=nothing, unanswered=nothing)

    # --- what callers are told, held against the database at that moment: it does not change any more

    def told_aborted(self) -> str | None:
        label, db = self.p.label, self.db
        if db.has(label):
            return f"the caller is told that {name(label)} is aborted, and the database has it"
        if db.lock is not None and db.lock.orphan and db.lock.label == label:
            return f"the caller is told that {name(label)} is aborted, and a session may still commit it"
        if db.flying is not None and db.flying.label == label and db.flying.holder == db.incarnation:
            return (
                f"the caller is told that {name(label)} is aborted, and its decision may still arrive with its COMMIT"
            )
        return None

    def told_complete(self, broker: Broker) -> str | None:
        if prove(broker, self.p.ours) is LogProof.ABORTED:
            return f"the caller is told that {name(self.p.label)} is complete, and Kafka has aborted it"
        return None

    def told_lost(self) -> str | None:
        if self.db.label_of(self.p.ours) is None:
            return f"the caller is told of a loss of {self.p.ours}, and the database does not have it"
        return None


def again(p: Process, todo: int, **more: Any) -> Process:
    """An owner that has thrown its producer away: it claims again."""
    return Process("claim", todo, p.owner, p.incarnation, known=p.known, engine=p.engine, **more)


def undecided_of(p: Process) -> tuple[tuple[int, frozenset[Partition]], ...]:
    """``TransactionalProducer.undecided_in``: the partitions in which it leaves an undecided transaction, by incarnation."""
    left = settle.left_undecided(p.ended, None, is_prepared=p.ours is not None, sent_to=p.sent)
    return (*p.undecided, (p.incarnation, left)) if left else p.undecided


def committed(db: Database) -> Database:
    """The session that holds the lock commits."""
    return db._replace(
        prepared=db.lock.prepared,
        completed=None,
        fence=None,
        decided=(*db.decided, Decision(db.lock.label, db.lock.prepared)),
        lock=None,
    )


def arrived(db: Database) -> Database | None:
    """A decision arrives with its COMMIT; None if it changes nothing, as the row has another incarnation."""
    flying = db.flying
    if flying is None or flying.holder != db.incarnation:
        return None
    return committed(db._replace(lock=flying, flying=None))


def recorded(db: Database, prepared, outcome: Outcome) -> Database:
    """``Records.record``: into the row if it still shows the state, and a loss among the incidents."""
    shown = db.prepared == prepared
    if outcome is not Outcome.COMMITTED:
        better = outcome is Outcome.UNVERIFIABLE and shown and db.completed not in {None, outcome}
        label = db.label_of(prepared)
        if label is not None and not better and label not in dict(db.incidents):
            db = db._replace(incidents=tuple(sorted([*db.incidents, (label, outcome)], key=lambda item: item[0])))
    if shown and db.completed is None:
        db = db._replace(completed=outcome)
    return db
