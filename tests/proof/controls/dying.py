"""A process that writes in one way, and dies at a given point."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine, select

from controls.ways import OPERATIONS, WAYS, OwnerContext
from dualwrite.testing import Journal

if TYPE_CHECKING:
    from sqlalchemy import Engine

OPERATIONS_PER_RUN: Final = 3


@dataclass(frozen=True)
class Death:
    """Where one run is killed.

    Attributes:
        run: Its number.
        step: After which step.
        position: Of which of its operations.
    """

    run: int
    step: str
    position: int


@dataclass(frozen=True)
class Job:
    """The job of a process: recover and finish the run before, begin another one and die in it.

    Attributes:
        way: Which way.
        kafka: librdkafka's configuration.
        url: The database.
        topic: The topic.
        journal: Path of the journal.
        before: The run to finish, if any.
        death: The run to die in; None: end well.
    """

    way: str
    kafka: dict[str, Any]
    url: str
    topic: str
    journal: str
    before: int | None
    death: Death | None


def plan(way: str, runs: int, seed: int) -> list[Death]:
    """As many runs for each step of a way, shuffled, each killed in one of its operations."""
    chance = random.Random(f"{seed} {way}")
    steps = [step for step in WAYS[way].steps for _ in range(runs)]
    chance.shuffle(steps)
    return [Death(number, step, chance.randrange(OPERATIONS_PER_RUN)) for number, step in enumerate(steps)]


def work(job: Job) -> None:
    """The process."""
    doomed = False

    def reach(step: str) -> None:
        if doomed and job.death is not None and step == job.death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = create_engine(job.url)
    way = WAYS[job.way](OwnerContext(job.kafka, engine, job.topic, "orders", reach))
    with Journal(job.journal) as journal:
        for run in (job.before, job.death.run if job.death else None):
            for position in range(OPERATIONS_PER_RUN if run is not None else 0):
                operation = f"{run}-{position}"
                doomed = job.death is not None and (run, position) == (job.death.run, job.death.position)
                journal.begun(operation)
                if not _is_there(engine, operation):
                    way.write(operation)
                journal.acknowledged(operation)
    way.close()


def _is_there(engine: Engine, operation: str) -> bool:
    with engine.connect() as connection:
        return connection.execute(select(OPERATIONS).where(OPERATIONS.c.id == operation)).first() is not None
