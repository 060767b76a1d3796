"""One process, step by step: claim, settle, initialise, then transactions. Each step is one request or one statement.

What happens next is never decided here: settling and doubt ask the product's functions, producers and dual writes move by
the product's tables, and what those do not allow is no step. The recipes around them (``dualwrite.recovery.settling.settle``,
``claiming``, ``lane``, ``transaction``, ``resolving``) are retold as steps, since they run on threads and servers.
"""

from __future__ import annotations

from simulator.state import Broker

from search.doubting import Doubting
from search.rules import Rules
from search.settling import Settling
from search.stepping import Move
from search.values import Database, Process
from search.writing import Writing

_RECIPES = {"claim": Settling, "settle": Settling, "mark": Settling, "repair": Settling, "resolve": Doubting}
"""The positions of a process; all others are writing."""


class Walk:
    """All steps of one process from one state.

    Args:
        rules: The rules.
        most: How many incarnations there may be; 0 for any number.
        verdicts: Whether the database can say what became of a transaction of its own (PostgreSQL).
        dies: Whether an owner ends with its first decision.
        one_by_one: Whether a settler asks the partitions one after the other.
        forgets: Whether markers may be skipped. If not, settlers and owners leave out the steps that look for that.
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
    ) -> None:
        self.forgets = forgets
        self.rules = rules
        self.one_by_one = one_by_one
        self.most = most
        self.verdicts = verdicts
        self.dies = dies

    def moves(self, process: Process, database: Database, broker: Broker) -> list[Move]:
        """The steps, in a fixed order."""
        step = _RECIPES.get(process.doing, Writing)(self, process, database, broker)
        getattr(step, process.doing)()
        return step.moves
