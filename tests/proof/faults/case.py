"""One case of the matrix: a cell, a seed, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

from dualwrite.testing.proxy import Choice, Rule
from faults.cells import COMMIT, KEYS, TWO_PHASE, Cell, Draw, Fault, Phase
from faults.stage import Owner, Result, Slot, Stage

SETTLING_S = 8.0
"""How long the COMMIT of the first owner is held at most, while another one settles."""
LOST_S = 0.5
"""After this time the connection of a COMMIT that went astray breaks."""


class Case(Stage):
    """Plays one draw of a cell."""

    def __init__(self, slot: Slot, cell: Cell, draw: Draw, *, mistake: str = "") -> None:
        super().__init__(slot, mistake=mistake)
        self.cell = cell
        self.draw = draw
        # A second InitProducerId raises the epoch, and so fences the producer that the first one was answered to.
        self.fences_itself = cell.request in {"InitProducerId", TWO_PHASE} and cell.fault is Fault.DUPLICATE
        self._rule: Rule | None = None
        self._commit: Rule | None = None
        self._struck = False
        self._victim: Owner | None = None

    def play(self) -> None:
        if self.cell.request == COMMIT:
            self._at_commit()
        else:
            {Phase.BEFORE: self._before, Phase.DURING: self._during, Phase.AFTER: self._after}[self.cell.phase]()

    def _first(self, *pauses: str) -> Owner:
        return self.own(self.draw.operations, *pauses, outbox=self.draw.outbox)

    def _another(self) -> Owner:
        return self.own(self.draw.others, outbox=self.draw.outbox)

    def _before(self) -> None:
        first = self._first("1:write.begun", "1:write.recorded", "2:write.begun")
        if self.draw.from_opening:
            self._arm(first)
        self._until_at(first, "1:write.begun")
        if not self.draw.from_opening:
            self._arm(first)
        first.go()
        self.pump(lambda: first.ended or first.at in {"1:write.recorded", "2:write.begun"})
        self._over()
        self._release_to_the_end(first)

    def _during(self) -> None:
        first = self._first("1:write.recorded")
        self._until_at(first, "1:write.recorded")
        commit = self.postgres.on("COMMIT")
        held = self._commit = commit.hold_answer() if self.draw.decided else commit.hold_request()
        first.go()
        self.pump(lambda: first.ended or bool(held.taken), 20)
        if self.draw.decided and held.taken:
            held.wait_answered()
        second = self._another()
        self._arm(second)
        self.pump(lambda: all(owner.ended for owner in self.owners[1:]), SETTLING_S if self.draw.decided else 2.0)
        self._over()
        (held.release if self.draw.told else held.cut)()
        self.after(self.draw.delay_s, held.release)
        self.note(f"the COMMIT is {'answered' if self.draw.told else 'cut'}")
        self._release_to_the_end(first)

    def _after(self) -> None:
        first = self._first("1:write.decided")
        self._until_at(first, "1:write.decided")
        if self.draw.settled_by_another and not first.ended:
            self._kill(first)
            self._arm(self._another())
        else:
            self._arm(first)
            first.go()
        self.pump(lambda: all(owner.ended for owner in self.owners))
        self._over()

    def _at_commit(self) -> None:
        first = self._first("1:write.recorded")
        self._until_at(first, "1:write.recorded")
        self._arm(first)
        first.go()
        self._release_to_the_end(first)

    def _until_at(self, owner: Owner, point: str) -> None:
        self.pump(lambda: owner.ended or owner.at == point)

    def _release_to_the_end(self, owner: Owner) -> None:
        def ended() -> bool:
            if owner.at is not None:
                owner.go()
            return all(owner.ended for owner in self.owners)

        self.pump(ended)

    def _arm(self, victim: Owner) -> None:
        """The fault is to strike, from now on."""
        self._victim = victim
        if self.cell.request == COMMIT:
            choice: Choice = self.postgres.on("COMMIT")
        else:
            choice = self.kafka.on(KEYS[self.cell.request], nth=self.draw.nth)
        actions: dict[Fault, Callable[[], Rule]] = {
            Fault.DROP_REQUEST: choice.drop_request,
            Fault.DROP_ANSWER: choice.drop_answer,
            Fault.DELAY: choice.hold_answer if self.draw.answer else choice.hold_request,
            Fault.DUPLICATE: choice.duplicate,
            Fault.RESET: choice.reset_answer if self.draw.answer else choice.reset_request,
        }
        self._rule = actions[self.cell.fault]()
        if self.cell.fault is Fault.DUPLICATE:
            self._rule.release()  # the second copy comes right behind the first: TCP delivers nothing late and again
        self.note(f"armed: {self._rule!r}")

    def _over(self) -> None:
        """The phase is over: nothing may strike any more."""
        if self._rule is not None:
            self._rule.withdraw()

    def tick(self) -> None:
        rule = self._rule
        if self._struck or rule is None or not rule.taken:
            return
        self._struck = True
        self.note(f"struck: {rule.taken[0]}")
        if self.cell.fault is Fault.DELAY:
            if self.draw.cut:
                self.after(self.draw.delay_s / 2, rule.cut)
            self.after(self.draw.delay_s, rule.release)
        if self.cell.request == COMMIT and self.cell.fault in {Fault.DROP_REQUEST, Fault.DROP_ANSWER}:
            self.after(LOST_S, rule.cut)
        if self.draw.kill and self._victim is not None:
            self._kill(self._victim)
        if self.draw.another or (self.draw.kill and self.draw.told):
            self._another()

    def _kill(self, owner: Owner) -> None:
        owner.kill()
        self.note(f"{owner.name} is killed")

    def heal(self) -> None:
        self.act_now()
        for rule in filter(None, (self._rule, self._commit)):
            rule.withdraw()
            rule.release()
        self.result.occurred = 0 if self._rule is None else len(self._rule.taken)


def run_case(slot: Slot, cell: Cell, seed: int, *, mistake: str = "") -> Result:
    """Play a cell's seed; once more, with chances small that no such request comes, if none has come."""
    for certain in (False, True):
        result = Case(
            slot, cell, Draw.of(cell, seed, slot.context.producer_engine, certain=certain), mistake=mistake
        ).run()
        if result.occurred or result.findings:
            break
    return result
