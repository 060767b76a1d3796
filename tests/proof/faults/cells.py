"""Which cases there are, and what a seed draws in each. Pure: the same cell and seed always give the same case."""

from __future__ import annotations

import enum
import itertools
import random
from dataclasses import dataclass

from dualwrite.kafka.config import EngineName
from dualwrite.testing import Api
from faults.work import BOTH, MESSAGES, OFFSETS, Operation

COMMIT = "COMMIT"
TWO_PHASE = "InitProducerId v6"
"""As brokers with KIP-939's two-phase commit are asked for a producer id."""
KEYS: dict[str, int] = {
    "Produce": Api.PRODUCE,
    "Metadata": Api.METADATA,
    "FindCoordinator": Api.FIND_COORDINATOR,
    "InitProducerId": Api.INIT_PRODUCER_ID,
    TWO_PHASE: Api.INIT_PRODUCER_ID,
    "AddPartitionsToTxn": Api.ADD_PARTITIONS_TO_TXN,
    "AddOffsetsToTxn": Api.ADD_OFFSETS_TO_TXN,
    "EndTxn": Api.END_TXN,
    "TxnOffsetCommit": Api.TXN_OFFSET_COMMIT,
    "DescribeProducers": Api.DESCRIBE_PRODUCERS,
    "DescribeTransactions": Api.DESCRIBE_TRANSACTIONS,
}
OF_SETTLING = {"Metadata", "FindCoordinator", "InitProducerId", TWO_PHASE, "DescribeProducers", "DescribeTransactions"}
OF_LIBRDKAFKA = {"AddPartitionsToTxn", "AddOffsetsToTxn"}
"""The native engine never sends these: brokers add what a transaction writes to by themselves (KIP-890)."""


class Series(enum.Enum):
    """What is played beside the cells, by its seed alone."""

    LATE = "late EndTxn"
    SILENCE = "silence"


class Fault(enum.Enum):
    DROP_REQUEST = "drop request"
    DROP_ANSWER = "drop answer"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    RESET = "reset"


class Phase(enum.Enum):
    BEFORE = "before"
    """From the opening of the writer until the COMMIT of its second operation is about to be sent."""
    DURING = "during"
    """That COMMIT is sent, its owner has no answer yet; meanwhile another owner opens a writer, and settles."""
    AFTER = "after"
    """The owner has the COMMIT's answer: it completes and goes on, or is killed and another one settles."""


@dataclass(frozen=True)
class Cell:
    """A kind of request, what happens to one of them, and when."""

    request: str
    fault: Fault
    phase: Phase

    def __str__(self) -> str:
        return f"{self.request}/{self.fault.value}/{self.phase.value}"


def requests_of(engine: EngineName) -> list[str]:
    """The kinds of requests that an engine and its settlers send to Kafka."""
    others = OF_LIBRDKAFKA if engine == "native" else {TWO_PHASE}
    return [request for request in KEYS if request not in others]


def cells_of(engine: EngineName) -> list[Cell]:
    """All cells of an engine."""
    return [Cell(*cell) for cell in itertools.product(requests_of(engine), Fault, Phase)] + [
        # A COMMIT is the decision: it has no other phase.
        Cell(COMMIT, fault, Phase.DURING)
        for fault in Fault
        if fault is not Fault.DUPLICATE  # a session of PostgreSQL is one stream, nothing in it can come twice
    ]


@dataclass(frozen=True)
class Draw:
    """The choices of the seed.

    Attributes:
        nth: Which of the requests in that phase.
        from_opening: Whether those of the opening count (before the decision).
        delay_s: How long a delayed request or answer is held.
        cut: Whether the client's connection is cut while its request is held: it asks again, and the first copy comes late.
        answer: Whether it is the answer that is delayed, or whose arrival resets the connection.
        kill: Whether the owner is killed when the fault strikes.
        another: Whether another owner opens a writer then.
        settled_by_another: Whether, after the decision, the owner is killed and another one settles.
        decided: Whether the COMMIT that is held has reached the database (during the decision).
        told: Whether its answer comes in the end, or the connection is cut.
        operations: Of the first owner; the second of them is the one that the phases refer to.
        others: Of each other owner.
        outbox: The owners' setting.
    """

    nth: int
    from_opening: bool
    delay_s: float
    cut: bool
    answer: bool
    kill: bool
    another: bool
    settled_by_another: bool
    decided: bool
    told: bool
    operations: tuple[Operation, ...]
    others: tuple[Operation, ...]
    outbox: str

    @classmethod
    def of(cls, cell: Cell, seed: int, engine: EngineName, *, certain: bool = False) -> Draw:
        """The draw of a seed.

        Args:
            cell: The cell.
            seed: From 0.
            engine: The producers' engine.
            certain: Whether chances are kept small that no such request comes.
        """
        rng = random.Random(f"{cell} {seed} {certain}")
        kinds = [MESSAGES, MESSAGES, BOTH]
        if cell.request in {"AddOffsetsToTxn", "TxnOffsetCommit"}:
            kinds = [BOTH, OFFSETS]
        elif cell.request == "DescribeProducers":
            # Before a decision, librdkafka's producers ask for it only if there are no messages.
            rare = engine != "native" and cell.phase is Phase.BEFORE
            kinds = [OFFSETS] if rare or certain else [MESSAGES, BOTH, OFFSETS]
        aborts = cell.request == "EndTxn" and cell.phase is Phase.BEFORE

        def operation(number: int) -> Operation:
            return Operation(rng.choice(kinds), abort=(number == 1 and aborts) or (number == 2 and rng.random() < 0.2))

        return cls(
            nth=1 if certain else rng.choice([1, 1, 1, 2, 2, 3]),
            from_opening=not aborts and (certain or rng.random() < (0.8 if cell.request in OF_SETTLING else 0.3)),
            delay_s=rng.choice([0.05, 0.3, 0.7, 1.3, 2.0]),
            cut=rng.random() < 0.4,
            answer=rng.random() < 0.4,
            kill=rng.random() < 0.2,
            another=rng.random() < 0.2,
            settled_by_another=certain or rng.random() < (0.9 if cell.request in OF_SETTLING else 0.3),
            decided=certain or rng.random() < 0.8,
            told=rng.random() < 0.6,
            operations=tuple(operation(number) for number in range(3)),
            others=(Operation(rng.choice(kinds)), Operation(rng.choice(kinds))),
            outbox=rng.choice(["never", "fallback"]),
        )
