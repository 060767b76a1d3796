"""Kafka falls silent under writers whose messages may wait in the database, and answers again.

Requests are held, and all arrive when it is back; or they are lost; or the broker does what they ask and its answers are held.
Meanwhile owners write, are killed, take over from one another, and a COMMIT goes astray. Once all have ended, the comparison is
that of the matrix: everything once, in the order of the decisions. No operation that could wait may abort because of Kafka.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from dualwrite.testing.proxy import Rule
from faults.stage import Owner, Slot, Stage
from faults.work import BOTH, MESSAGES, Operation

OPENING = "the opening"
POINTS = (
    OPENING,
    "write.begun",
    "write.produced",
    "write.body_done",
    "write.prepared",
    "write.recorded",
    "write.decided",
)


class How(enum.Enum):
    HELD = "its requests are held"
    LOST = "its requests are lost"
    UNANSWERED = "its answers are held"


@dataclass(frozen=True)
class Draw:
    """The choices of a seed.

    Attributes:
        how: What becomes of requests.
        point: Where the first owner stands in its second operation when it begins.
        lasts_s: How long; None: until nobody writes any more.
        again: Whether it happens once more, a second later.
        outbox: The first owner's setting, and the second's.
        operations: Of the first owner, and of the second.
        killed_after_s: When the first owner is killed, from the beginning of the silence on; None: it is not.
        another_after_s: When the second one opens; None: not before Kafka answers again.
        astray: Whether a COMMIT of the first owner's is cut off, and whether only its answer.
    """

    how: How
    point: str
    lasts_s: float | None
    again: bool
    outbox: tuple[str, str]
    operations: tuple[tuple[Operation, ...], tuple[Operation, ...]]
    killed_after_s: float | None
    another_after_s: float | None
    astray: tuple[bool, bool]

    @classmethod
    def of(cls, seed: int) -> Draw:
        rng = random.Random(f"silence {seed}")

        def operation() -> Operation:
            return Operation(rng.choice([MESSAGES, MESSAGES, MESSAGES, BOTH]), abort=rng.random() < 0.1)

        return cls(
            how=rng.choice(list(How)),
            point=POINTS[seed % len(POINTS)],
            lasts_s=rng.choice([0.5, 1.5, 4.0, None]),
            again=rng.random() < 0.3,
            outbox=(
                rng.choice(["fallback", "fallback", "always"]),
                rng.choice(["fallback", "fallback", "always", "never"]),
            ),
            operations=(tuple(operation() for _ in range(5)), tuple(operation() for _ in range(3))),
            killed_after_s=rng.choice([None, None, 0.3, 1.1, 1.5, 3.0]),
            another_after_s=rng.choice([None, 0.5, 1.5, 3.0]),
            astray=(rng.random() < 0.2, rng.random() < 0.5),
        )


class Silence(Stage):
    """One seed."""

    def __init__(self, slot: Slot, seed: int, *, mistake: str = "") -> None:
        super().__init__(slot, mistake=mistake)
        self.draw = Draw.of(seed)
        self._rules: list[Rule] = []

    def play(self) -> None:
        draw = self.draw
        opens = draw.point == OPENING
        if opens:
            self._fall_silent()
        pauses = () if opens else (f"1:{draw.point}",)
        first = self.own(draw.operations[0], *pauses, outbox=draw.outbox[0])
        if not opens:
            self.pump(lambda: first.ended or first.at is not None)
            self._fall_silent()
        if draw.killed_after_s is not None:
            self.after(draw.killed_after_s, lambda: self._kill(first))
        if draw.another_after_s is not None:
            self.after(draw.another_after_s, self._another)
        if draw.astray[0]:
            choice = self.postgres.on("COMMIT", nth=2)
            (choice.reset_answer if draw.astray[1] else choice.reset_request)()
        first.go()
        self.pump(self._all_have_ended, draw.lasts_s)
        self._answer()
        if draw.again and not self.pump(self._all_have_ended, 1.0):
            self._fall_silent()
            self.pump(self._all_have_ended, 2.5)
            self._answer()
        self.pump(lambda: first.ended)
        self._another()

    def _all_have_ended(self) -> bool:
        # The last action is the second owner's opening.
        return all(owner.ended for owner in self.owners) and not self._later

    def _another(self) -> None:
        if len(self.owners) == 1:
            self.own(self.draw.operations[1], outbox=self.draw.outbox[1])

    def _kill(self, owner: Owner) -> None:
        owner.kill()
        self.note(f"{owner.name} is killed")

    def _fall_silent(self) -> None:
        every = self.kafka.on(nth=None)
        how = {How.HELD: every.hold_request, How.LOST: every.drop_request, How.UNANSWERED: every.hold_answer}
        self._rules.append(how[self.draw.how]())
        self.note(f"Kafka falls silent: {self.draw.how.value}")
        self.result.occurred += 1

    def _answer(self) -> None:
        while self._rules:
            rule = self._rules.pop()
            rule.withdraw()
            rule.release()
            self.note("Kafka answers again")

    def heal(self) -> None:
        self.act_now()
        self._answer()
        for owner in self.owners:
            owner.go()

    def _judge(self) -> None:
        super()._judge()
        if self.draw.astray[0]:
            return  # what is told of such an operation depends on where it was
        for owner, operations, outbox in zip(self.owners, self.draw.operations, self.draw.outbox, strict=False):
            for number, operation in enumerate(operations):
                could_wait = outbox != "never" and operation == Operation(MESSAGES)
                if could_wait and ("aborted", f"{owner.name}-{number}") in owner.told:
                    self.result.findings.append(f"{owner.name}-{number} could wait, and was aborted")
