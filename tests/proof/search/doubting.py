"""A COMMIT without an answer, step by step: ``dualwrite.recovery.claim``, ``Transaction._resolve``."""

from __future__ import annotations

from dataclasses import replace

from dualwrite.protocol.lives import ProducerEvent, WriteEvent
from dualwrite.protocol.process import DatabaseVerdict, Doubt
from search.stepping import Step
from search.values import name

_E, _W = ProducerEvent, WriteEvent


class Doubting(Step):
    """An owner finds out what became of its COMMIT."""

    def resolve(self) -> None:
        p, db = self.p, self.db
        if p.doubt is None:
            if db.lock is not None and self.rules.waits_for_the_lock_in_doubt:
                return
            self.go("reads the row under its lock", p._replace(doubt=Doubt(p.ours, db.prepared)))
            return
        step = self.rules.next_doubt_step(p.doubt)
        getattr(self, f"doubt_{step.name.lower()}")()

    def doubt_ask_database(self) -> None:
        known = DatabaseVerdict.UNKNOWN
        if self.walk.verdicts:
            known = DatabaseVerdict.COMMITTED if self.db.has(self.p.label) else DatabaseVerdict.ABORTED
        self.go(f"the database says {known.value}", self.p._replace(doubt=replace(self.p.doubt, verdict=known)))

    def doubt_ask_records(self) -> None:
        incident = dict(self.db.incidents).get(self.p.label)
        doubt = replace(self.p.doubt, records_asked=True, incident=incident)
        self.go(f"the records show {incident.value if incident else 'nothing'}", self.p._replace(doubt=doubt))

    def doubt_ask_log(self) -> None:
        proof = self.rules.prove(self.broker, self.p.ours)
        self.go(f"the log proves {proof.value}", self.p._replace(doubt=replace(self.p.doubt, proof=proof)))

    def doubt_committed(self) -> None:
        p = self.p
        wrong = None
        if not self.db.has(p.label):
            wrong = f"the caller is told that {name(p.label)} is committed, and the database does not have it"
        decided = p._replace(doing="end", write=self.writes(_W.COMMIT), doubt=None, known=p.ours)
        self.go(f"takes {name(p.label)} for committed", decided, wrong=wrong)

    def doubt_aborted(self) -> None:
        if self.walk.at_once and self.rules.claims_in_doubt and not self.p.fenced:
            self.fence()
            return
        self.go(f"takes {name(self.p.label)} for rolled back", self.p._replace(doing="abort", doubt=None))

    def fence(self) -> None:
        """``Lane.fence``: what is still on its way then finds another incarnation. Then it asks again."""
        p, db = self.p, self.db
        fenced = p._replace(fenced=True, doubt=None if self.rules.asks_after_the_claim else p.doubt)
        if db.lock is not None:
            return
        if db.owner != p.owner:
            self.go("finds that another has claimed the row", fenced)
        elif not self.walk.most or db.incarnation < self.walk.most:
            self.go("claims the row anew", fenced, db._replace(incarnation=db.incarnation + 1))

    def doubt_lost(self) -> None:
        self.writes(_W.FIND_LOST)
        self.give_up("is told of its loss", self.told_lost())

    def doubt_unverifiable(self) -> None:
        self.writes(_W.FIND_LOST)
        self.give_up("is told that nobody can tell", None)

    def doubt_in_doubt(self) -> None:
        self.give_up("is told that it is in doubt", None)

    def give_up(self, text: str, wrong: str | None) -> None:
        p = self.p
        thrown = p._replace(todo=p.todo - 1, number=p.number + 1, doubt=None, producer=self.life(_E.DOUBT))
        self.go(text, self.reusable(thrown), wrong=wrong)
