"""Claiming and settling, step by step: ``dualwrite.recovery.claim``, ``dualwrite.recovery.settle``, ``Lane._claim``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator import requests as sim

from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.settle import Knowledge, SettleStep, compared, looked, proved, to_end
from dualwrite.protocol.settle import retired as after_retiring
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep
from dualwrite.protocol.values import LogProof, Outcome, TransactionStatus, others_than
from search.stepping import LATER, OK, Step, again, recorded
from search.values import DONE, PLACES, Database, Lock, Process
from search.views import describe, open_offset, still_open

_RECORDS = {
    SettleStep.RECORD_COMMITTED: Outcome.COMMITTED,
    SettleStep.RECORD_LOST: Outcome.LOST,
    SettleStep.RECORD_UNVERIFIABLE: Outcome.UNVERIFIABLE,
    NativeStep.RECORD_COMMITTED: Outcome.COMMITTED,
    NativeStep.RECORD_LOST: Outcome.LOST,
    NativeStep.RECORD_UNVERIFIABLE: Outcome.UNVERIFIABLE,
}


_OVERTAKEN = (-1, -1)
"""Another settler has retired it meanwhile."""


class Settling(Step):
    """A claim, and the settling of what former incarnations have left."""

    def claim(self) -> None:
        p, db, rules = self.p, self.db, self.rules
        if rules.reads_row_before_claiming and p.row is None:
            self.go("reads the row", p._replace(row=(db.prepared, db.completed, db.settled)))
            return
        if not rules.settlers_claim and not p.todo and not p.owner:
            if db.incarnation:
                row = (db.prepared, db.completed, db.settled)
                self.go(
                    "settles without a claim", self.begin_settling(p._replace(incarnation=db.incarnation + 1, row=row))
                )
            return
        if db.lock is not None:
            return
        if p.owner and db.owner != p.owner:  # the guard
            self.fenced_renewal()
            return
        if self.walk.most and db.incarnation >= self.walk.most:
            return
        mine = db.incarnation + 1
        owner = p.owner or mine
        claimed = db._replace(incarnation=mine, owner=owner)
        wrong = None
        if rules.kafka_id(mine) != rules.kafka_id(mine + 1) and (
            describe(self.broker, rules.kafka_id(mine)).status is not TransactionStatus.NO_SUCH_ID
        ):
            wrong = "false alarm: the coordinator knows an incarnation that is new"
        if p.known is not None and rules.is_older(db.prepared, p.known):
            wrong = "false alarm: the row shows an older decision than its owner knows"
        row = p.row if rules.reads_row_before_claiming else (db.prepared, db.completed, db.settled)
        now = Process(
            "claim", p.todo, owner, mine, write=p.write, ours=p.ours, known=db.prepared if p.todo else None, row=row,
            engine=p.engine, undecided=p.undecided,
        )  # fmt: skip
        self.go(f"claims incarnation {mine}", self.begin_settling(now), claimed, wrong=wrong)
        unanswered = again(p._replace(owner=owner), p.todo)
        self.go(f"claims incarnation {mine}, and the answer is lost", unanswered, claimed, spends="claim")

    def fenced_renewal(self) -> None:
        """The row has another owner. What is decided is then proved by the log: ``dualwrite.recovery.claim``."""
        if self.p.write is not WriteState.DECIDED:
            self.go("finds another owner and stops", DONE)
            return
        proof = self.rules.prove(self.broker, self.p.ours)
        wrong = None
        if proof is LogProof.ABORTED:
            wrong = self.told_lost()
        self.go(f"finds another owner; the log proves its transaction {proof.value}; stops", DONE, wrong=wrong)

    def mark(self) -> None:
        p, db = self.p, self.db
        if db.lock is None:
            upto = p.incarnation - 1
            if self.rules.mark_only_rises:
                upto = max(db.settled, upto)
            self.go(f"marks {upto} as settled", self.settled(p), db._replace(settled=upto))

    def settle(self) -> None:
        step = self.settle_step(self.p.knowledge)
        if step in _RECORDS:
            self.record(_RECORDS[step])
        else:
            getattr(self, f"settle_{step.name.lower()}")()

    @property
    def item_id(self) -> str:
        return self.rules.kafka_id(self.p.item)

    def learn(self, text: str, **learned: Any) -> None:
        self.go(
            f"settling {self.p.item}: {text}",
            self.p._replace(knowledge=replace(self.p.knowledge, **learned), seen=None),
        )

    def settle_look(self) -> None:
        known = self.p.knowledge
        if self.rules.asks_partitions_first and known.prepared is not None and self.p.seen is None:
            seen = tuple(open_offset(self.broker, place, known.prepared) for place in PLACES)
            self.go(f"settling {self.p.item}: the partitions show {seen} open", self.p._replace(seen=seen))
            return
        view = describe(self.broker, self.item_id, places=self.walk.forgets)
        after = looked(known, view)
        if self.p.seen is not None:
            after = replace(after, evidence=self.matches(self.p.seen))
        if self.rules.next_step(after) is not SettleStep.WAIT:  # it would look again, and that is where it is
            self.go(
                f"settling {self.p.item}: the coordinator shows {view.status.value}",
                self.p._replace(knowledge=after, seen=None),
            )
        if self.rules.stale_coordinator and self.was_ongoing(view):
            stale = replace(view, status=TransactionStatus.ONGOING)
            self.learn("a deposed coordinator shows Ongoing", view=stale, evidence=None, proof=None)

    def was_ongoing(self, view) -> bool:
        prepared = self.p.knowledge.prepared
        ended = {TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT}
        return (
            prepared is not None
            and view.status in ended
            and ((view.producer_id, view.epoch) == (prepared.producer_id, prepared.epoch))
        )

    def matches(self, seen) -> bool:
        return self.rules.is_open(self.p.knowledge.prepared, dict(zip(PLACES, seen, strict=True)))

    def settle_look_at_partitions(self) -> None:
        """Each partition's leader is asked by itself, or both at once."""
        prepared = self.p.knowledge.prepared
        if not self.walk.one_by_one and not self.rules.stale_partitions:
            shown = tuple(open_offset(self.broker, place, prepared) for place in PLACES)
            self.compared(f"the partitions show {shown} open", evidence=self.matches(shown))
            return
        seen = self.p.seen or ()
        place = PLACES[len(seen)]
        offset = open_offset(self.broker, place, prepared)
        offsets = {offset}
        if self.rules.stale_partitions:
            offsets |= {first.offset for first in prepared.first_offsets if (first.topic, first.partition) == place}
        for shown in sorted(offsets, key=lambda shown: (shown != offset, shown or 0)):
            asked = (*seen, shown)
            stale = "" if shown == offset else " (a deposed leader)"
            text = f"partition {place[1]} shows {shown} open{stale}"
            if len(asked) < len(PLACES):
                self.go(f"settling {self.p.item}: {text}", self.p._replace(seen=asked))
            else:
                self.compared(text, evidence=self.matches(asked))

    def compared(self, text: str, *, evidence: bool) -> None:
        known = self.p.knowledge
        beside = still_open(self.broker, known.prepared.producer_id, others_than(known.prepared, known.view))
        after = compared(known, evidence and not beside)
        self.go(f"settling {self.p.item}: {text}", self.p._replace(knowledge=after, seen=None))

    def settle_commit(self) -> None:
        view = self.p.knowledge.view
        request = sim.EndTxn(self.item_id, view.producer_id, view.epoch, committed=True)
        broker, answer = self.ask(request)
        looking = self.p._replace(knowledge=replace(self.p.knowledge, view=None), seen=None)
        text = f"settling {self.p.item}: EndTxn(commit)"
        self.go(f"{text}: {answer.error_code.name}", looking, broker=broker)
        if answer.error_code is OK and not self.walk.forgets:
            self.go(f"{text} stays in the network", looking, sent=request, spends="delay")
            self.go(
                f"{text}: NONE, and a second copy stays in the network",
                looking,
                broker=broker,
                sent=request,
                spends="delay",
            )

    def settle_look_for_open(self) -> None:
        known = self.p.knowledge
        suspected = known.prepared.producer_id if known.is_pending else known.view.producer_id
        places = known.suspects if self.walk.forgets else PLACES
        self.learn("looks for what is open", still_open=still_open(self.broker, suspected, places))

    def settle_prove(self) -> None:
        known = self.p.knowledge
        proof = self.rules.prove(self.broker, known.prepared)
        text = f"settling {self.p.item}: the log proves {proof.value}"
        after = proved(known, proof)
        if not self.walk.forgets:
            after = replace(after, suspects=known.suspects)
        self.go(text, self.p._replace(knowledge=after, seen=None))

    def record(self, outcome: Outcome) -> None:
        """``Records.record``, in one transaction."""
        p, db = self.p, self.db
        if db.lock is not None:
            return
        prepared = p.knowledge.prepared
        db = recorded(db, prepared, outcome)
        wrong = None
        if outcome is Outcome.LOST and p.write is WriteState.DECIDED and prepared == p.ours:
            wrong = self.told_lost()
        self.go(
            f"settling {p.item}: records {outcome.value}",
            p._replace(knowledge=self.after_recording(outcome)),
            db,
            wrong=wrong,
        )

    def after_recording(self, outcome: Outcome) -> Knowledge | NativeKnowledge:
        return replace(self.p.knowledge, recorded=outcome)

    def settle_retire(self) -> None:
        if self.p.knowledge.is_pending and self.rules.looks_again_before_retiring:
            if self.db.lock is None and not self.changed_meanwhile():
                self.retire(self.db._replace(lock=Lock(self.p.incarnation, self.p.label, None)))
            elif self.holds_the_lock:
                self.retire(self.db)
        else:
            self.retire(self.db)

    def changed_meanwhile(self) -> bool:
        """``_retire_unless_changed``: under the row's lock, another settler may have been faster."""
        known = self.p.knowledge
        view = describe(self.broker, self.item_id, places=self.walk.forgets)
        if view == known.view:
            return False
        self.go(
            f"settling {self.p.item}: the coordinator shows {view.status.value} by now",
            self.p._replace(knowledge=looked(known, view), seen=None),
        )
        return True

    @property
    def holds_the_lock(self) -> bool:
        return self.db.lock is not None and self.db.lock.holder == self.p.incarnation

    def retire(self, locked: Database) -> None:
        free = self.db if locked is self.db and not self.holds_the_lock else locked._replace(lock=None)
        view = self.p.knowledge.view
        request = sim.InitProducerId(self.item_id)
        if self.rules.retires_what_it_has_seen:
            request = request._replace(producer_id=view.producer_id, producer_epoch=view.epoch)
        broker, answer = self.ask(request)
        text = f"settling {self.p.item}: InitProducerId"
        if answer.error_code is OK:
            known = after_retiring(self.p.knowledge, (answer.producer_id, answer.producer_epoch))
            retired = self.p._replace(knowledge=known, seen=None)
            self.go(f"{text}: retired", retired, free, broker)
            if not self.walk.forgets:  # else a limit: docs/limits.md
                text = f"{text}: retired, and a second copy stays in the network"
                self.go(text, retired, free, broker, sent=request, spends="delay")
        elif broker != self.broker:
            self.go(f"{text} aborts what is ongoing", None, locked, broker)
        elif answer.error_code not in LATER:
            self.learn(f"InitProducerId: {answer.error_code.name}", retired=_OVERTAKEN)

    def settle_repair_markers(self) -> None:
        """``_repair_markers``: the partitions are added to a transaction of the retired id, which is then ended."""
        places, _ = to_end(self.p.knowledge)
        view = self.p.knowledge.view
        request = sim.AddPartitionsToTxn(self.item_id, view.producer_id, view.epoch, tuple(sorted(places)))
        broker, answer = self.ask(request)
        text = f"settling {self.p.item}: adds what was forgotten in {sorted(number for _, number in places)}"
        if set(answer.error_codes) == {OK}:
            self.go(text, self.p._replace(doing="repair"), broker=broker)
        elif not set(answer.error_codes) & LATER:
            self.go(f"{text}: another settler has retired it", self.looking_again())

    def repair(self) -> None:
        _, committed = to_end(self.p.knowledge)
        view = self.p.knowledge.view
        request = sim.EndTxn(self.item_id, view.producer_id, view.epoch, committed)
        broker, answer = self.ask(request)
        if answer.error_code not in LATER:
            text = f"settling {self.p.item}: EndTxn({'commit' if committed else 'abort'}) of what was forgotten"
            self.go(f"{text}: {answer.error_code.name}", self.looking_again(), broker=broker)

    def looking_again(self) -> Process:
        return self.p._replace(doing="settle", knowledge=replace(self.p.knowledge, view=None), seen=None)
