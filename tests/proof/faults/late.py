"""Delayed EndTxn (KAFKA-17754): each first copy arrives when the next transaction has begun, of the same owner or another.

After every decision the EndTxn is held. Either the client repeats the request, is answered "done", and continues; or the owner
is killed and another one settles. In the next transaction, between its messages, the held one is let go. With librdkafka such
a producer must have been discarded; a native EndTxn names a transaction that has ended, and must hit nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from dualwrite.testing import Api
from dualwrite.testing.proxy import Rule
from faults.stage import Owner, Slot, Stage
from faults.work import BOTH, MESSAGES, Operation

ROUNDS = 6
ARRIVES_S = 20.0


class Late(Stage):
    """One id; each of its transactions but the last has an EndTxn that is late."""

    def __init__(self, slot: Slot, seed: int, *, mistake: str = "", rounds: int = ROUNDS) -> None:
        # librdkafka's retry comes soon, so that each EndTxn is one that may have been sent twice.
        soon: dict[str, object] = {"retry.backoff.ms": 400, "retry.backoff.max.ms": 400}
        self._exact = slot.context.producer_engine == "native"
        super().__init__(slot, mistake=mistake, settings={} if self._exact else soon)
        self._kept: set[str] = set()
        self._rng = random.Random(f"late {seed}")
        self._rounds = rounds
        self._held: list[Rule] = []
        self._begun: dict[str, Rule] = {}

    def play(self) -> None:
        self._left = self._rounds
        self._owner, self._number = self._another(), 0
        self._late: Rule | None = None
        while not self._owner.ended:
            self.pump(lambda: self._owner.ended or self._waits())
            point = (self._owner.at or "").partition(":")[2]
            if point == "write.produced":
                self._in_transaction()
            elif point == "write.decided":
                self._decided()

    def _waits(self) -> bool:
        return (self._owner.at or "").startswith(f"{self._number}:")

    def _in_transaction(self) -> None:
        if self._late is not None:
            self._let_arrive(self._late, f"{self._owner.name}-{self._number}")
            self._late = None
        self._owner.go()
        self.pump(lambda: self._owner.at is not None or self._owner.ended or self._moved_on())
        if not self._waits():  # it was aborted
            self._number += 1

    def _decided(self) -> None:
        self._left -= 1
        self._number += 1
        if self._left <= 0:
            self._owner.go()
            return
        held = self._late = self.kafka.on(Api.END_TXN).hold_request()
        self._held.append(held)
        for follower in (f"{self._owner.name}-{self._number}", f"w{len(self.owners) + 1}-0"):
            if follower not in self._begun:
                self._begun[follower] = self.kafka.on(Api.PRODUCE, containing=follower.encode()).watch()
        self._owner.go()
        self.pump(lambda: bool(held.taken) or self._owner.ended, 20)
        if self._rng.random() < 0.3:
            self._owner.kill()
            self._owner, self._number = self._another(), 0
        elif self._rng.random() < 0.7:
            held.cut()

    def _moved_on(self) -> bool:
        return any(word == "aborted" and what.endswith(f"-{self._number}") for word, what in self._owner.told)

    def _another(self) -> Owner:
        # One in three aborts: had the late EndTxn committed its first message, a message without a row would show.
        count = 2 * self._left
        kinds = [Operation(self._rng.choice([MESSAGES, BOTH]), self._rng.random() < 0.33) for _ in range(count)]
        kinds[0] = Operation(MESSAGES, kinds[0].abort)
        name = f"w{len(self.owners) + 1}"
        self._kept |= {f"{name}-{number}" for number, operation in enumerate(kinds) if not operation.abort}
        points = [f"{number}:{point}" for number in range(count) for point in ("write.produced", "write.decided")]
        return self.own(tuple(kinds), *points)

    def _let_arrive(self, held: Rule, follower: str) -> None:
        self._begun[follower].wait_answered(timeout_s=ARRIVES_S)
        held.release()
        held.wait_answered(timeout_s=ARRIVES_S)
        self.note(f"arrived late: {held.taken[0]}")
        self.result.occurred += 1

    def _judge(self) -> None:
        super()._judge()
        if self._exact:  # the broker knows by its epoch that a late request is not about this transaction
            told = [report for owner in self.owners for report in owner.told]
            self.result.findings += hit_by_a_late_request(told, self._kept)

    def heal(self) -> None:
        self.act_now()
        for rule in self._held:
            rule.withdraw()
            rule.release()
        for owner in self.owners:
            if owner.at is not None:
                owner.go()


def hit_by_a_late_request(told: Iterable[tuple[str, str]], kept: set[str]) -> list[str]:
    """Findings about aborted operations.

    Args:
        told: What the owners were told, and of which operation.
        kept: The operations whose blocks do not raise.
    """
    aborted = {operation for word, operation in told if word == "aborted"}
    return [f"{operation} was aborted by a request that came late" for operation in sorted(aborted & kept)]
