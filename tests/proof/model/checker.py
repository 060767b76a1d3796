"""Checks that must hold whenever everything has come to rest, over the simulator's own memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from simulator.partition import committed_values, last_stable_offset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simulator.scheduler import Simulation

    from dualwrite.protocol.values import StateRow
    from model.owners import Told, Write


class Finding(AssertionError):
    """The promise is broken."""


def check(simulation: Simulation, writes: Iterable[Write], told: Told, excused: set[int]) -> None:
    """Raise :class:`Finding` unless both sides agree.

    Args:
        simulation: At rest.
        writes: All dual writes so far.
        told: What processes were told of losses.
        excused: Numbers of the writes whose Kafka transaction was ended by the environment, not by the protocol.
    """
    read = {"__consumer_offsets", simulation.broker.group_topic}
    visible = {
        found.topic_partition: committed_values(found)
        for found in simulation.broker.partitions
        if found.topic_partition[0] not in read
    }
    for found in simulation.broker.partitions:
        if last_stable_offset(found) != found.log_end:
            raise Finding(f"{found.topic_partition} is held back at {last_stable_offset(found)} of {found.log_end}")
    if simulation.database.prepared:
        raise Finding(f"{list(simulation.database.prepared)} are prepared in the database, and nobody ends them")
    seen = Counter(name for values in visible.values() for name in values)
    committed = {write.number: rows for write, rows in decided_writes(simulation)}
    losses = told.losses | {state for _, state in simulation.database.incidents}
    rows = Counter(simulation.database.user_rows)
    writes = list(writes)
    excused = excused | _with_their_groups(simulation, excused)
    for write in writes:
        _check_write(write, committed.get(write.number), seen, rows, losses, excused)
    unknown = seen.keys() - {name for write in writes for name, _ in write.messages}
    if unknown:
        raise Finding(f"readers see {unknown}, which nobody has written")
    _check_order(simulation, writes, visible)
    _check_callers(simulation)


def decided_writes(simulation: Simulation) -> Iterator[tuple[Write, tuple[StateRow, ...]]]:
    """All dual writes that the database has, in the order of the decisions, each with the state rows that name it."""
    for tag, rows in simulation.database.committed:
        for write in _writes_of(tag):
            yield write, tuple(row for row in rows if row.transactional_id == write.lane)


def _writes_of(tag) -> tuple[Write, ...]:
    """The dual writes that one database transaction has decided: those of a group, or one."""
    return getattr(tag, "writes", (tag,))


def _with_their_groups(simulation: Simulation, excused: set[int]) -> set[int]:
    """The writes that share a Kafka transaction with these: a unit may have sent its messages after it was ended."""
    groups = [{write.number for write in _writes_of(tag)} for tag, _ in simulation.database.committed]
    return {number for group in groups if group & excused for number in group}


def _check_write(write, wrote, seen, rows, losses, excused) -> None:
    what = f"write {write.number} of {write.owner} (told {write.told})"
    names = [name for name, _ in write.messages]
    shown = [name for name in names if seen[name]]
    twice = [name for name in names if seen[name] > 1]
    if twice:
        raise Finding(f"{what}: readers see {twice} twice")
    decided = wrote is not None
    foreign = {row.owner for row in wrote or ()} - {write.owner}
    if foreign:
        raise Finding(f"{what}: decided under an incarnation that {foreign} have claimed")
    states = {str(row.prepared) for row in wrote or ()}
    lost = bool(states & losses)
    own_rows = (names or [f"row {write.number}"]) if write.rows else []
    if any(rows[name] != decided for name in own_rows):
        raise Finding(
            f"{what}: {'committed' if decided else 'rolled back'}, the rows are {[rows[name] for name in own_rows]}"
        )
    _check_told(what, write.told, decided=decided, lost=lost)
    if not decided:
        if shown:
            raise Finding(f"{what}: not in the database, and readers see {shown}")
    elif lost:
        _check_loss(what, write, names, shown, excused)
    elif shown != names:
        raise Finding(f"{what}: in the database, readers see {shown} of {names}, and nobody was told")


def _check_told(what, told, *, decided: bool, lost: bool) -> None:
    if told in {"committed", "decided", "completed", "lost"} and not decided:
        raise Finding(f"{what}: the database does not have it")
    if told == "aborted" and decided:
        raise Finding(f"{what}: the database has it")
    if told == "lost" and not lost:
        raise Finding(f"{what}: its loss is recorded nowhere")
    if told == "completed" and lost:
        raise Finding(f"{what}: on record as lost")


def _check_loss(what, write, names, shown, excused) -> None:
    if write.number not in excused:
        raise Finding(f"{what}: told as lost, while nothing but the protocol could have lost it; readers see {shown}")
    if shown == names:
        raise Finding(f"{what}: told as lost, and readers see all of it")


def _check_callers(simulation) -> None:
    """The units of one caller are decided in the order in which they were submitted."""
    newest: dict[tuple[str, str], int] = {}
    for write, _ in decided_writes(simulation):
        if write.key is not None:
            before = newest.get((write.owner, write.key), 0)
            if write.number < before:
                raise Finding(
                    f"write {write.number} of {write.owner}: decided after {before}, which {write.key} submitted later"
                )
            newest[write.owner, write.key] = write.number


def _check_order(simulation, writes, visible) -> None:
    lane_of = {name: write.lane for write in writes for name, _ in write.messages}
    expected = defaultdict(list)
    for write, _ in decided_writes(simulation):
        for name, partition in write.messages:
            expected[write.lane, partition].append(name)
    for (_, partition), names in visible.items():
        for lane in {lane_of[name] for name in names}:
            shown = [name for name in names if lane_of[name] == lane]
            in_order = [name for name in expected[lane, partition] if name in set(shown)]
            if shown != in_order:
                raise Finding(f"{lane} in partition {partition}: readers see {shown}, decided were {in_order}")
