"""A process that writes units until it is killed, and an image that notices whatever of them is not whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import exc

from dualwrite import (
    CompletionPending,
    DecidedTransactionLost,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.errors import IllegalStateError, OutcomeUnverifiable
from dualwrite.units import UnitRecord, UnitWriter
from harness.worker import FENCED, LOST, OPERATIONS, UNAVAILABLE

if TYPE_CHECKING:
    from sqlalchemy import Engine

LONGEST = 9
"""How many records a unit has at most: with parts of two records, five transactions."""


class Dropped(Exception):
    """The error of a block whose unit is aborted."""


def write_units(job: dict, engine: Engine, tell: Callable[[str], None]) -> int:
    """Write units into one partition, a row with the end of each; every fourth one is dropped."""
    chance = random.Random(job["name"])
    try:
        with UnitWriter(
            job["topic"],
            job["partition"],
            kafka=job["kafka"],
            database=engine,
            part_records=2,
            timeout_s=job["timeout_s"],
        ) as writer:
            tell("open")
            for number in range(job["units"]):
                _write(writer, f"{job['name']}.{number}", chance.randint(1, LONGEST), chance.random() < 0.25, tell)
    except Fenced:
        return FENCED
    except (
        Unavailable,
        TransactionAborted,
        TransactionInDoubt,
        CompletionPending,
        IllegalStateError,
        exc.DBAPIError,
    ):
        return UNAVAILABLE
    except (DecidedTransactionLost, OutcomeUnverifiable):
        return LOST
    return 0


def _write(writer: UnitWriter, name: str, size: int, drops: bool, tell: Callable[[str], None]) -> None:
    tell(f"begun {name}")
    try:
        with writer.unit(name, at_end=partial(_insert, name)) as unit:
            for index in range(size):
                unit.produce(f"{name} {size}".encode(), f"{name} {index}".encode())
            if drops:
                raise Dropped
    except (Dropped, TransactionAborted) as error:
        tell(f"aborted {name}")
        if not isinstance(error, Dropped):
            raise
    except CompletionPending:
        tell(f"ended {name}")
        raise
    else:
        tell(f"ended {name}")


def _insert(name: str, tx: object) -> None:
    tx.connection.execute(OPERATIONS.insert().values(id=name))  # type: ignore[attr-defined]


class WholeUnits:
    """The names of the units that are shown.

    Attributes:
        wrong: What should not have been shown.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._shown: set[str] = set()
        self._change: Counter[tuple[str, int]] = Counter()

    def apply(self, record: UnitRecord) -> None:
        name, size = (record.value or b"").decode().split()
        self._change[name, int(size)] += 1

    def publish(self) -> None:
        for (name, size), count in self._change.items():
            if count != size or len(self._change) > 1:
                self.wrong.append(f"{count} of {size} records of {name}, beside {len(self._change) - 1} others")
            if name in self._shown:
                self.wrong.append(f"{name} a second time")
            self._shown.add(name)
        self._change.clear()

    def revert(self) -> None:
        self._change.clear()

    def contents(self) -> frozenset[str]:
        return frozenset(self._shown)
