"""The steps of an owner that are the same whichever engine sends its messages: its row, its database, and when it goes on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from dualwrite.errors import DualWriteError
from dualwrite.protocol.lives import WRITE_LIFE, ProducerEvent, WriteEvent, WriteState
from dualwrite.protocol.settle import EndStep
from dualwrite.protocol.values import Outcome, StateRow
from search.stepping import Step, again, committed, recorded
from search.values import DONE, NOTHING, Database, Lock, Process, name

_NO_TIME = datetime.fromtimestamp(0, timezone.utc)
_E, _W = ProducerEvent, WriteEvent


class Owning(Step):
    """An owner: ``dualwrite.writing.dual_write``, ``dualwrite.writing.lane``.

    Attributes:
        writes_by: The position at which its transactions begin to write.
    """

    writes_by: str

    def shown_ends(self) -> tuple[str, Callable[..., EndStep]]:
        """The last transaction's end as the partitions show it, for people, and the engine's rule about it."""
        raise NotImplementedError

    def end_at_rest(self) -> EndStep:
        """``ends.end_at_rest``."""
        return EndStep.KNOWN

    def begin(self) -> None:
        p, db = self.p, self.db
        seen = p.item if self.rules.checks_by_an_old_snapshot else db.incarnation
        if self.rules.checks_incarnation and seen != p.incarnation:
            self.go("reads another incarnation and stops", DONE)
            return
        begun = p._replace(
            doing=self.writes_by, write=WRITE_LIFE[WriteState.BEGUN][_W.CHECK], producer=self.life(_E.BEGIN), item=0,
            rolled_back=False,
        )  # fmt: skip
        wrong = self.check_known(db)
        self.go(f"reads its incarnation, begins {name(p.label)}", begun, wrong=wrong)

    def check_known(self, db: Database) -> str | None:
        p = self.p
        if p.known is None or db.incarnation != p.incarnation:
            return None
        row = StateRow("T", p.known, "", p.incarnation, 0, None, "", "", _NO_TIME)
        try:
            self.rules.check_not_gone_back(row, db.incarnation, str(db.prepared))
        except DualWriteError as error:
            return f"false alarm: {error.what}"
        return None

    def failed(self, event: ProducerEvent, p: Process | None = None) -> Process:
        p = p or self.p
        return p._replace(doing="abort", producer=self.life(event), write=p.write, ours=None, firsts=(-1, -1))

    def update(self) -> None:
        """``StateStore.decide``: waits for the row's lock."""
        p, db = self.p, self.db
        if self.walk.at_once and not p.rolled_back:
            self.decide_at_once()
            return
        self.rolled_back(db)
        if p.rolled_back:
            self.update_alone()
        elif db.lock is None:
            if db.incarnation == p.incarnation or not self.rules.updates_on_condition:
                lock = Lock(p.incarnation, p.label, p.ours)
                recorded_ = p._replace(doing="commit", write=self.writes(_W.RECORD))
                self.go(f"updates the row to {name(p.label)}", recorded_, db._replace(lock=lock))
            else:
                self.go("updates no row: fenced", p._replace(doing="abort"))
        self.go(f"the user's code fails in {name(p.label)}", p._replace(doing="abort"), spends="abort")

    def decide_at_once(self) -> None:
        """``DecisionWithCommit.execute``: the statement and COMMIT in one text. No lock before the server has it."""
        p, db = self.p, self.db
        self.rolled_back(db)
        self.go(f"the user's code fails in {name(p.label)}", p._replace(doing="abort"), spends="abort")
        text = f"sends the decision on {name(p.label)} with its COMMIT"
        if db.incarnation != p.incarnation and self.rules.updates_on_condition:
            self.go(f"{text}: it matches no row", p._replace(doing="abort"))
            return
        sent = Lock(p.incarnation, p.label, p.ours)
        doubtful = p._replace(doing="resolve", write=self.writes(_W.RECORD, _W.LOSE_ANSWER))
        if db.flying is None:
            flying = db._replace(flying=sent)
            self.go(f"{text}, and dies", DONE, flying)
            self.go(f"{text}: no answer, it is still on its way", doubtful, flying, spends="answer")
        self.go(f"{text}: no answer, it never arrives", doubtful, spends="answer")
        if db.lock is None:
            done = committed(db._replace(lock=sent))
            decided = p._replace(doing="end", write=self.writes(_W.RECORD, _W.COMMIT), known=p.ours)
            self.go(f"{text}: decided", DONE if self.walk.dies else decided, done)
            self.go(f"{text}: no answer, it is done", doubtful, done, spends="answer")
            self.go(f"{text}: it fails for certain", p._replace(doing="abort"), spends="abort")

    def rolled_back(self, released: Database) -> None:
        """The database ends the transaction before the next statement, which is then executed without its rows."""
        p = self.p
        if not p.rolled_back:
            text = f"the database rolls {name(p.label)} back, and nobody notices"
            self.go(text, p._replace(rolled_back=True), released, spends="unseen")

    def update_alone(self) -> None:
        """The UPDATE outside of the transaction that was begun: it commits by itself."""
        p, db = self.p, self.db
        if self.rules.decides_in_its_own_transaction:
            text = "updates no row, as it is not in the transaction that it began"
            self.go(text, p._replace(doing="abort", rolled_back=False))
        elif db.lock is None and db.incarnation == p.incarnation:
            alone = db._replace(prepared=p.ours, completed=None, fence=None)
            recorded_ = p._replace(doing="commit", write=self.writes(_W.RECORD))
            self.go(f"updates the row to {name(p.label)}, and that alone is committed", recorded_, alone)

    def commit(self) -> None:
        p, db = self.p, self.db
        if p.rolled_back:
            self.commit_nothing()
            return
        self.rolled_back(db._replace(lock=None))
        done = committed(db)
        decided = p._replace(doing="end", write=self.writes(_W.COMMIT), known=p.ours)
        if self.rules.checks_by_an_old_snapshot:
            decided = decided._replace(item=db.incarnation)
        self.go(f"COMMIT {name(p.label)}: decided", DONE if self.walk.dies else decided, done)
        released = db._replace(lock=None)
        # Also the end of the session of an owner that was paused for too long.
        failed = decided if self.rules.takes_a_failed_commit_for_committed else p._replace(doing="abort")
        self.go(f"COMMIT {name(p.label)} fails for certain", failed, released, spends="abort")
        self.go("dies, and its session with it", DONE, released)
        doubtful = p._replace(doing="resolve", write=self.writes(_W.LOSE_ANSWER))
        text = f"COMMIT {name(p.label)}: the answer is lost;"
        self.go(f"{text} it is done", doubtful, done, spends="answer")
        self.go(f"{text} it never arrived", doubtful, released, spends="answer")
        orphan = db._replace(lock=db.lock._replace(orphan=True))
        self.go(f"{text} the session is still at it", doubtful, orphan, spends="answer")

    def commit_nothing(self) -> None:
        """COMMIT outside of a transaction: the server answers with success, and a warning."""
        p = self.p._replace(rolled_back=False)
        text = f"COMMIT {name(p.label)} finds no transaction"
        if self.rules.believes_a_commit_of_nothing:
            self.go(f"{text}: taken for done", p._replace(doing="end", write=self.writes(_W.COMMIT), known=p.ours))
        else:
            self.go(f"{text}: in doubt", p._replace(doing="resolve", write=self.writes(_W.LOSE_ANSWER)))

    def renewed(self, p: Process) -> Process:
        """``Lane._complete_by_settling``: the producer is discarded; claims, settles its own transaction."""
        self.life(_E.DOUBT)
        return again(p, p.todo - 1, write=p.write, ours=p.ours)

    def counted(self, p: Process) -> Process:
        """A transaction is done: the next one."""
        self.writes(_W.COMPLETE)
        return self.reusable(p._replace(todo=p.todo - 1, number=p.number + 1))

    def know_end(self) -> None:
        """``know_end``: the partitions are asked until they show how the last transaction has ended."""
        p = self.p
        known = p._replace(ended=None, shown=p.shown if self.rules.keeps_former_answers else None)
        if not p.todo and not self.rules.knows_ends_before_it_closes:
            self.go("does not look how its last transaction has ended", self.reusable(known))
            return
        shown, next_step = self.shown_ends()
        step = next_step(early=True)
        if step is EndStep.KNOWN:
            self.go(f"the end of its last transaction is known ({shown})", self.reusable(known))
            return
        if step is EndStep.WAIT:  # or it asks once more, and that is where it is
            step = next_step(early=False)
        if step in {EndStep.SETTLE, EndStep.RECORD}:
            thrown = self.reusable(p._replace(producer=self.life(_E.DOUBT)))
            self.go(f"the end of its last transaction is not known ({shown})", thrown)

    def close(self) -> None:
        """The owner closes: it records what it has completed, if the row still shows it."""
        p, db = self.p, self.db
        if p.known is None or p.known is NOTHING or db.prepared != p.known or db.completed is not None:
            self.go("closes", DONE)
            return
        step = self.end_at_rest()
        if step is EndStep.SETTLE:
            self.go("closes, and finds in the log that its last transaction has not ended as it should", again(p, 0))
        elif step is EndStep.WAIT:
            self.go("closes, and leaves it to others to record its last transaction", DONE)
        elif db.lock is None:
            self.go("closes, and records committed", DONE, recorded(db, p.known, Outcome.COMMITTED))
