"""The parts of a state: one database, one Kafka, the processes that own a writer one after the other, and their blocks."""

from __future__ import annotations

from typing import Final, NamedTuple

SENDER: Final = 2
"""The row of the sender's id; those before it are the lanes'."""

Actor = tuple[str, int]
"""Who holds a lock: a process and its row."""
Tx = tuple[int, int, int]
"""A Kafka transaction: its row, the incarnation, its number there."""
Message = tuple[str, int, int]
"""A message: the block's name, its place in the block, its partition."""


class Block(NamedTuple):
    """A block of the script.

    Attributes:
        name: Its name.
        partitions: Of its messages, in order.
        outbox: The setting for this block alone; None: the writer's.
        savepoint: Whether its last message is produced in a savepoint, which may be rolled back.
    """

    name: str
    partitions: tuple[int, ...] = (0,)
    outbox: str | None = None
    savepoint: bool = False


class Owner(NamedTuple):
    """A process of the script: an owner of the writer.

    Attributes:
        name: Its name.
        outbox: The writer's setting.
        blocks: What each of its two lanes does.
        sends: How often it may try to send what waits.
    """

    name: str
    outbox: str
    blocks: tuple[tuple[Block, ...], tuple[Block, ...]]
    sends: int


class Row(NamedTuple):
    """The row of a lane or of the sender. ``count`` is raised by each decision of a block whose messages wait."""

    incarnation: int = 1
    owner: str = "P"
    state: Tx | None = None
    count: int = 0


class Database(NamedTuple):
    """What is committed, and who holds which lock on the mode. ``waiting`` has a number with each message, in order."""

    rows: tuple[Row, Row, Row] = (Row(), Row(), Row())
    later: bool = False
    shares: frozenset[Actor] = frozenset()
    alone: Actor | None = None
    waiting: tuple[tuple[int, Message], ...] = ()
    next_number: int = 1


class Kafka(NamedTuple):
    """Its partitions, and how transactions have ended: True is committed. ``known`` are the ids that have sent anything.

    ``skipped`` are transactions that have ended, and lack their marker in a partition; ``otherwise`` those that a later marker has ended
    there, and not as the coordinator says.
    """

    up: bool = True
    log: tuple[tuple[tuple[Message, Tx], ...], ...] = ((), ())
    ended: frozenset[tuple[Tx, bool]] = frozenset()
    known: frozenset[tuple[int, int]] = frozenset()
    skipped: frozenset[tuple[Tx, int]] = frozenset()
    otherwise: frozenset[tuple[Tx, int, bool]] = frozenset()


class Late(NamedTuple):
    """A COMMIT of a block without an answer, which the database may carry out until somebody locks the row."""

    block: str
    rows: tuple[tuple[int, Message], ...]
    count: int
    turns: bool


class Lane(NamedTuple):
    """One lane of a process, and the block on it.

    ``ready``: it has settled and may send; ``claimed``: its incarnation is known in the database alone; ``discarded``: it must be
    claimed anew. ``counted``: the row's count as the block's first statement has read it. ``turns``: the block makes the mode *later* in its decision. ``truth``: whether the COMMIT that was not answered
    has happened.
    """

    step: str = "idle"
    block: int = 0
    incarnation: int = 1
    readiness: str = "ready"
    transaction: Tx | None = None
    kept: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    turns: bool = False
    truth: bool | None = None
    counted: int = 0
    late: Late | None = None


class FloorState(NamedTuple):
    """What a sender keeps of its :class:`dualwrite.stores.sql.outbox.Floor`, and how many reads there were."""

    number: int = 0
    candidate: int | None = None
    unseen: tuple[tuple[str, object], ...] = ()
    proved_in: int | None = None
    reads: int = 0


class Flying(NamedTuple):
    """A COMMIT of a sender's without an answer, which the database may carry out until somebody locks the row."""

    took: tuple[tuple[int, Message], ...]
    transaction: Tx | None
    last: bool


class Sender(NamedTuple):
    """The sender of a process. ``took`` is what it has read, ``last`` whether it ends *later*."""

    step: str = "idle"
    left: int = 0
    incarnation: int = 1
    readiness: str = "ready"
    transaction: Tx | None = None
    took: tuple[tuple[int, Message], ...] = ()
    last: bool = False
    floor: FloorState = FloorState()
    flying: Flying | None = None


class Process(NamedTuple):
    """One process. ``mode_known``: a writer of ``never`` has seen that nothing waits; one of ``always`` has turned the mode."""

    name: str
    state: str
    lanes: tuple[Lane, Lane]
    sender: Sender
    mode_known: bool = True


class Written(NamedTuple):
    """What became of a block, for the judge. ``after`` were decided when it began. ``gone``: a restored database has lost it."""

    name: str
    decided: bool
    after: frozenset[str]
    messages: tuple[Message, ...]
    gone: bool = False


class Budgets(NamedTuple):
    """How often each misfortune may still happen.

    Attributes:
        outage: Kafka goes away.
        answer: The COMMIT of a decision is not answered.
        abort: A block fails in the user's code.
        death: An owner dies, and the database ends its sessions.
        restore: The database is put back to a copy, which may be made at any moment.
        forgotten: The broker skips a marker in one partition.
    """

    outage: int = 1
    answer: int = 0
    abort: int = 0
    death: int = 0
    restore: int = 0
    forgotten: int = 0


class State(NamedTuple):
    """Everything. ``copy`` is a database, and the blocks that it has; ``restored``: it is in place of the real one."""

    database: Database
    kafka: Kafka
    processes: tuple[Process, ...]
    written: tuple[Written, ...]
    budgets: Budgets
    copy: tuple[Database, frozenset[str]] | None = None
    restored: bool = False
    fault: str | None = None
