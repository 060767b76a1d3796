"""The recipes of a batch: participants that prepare and hand over, drivers that decide with ``dualwrite.sinks.batches``.

They do what Spark's tasks and driver do, in the same order. Until the decision, a participant's row is one of another name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from harness.simulated import TIMEOUT_S, TOPIC, Here
from model.owners import OF_THE_USERS_STATEMENT
from simulator.connection import SimulatedConnection
from simulator.database import Session

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.kafka.config import EngineName
from dualwrite.protocol.batches import BatchState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.settle import settle
from dualwrite.sinks.batches import Decision
from dualwrite.writing.dual_write import Ending
from dualwrite.writing.lane import Lane
from search.batches.lab import Recipe

SLOTS: Final = ("a", "b")
"""The participants' ids. The one at position n writes to partition n."""
_BATCH: Final = "the batch's own row"


def written_by(run: int) -> str:
    """The batch's own row, as this run writes it."""
    return f"batch, run {run}"


def staged(label: str) -> str:
    """A participant's row before the decision."""
    return f"staged {label}"


@dataclass(frozen=True)
class HandedOver:
    """The part that a participant has handed over."""

    label: str
    transactional_id: str
    incarnation: int
    namespace: str
    prepared: PreparedTxnState


class Told(NamedTuple):
    """A driver's report to its caller about its run of the batch."""

    run: int
    outcome: str


class BatchOfTwo:
    """The batch as its driver knows it: :class:`dualwrite.sinks.batches.Batch`."""

    def __init__(self, here: Here, run: int, parts: Sequence[HandedOver]) -> None:
        self._here = here
        self._run = run
        self._parts = parts
        self.name = f"batch, run {run}"

    def record(self, connection: SimulatedConnection) -> bool:
        """As a table with a unique key does: waits for another session that inserts the row."""

        def insert(session: Session) -> bool:
            database = self._here.simulation.database
            database.lock(session, _BATCH)
            if is_written(database.user_rows):
                return False
            database.write_user_row(session, written_by(self._run))
            return True

        return connection.run("INSERT of the batch's own row", insert)

    def require_held(self, connection: SimulatedConnection) -> None:
        """There are no leases here: a participant waits for as long as it takes."""

    def bring(self, connection: SimulatedConnection) -> None:
        def insert(session: Session) -> None:
            for part in self._parts:
                self._here.simulation.database.write_user_row(session, part.label)

        connection.run("INSERT of the parts' rows", insert)

    def decided(self) -> None:
        """Told at the end."""

    def is_written(self) -> bool:
        return look(self._here)

    def settle(self, completed: Collection[str]) -> None:
        claim_and_settle(self._here, [slot for slot in SLOTS if slot not in completed])


def is_written(user_rows: Collection[object]) -> bool:
    """Whether the batch's own row is among the committed ones."""
    return any(written_by(run) in user_rows for run in (1, 2))


def look(here: Here) -> bool:
    """SELECT of the batch's own row."""
    used = SimulatedConnection(here.simulation)
    try:
        answer = here.simulation.execute(
            used.session, "SELECT of the batch's own row", lambda: is_written(here.simulation.database.user_rows)
        )
    finally:
        used.close()
    return bool(answer)


def claim_and_settle(here: Here, slots: Sequence[str]) -> None:
    """As a driver does with whatever is left of its batch."""
    if slots:
        rows = claim_rows(here.context, slots, Deadline(TIMEOUT_S))
        settle(rows, coordinator=here.context.coordinator, store=here.context.store, deadline=Deadline(TIMEOUT_S))


def prepare(here: Here, lane: Lane, label: str) -> HandedOver:
    """One task: a row that nobody reads yet, and an open transaction with a message."""
    row = lane.row
    with here.block(lane, Ending.HAND_OVER) as transaction:
        here.connection.insert(staged(label))
        transaction.produce(TOPIC, label, partition=SLOTS.index(row.transactional_id))
    assert transaction.prepared is not None
    return HandedOver(label, row.transactional_id, row.incarnation, row.namespace, transaction.prepared)


def participant(recipe: Recipe, here: Here, slot: str) -> None:
    """A worker: it prepares when it is told to; then, with the same producer if it may, once more."""
    lane = here.ready(slot)
    recipe.await_command()
    with suppress(DualWriteError, *OF_THE_USERS_STATEMENT):
        recipe.tell(prepare(here, lane, f"1{slot}"))
        recipe.await_command()
        if lane.may_go_on(next(iter(here.context.store.read([slot])), None)):
            recipe.tell("goes on")
            prepare(here, lane, f"never decided {slot}")


def driver(recipe: Recipe, here: Here) -> None:
    """It decides on what it is given."""
    parts = recipe.await_command()
    decide(recipe, here, 1, parts)


def second_driver(recipe: Recipe, here: Here) -> None:
    """The batch runs again: what the first run has left is settled; unless the batch is written, all is done again."""
    with suppress(DualWriteError, *OF_THE_USERS_STATEMENT):
        claim_and_settle(here, SLOTS)
        if look(here):
            recipe.tell(Told(2, "written"))
            return
        parts = [prepare(here, here.ready(slot), f"2{slot}") for slot in SLOTS]
        decide(recipe, here, 2, parts)


def recoverer(recipe: Recipe, here: Here) -> None:
    """It settles whatever is there, and writes nothing."""
    with suppress(DualWriteError):
        claim_and_settle(here, SLOTS)
        recipe.tell(Told(1, "written" if look(here) else "aborted"))


def decide(recipe: Recipe, here: Here, run: int, parts: Sequence[HandedOver]) -> None:
    """As a driver does: decide; after a failure settle what was prepared."""
    batch = BatchOfTwo(here, run, parts)
    decision = Decision(
        batch,
        parts,
        here.context,
        connect=lambda: nullcontext(here.connection),
        timeout_s=TIMEOUT_S,
        idle_s=TIMEOUT_S / 2,
    )
    try:
        decision.run()
    except (DualWriteError, *OF_THE_USERS_STATEMENT):
        if decision.state is BatchState.UNDECIDED:
            recipe.tell(Told(run, "aborted"))
            batch.settle(())
    else:
        recipe.tell(Told(run, "written"))


def programs(engine: EngineName) -> dict[str, Callable[[Recipe], object]]:
    """The recipes by name, with the engine of their producers."""
    bodies: dict[str, Callable[[Recipe, Here], object]] = {
        **{f"participant {slot}": partial(participant, slot=slot) for slot in SLOTS},
        "driver": driver,
        "second driver": second_driver,
        "recoverer": recoverer,
        "settling": settling,
    }
    return {name: partial(_inside, body=body, engine=engine) for name, body in bodies.items()}


def _inside(recipe: Recipe, body: Callable[[Recipe, Here], Hashable], engine: EngineName) -> None:
    body(recipe, Here(recipe.simulation, recipe, engine))


def settling(recipe: Recipe, here: Here) -> None:
    """A fresh process that settles everything, to see what becomes of it."""
    del recipe
    claim_and_settle(here, SLOTS)
