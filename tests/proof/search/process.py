"""One process, step by step: claim, settle, initialise, then transactions. Each step is one request or one statement.

What happens next is never decided here: settling and doubt ask the product's functions, producers and dual writes move by
the product's tables, and what those do not allow is no step. The recipes around them (``dualwrite.recovery.settle``,
``claiming``, ``lane``, ``transaction``, ``resolving``) are retold as steps, since they run on threads and servers.
"""

from __future__ import annotations

from simulator.requests import NEVER_MS
from simulator.state import Broker

from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.settle_native import NativeKnowledge
from search.doubting import Doubting
from search.rules import Rules
from search.settling import Settling
from search.settling_native import NativeSettling
from search.stepping import Move, Step
from search.values import DONE, PLACES, STOPPED, Database, Process
from search.writing import Writing
from search.writing_native import NativeWriting

_SETTLING = {"claim", "settle", "mark", "repair"}
"""The positions of a settler; all others are an owner's."""
_WRITING = {Engine.LIBRDKAFKA: Writing, Engine.NATIVE: NativeWriting}


def _recipe(process: Process) -> type[Step]:
    if process.doing in _SETTLING:
        return NativeSettling if isinstance(process.knowledge, NativeKnowledge) else Settling
    return Doubting if process.doing == "resolve" else _WRITING[process.engine]


class Walk:
    """All steps of one process from one state.

    Args:
        rules: The rules.
        most: How many incarnations there may be; 0 for any number.
        verdicts: Whether the database can say what became of a transaction of its own (PostgreSQL).
        dies: Whether an owner ends with its first decision.
        one_by_one: Whether a settler asks the partitions one after the other.
        forgets: Whether markers may be skipped. If not, settlers, and librdkafka's owners, leave out the steps that look for that.
        native_timeout_ms: The time limit of native transactions.
        witnesses: In how many partitions a native state names an offset.
        answers_late: Whether a native owner reads the answer about ends some time after the leaders have given it.
        at_once: Whether owners send their decision with its COMMIT.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        most: int = 0,
        verdicts: bool = False,
        dies: bool = False,
        one_by_one: bool = False,
        forgets: bool = False,
        native_timeout_ms: int = NEVER_MS,
        witnesses: int = len(PLACES),
        answers_late: bool = False,
        at_once: bool = False,
    ) -> None:
        self.at_once = at_once
        self.native_timeout_ms = native_timeout_ms
        self.witnesses = witnesses
        self.answers_late = answers_late
        self.forgets = forgets
        self.rules = rules
        self.one_by_one = one_by_one
        self.most = most
        self.verdicts = verdicts
        self.dies = dies

    def moves(self, process: Process, database: Database, broker: Broker) -> list[Move]:
        """The steps, in a fixed order."""
        if process in {DONE, STOPPED}:
            return []
        step = _recipe(process)(self, process, database, broker)
        getattr(step, process.doing)()
        return step.moves

    def next_step(self, process: Process) -> str:
        """The next step of the process, for people."""
        if process.doing != "settle":
            return process.doing
        return Step(self, process, Database(), Broker()).settle_step(process.knowledge).value
