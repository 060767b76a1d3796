"""Settling a decided native transaction, step by step: ``dualwrite.recovery.settle``."""

from __future__ import annotations

from simulator import requests as sim
from simulator.requests import ErrorCode

from dualwrite.protocol import settle_native
from dualwrite.protocol.settle_native import NativeKnowledge
from dualwrite.protocol.values import EndAnswer, Outcome
from search.settling import Settling
from search.stepping import LATER, OK
from search.values import PLACES, STOPPED
from search.views import describe, open_transactions

ANSWERS = {
    ErrorCode.NONE: EndAnswer.ENDED,
    ErrorCode.CONCURRENT_TRANSACTIONS: EndAnswer.IN_PROGRESS,
    ErrorCode.INVALID_PRODUCER_EPOCH: EndAnswer.FENCED,
    ErrorCode.PRODUCER_FENCED: EndAnswer.FENCED,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING: EndAnswer.NO_SUCH_ID,
    ErrorCode.INVALID_TXN_STATE: EndAnswer.INVALID_STATE,
}


class NativeSettling(Settling):
    """The steps between claim and mark for the incarnation whose native transaction the row names."""

    @property
    def known(self) -> NativeKnowledge:
        return self.p.knowledge

    def learned(self, text: str, known: NativeKnowledge, **more) -> None:
        """Go on with this knowledge, unless all is as before."""
        after = self.p._replace(doing="settle", knowledge=known)
        if more or self.advanced(after) != self.p:
            self.go(f"settling {self.p.item}: {text}", after, **more)

    def settle_look(self) -> None:
        view = describe(self.broker, self.item_id, places=True)
        shown = f"the coordinator shows {view.status.value}, epoch {view.epoch}"
        self.learned(shown, settle_native.looked_native(self.known, view))

    def settle_end(self) -> None:
        state = self.known.prepared
        self.end_exactly("EndTxn(commit)", state.producer_id, state.epoch, committed=True, then=settle_native.ended)

    def settle_abort(self) -> None:
        if self.rules.fences_by_init:
            broker, _ = self.ask(sim.InitProducerId(self.item_id, self.walk.native_timeout_ms))
            self.learned("InitProducerId", settle_native.acted(self.known), broker=broker)
            return
        self.end_shown("EndTxn(abort)", committed=False)

    def settle_join(self) -> None:
        self.end_shown("EndTxn(commit) of another settler's repair", committed=True)

    def end_shown(self, text: str, *, committed: bool) -> None:
        view = self.known.view
        self.end_exactly(
            f"{text}, epoch {view.epoch}", view.producer_id, view.epoch, committed=committed,
            then=lambda known, _: settle_native.acted(known),
        )  # fmt: skip

    def end_exactly(self, text: str, producer_id: int, epoch: int, *, committed: bool, then) -> None:
        """``NativeCoordinator.end_exactly``: repeated after silence, with the answers of the coordinator."""
        request = sim.EndTxn(self.item_id, producer_id, epoch, committed, 2)
        broker, answer = self.ask(request)
        known = then(self.known, ANSWERS[answer.error_code])
        changed = {} if broker == self.broker else {"broker": broker}
        self.learned(f"{text}: {answer.error_code.name}", known, **changed)
        if answer.error_code is OK:
            self.go(f"settling {self.p.item}: {text} stays in the network", sent=request, spends="delay")

    def settle_look_for_open(self) -> None:
        found = open_transactions(self.broker, self.known.prepared.producer_id, PLACES)
        shown = ", ".join(f"{one.partition[1]}: epoch {one.epoch} from {one.start}" for one in found)
        self.learned(f"the partitions show open: {shown or 'nothing'}", settle_native.found_open(self.known, found))

    def settle_prove(self) -> None:
        proof = self.rules.prove(self.broker, self.known.prepared)
        self.learned(f"the log proves {proof.value}", settle_native.proved_native(self.known, proof))

    def settle_read_fence(self) -> None:
        db = self.db
        self.learned(f"the row's fence is {db.fence}", settle_native.read_fence(self.known, db.prepared, db.fence))

    def settle_raise_fence(self) -> None:
        """``Records.raise_fence``: waits for the row's lock."""
        db, known = self.db, self.known
        if db.lock is not None:
            return
        as_read = db.prepared == known.prepared and db.fence == known.fence
        written = as_read or not self.rules.compares_fence
        fence = settle_native.new_fence(known)
        text = f"writes the fence {fence}" if written else "does not write the fence: the row has changed"
        self.learned(
            text, settle_native.fence_raised(known, written=written), db=db._replace(fence=fence) if written else db
        )

    def settle_repair(self) -> None:
        """``rounds.repair``: the partitions are added to a transaction of the fenced epoch, which is then ended."""
        places, committed = self.rules.to_repair(self.known)
        view = self.known.view
        request = sim.AddPartitionsToTxn(self.item_id, view.producer_id, view.epoch, tuple(sorted(places)))
        broker, answer = self.ask(request)
        numbers = sorted(number for _, number in places)
        text = (
            f"adds what was forgotten in {numbers}, to {'commit' if committed else 'abort'} it under epoch {view.epoch}"
        )
        if set(answer.error_codes) == {OK}:
            self.go(f"settling {self.p.item}: {text}", self.p._replace(doing="repair"), broker=broker)
            self.go(f"settling {self.p.item}: {text}: stays in the network", sent=request, spends="delay")
        elif not set(answer.error_codes) & LATER:
            self.learned(f"{text}: another settler has raised it", settle_native.acted(self.known))

    def repair(self) -> None:
        _, committed = self.rules.to_repair(self.known)
        self.end_shown(f"EndTxn({'commit' if committed else 'abort'}) of what was forgotten", committed=committed)

    def settle_stop(self) -> None:
        """``NativeSettling._stop``: raises, and leaves it to a person."""
        self.go(f"settling {self.p.item}: stops: a repair could be timed out unseen", STOPPED)

    def after_recording(self, outcome: Outcome) -> NativeKnowledge:
        return settle_native.recorded(self.known, outcome)
