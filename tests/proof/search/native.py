"""Explores every interleaving of settling a native transaction: the product's decisions, over a small broker.

:mod:`dualwrite.protocol.settle_native` decides; this module holds the broker's rules (``TransactionCoordinator.endTransaction``
under transaction version 2, KIP-890), one row, an owner that may be alive, and settlers that may stop at any step.

The owner has decided S, under epoch 0, in both partitions. It ends S, and may begin an undecided transaction U, under epoch 1,
in one of them, once :mod:`dualwrite.protocol.settle` says so. From the claim on it begins nothing. Markers go out one partition at a time, and may be forgotten
(KAFKA-20734). Requests may be late. Every state that is reached is finished by a new settler, alone; then the late requests
arrive, in every order; then it is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

from dualwrite.protocol import settle_native
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended, EndStep, next_native_end_step
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep, to_repair
from dualwrite.protocol.values import (
    NEVER_MS,
    EndAnswer,
    LogProof,
    OpenTransaction,
    Outcome,
    ShownProducer,
    TransactionStatus,
    TransactionView,
)

Status = TransactionStatus
PARTITIONS = (("t", 0), ("t", 1))
S_OFFSET, U_OFFSET = 10, 20
_PREPARED = {True: Status.PREPARE_COMMIT, False: Status.PREPARE_ABORT}
_COMPLETE = {Status.PREPARE_COMMIT: Status.COMPLETE_COMMIT, Status.PREPARE_ABORT: Status.COMPLETE_ABORT}
_ENDED = {True: Status.COMPLETE_COMMIT, False: Status.COMPLETE_ABORT}
_LONGEST = 80  # steps that a settler may take alone


def prepared(*, witnesses: int = 2) -> PreparedTxnState:
    offsets = {key: S_OFFSET if index < witnesses else None for index, key in enumerate(PARTITIONS)}
    return PreparedTxnState.native(0, 0, 1, offsets, {"t": "id"})


@dataclass(frozen=True)
class Log:
    """One partition: the transactions open there, the producer's epoch, and what has ended how."""

    open: frozenset[str] = frozenset()
    epoch: int = -1
    committed: frozenset[str] = frozenset()
    aborted: frozenset[str] = frozenset()

    def marked(self, epoch: int, *, committed: bool) -> Log:
        return Log(
            frozenset(),
            max(epoch, self.epoch),
            self.committed | self.open if committed else self.committed,
            self.aborted if committed else self.aborted | self.open,
        )


@dataclass(frozen=True)
class Request:
    """A request on its way: ``EndTxn`` (commit or abort), or the owner's ``Produce`` of U."""

    kind: str
    epoch: int = -1
    partition: int = -1


@dataclass(frozen=True)
class Settler:
    known: NativeKnowledge
    adds: tuple[int, bool] | None = None  # the epoch under which it has added partitions, and how it will end them
    is_done: bool = False


@dataclass(frozen=True)
class State:
    status: Status = Status.ONGOING
    epoch: int = 0
    due: frozenset[int] = frozenset({0, 1})  # partitions in the transaction; in Prepare...: markers still to be written
    logs: tuple[Log, Log] = (Log(frozenset("S"), 0), Log(frozenset("S"), 0))
    fence: int | None = None
    recorded: Outcome | None = None
    is_settled: bool = False
    is_claimed: bool = False
    owner: str = "ends S"
    settlers: tuple[Settler, ...] = ()
    late: tuple[Request, ...] = ()
    forgets: int = 0
    times_out: int = 0
    delays: int = 0
    is_limited: bool = False  # whether the transaction timeout is finite
    has_timed_out: bool = False
    has_forgotten: bool = False


_S_IN = tuple(PreparedTxnState.native(0, 0, 1, {key: S_OFFSET}, {"t": "id"}) for key in PARTITIONS)


def is_end_known(s: State, partition: int) -> bool:
    """The product's decision on what the leader of a partition shows after S has been committed."""
    log = s.logs[partition]
    shown = {PARTITIONS[partition]: ShownProducer(log.epoch, S_OFFSET if log.open else None)}
    return next_native_end_step(Ended(_S_IN[partition], committed=True), shown, early=True) is EndStep.KNOWN


@dataclass(frozen=True)
class Rules:
    """The parts that a planted mistake replaces.

    Attributes:
        next_step: The settlers' decision.
        compares_fence: Whether the row's fence is written only if it is as it was read.
        knows_end: Whether the owner may write U to a partition. It asks that leader alone, by the rule of the product.
        retires: Whether a settler fences by ``InitProducerId`` instead of ``EndTxn`` (abort).
        to_repair: What is repaired, and how.
    """

    next_step: Callable[[NativeKnowledge], NativeStep] = settle_native.next_native_step
    compares_fence: bool = True
    knows_end: Callable[[State, int], bool] = is_end_known
    retires: bool = False
    to_repair: Callable[[NativeKnowledge], tuple[frozenset[tuple[str, int]], bool]] = to_repair


@dataclass
class Found:
    """The result: the states reached, and the shortest way to the first wrong one."""

    states: int = 0
    depth: int = 0
    wrong: str | None = None
    trace: list[str] = field(default_factory=list)


# The broker


def end(s: State, epoch: int, *, committed: bool) -> tuple[State, EndAnswer]:
    """``EndTxn`` v5."""
    if s.status is Status.NO_SUCH_ID:
        return s, EndAnswer.NO_SUCH_ID
    if s.status is Status.ONGOING:
        if epoch != s.epoch:
            return s, EndAnswer.FENCED
        return replace(s, status=_PREPARED[committed], epoch=epoch + 1), EndAnswer.ENDED
    if s.status in _COMPLETE:  # whatever the epoch and the outcome
        return s, EndAnswer.IN_PROGRESS
    if epoch + 1 == s.epoch and s.status is not Status.EMPTY:  # a repetition
        return s, EndAnswer.ENDED if s.status is _ENDED[committed] else EndAnswer.INVALID_STATE
    if epoch != s.epoch:
        return s, EndAnswer.FENCED
    if committed:
        return s, EndAnswer.INVALID_STATE
    return replace(s, status=Status.COMPLETE_ABORT, epoch=epoch + 1, due=frozenset()), EndAnswer.ENDED


def add(s: State, epoch: int, partition: int) -> State | None:
    """``AddPartitionsToTxn``; None if it is refused."""
    if s.status in {Status.NO_SUCH_ID, *_COMPLETE} or epoch != s.epoch:
        return None
    return replace(s, status=Status.ONGOING, due=(s.due if s.status is Status.ONGOING else frozenset()) | {partition})


def initialise(s: State) -> State:
    """``InitProducerId``: over an open transaction it aborts that, and the client asks again."""
    if s.status is Status.ONGOING:
        return replace(s, status=Status.PREPARE_ABORT, epoch=s.epoch + 1)
    if s.status in _COMPLETE or s.status is Status.NO_SUCH_ID:
        return s
    return replace(s, status=Status.EMPTY, epoch=s.epoch + 1, due=frozenset())


def produce(s: State, epoch: int, partition: int) -> State | None:
    """``Produce`` v12 of U; None if it is refused."""
    log = s.logs[partition]
    if "U" in log.open | log.committed | log.aborted:
        return s
    if log.epoch > epoch:
        return None
    added = s if log.open and log.epoch == epoch else add(s, epoch, partition)
    return added and with_log(added, partition, replace(log, open=log.open | {"U"}, epoch=epoch))


def with_log(s: State, partition: int, log: Log) -> State:
    return replace(s, logs=tuple(log if index == partition else one for index, one in enumerate(s.logs)))


def delivered(s: State, request: Request) -> State:
    if request.kind in {"commit", "abort"}:
        return end(s, request.epoch, committed=request.kind == "commit")[0]
    return produce(s, request.epoch, request.partition) or s


def broker_moves(s: State) -> Iterator[tuple[str, State]]:
    if s.status in _COMPLETE:
        if not s.due:
            yield "the transaction is complete", replace(s, status=_COMPLETE[s.status])
        for partition in sorted(s.due):
            less = replace(s, due=s.due - {partition})
            log = s.logs[partition].marked(s.epoch, committed=s.status is Status.PREPARE_COMMIT)
            yield f"{s.status.value}: marker in p{partition}", with_log(less, partition, log)
            if s.forgets:
                yield (
                    f"{s.status.value}: marker in p{partition} FORGOTTEN",
                    replace(less, forgets=s.forgets - 1, has_forgotten=True),
                )
    elif s.status is Status.ONGOING and s.times_out:
        yield (
            f"epoch {s.epoch} times out",
            replace(s, status=Status.PREPARE_ABORT, epoch=s.epoch + 1, times_out=s.times_out - 1, has_timed_out=True),
        )
    for index, request in enumerate(s.late):
        yield f"late {request}", delivered(replace(s, late=s.late[:index] + s.late[index + 1 :]), request)


# The processes


def late_copy(s: State, request: Request) -> State | None:
    """The state in which the request is on its way, if any may be late."""
    if not s.delays:
        return None
    return replace(s, delays=s.delays - 1, late=tuple(sorted((*s.late, request), key=repr)))


def owner_moves(s: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if s.owner == "ends S":
        after, answer = end(s, 0, committed=True)
        if answer is EndAnswer.ENDED:
            yield "owner: EndTxn(commit, S)", replace(after, owner="begins U")
        if (late := late_copy(s, Request("commit", 0))) is not None:
            yield "owner: EndTxn(commit, S) is under way", late
    elif s.owner == "begins U" and not s.is_claimed:
        yield "owner: still owns the row, begins U", replace(s, owner="writes U")
    elif s.owner == "writes U":
        for partition in (0, 1):
            if not rules.knows_end(s, partition):
                continue
            after = produce(s, 1, partition)
            yield f"owner: Produce U p{partition}", replace(s if after is None else after, owner="aborts U")
            if (late := late_copy(s, Request("produce", 1, partition))) is not None:
                yield f"owner: Produce U p{partition} is under way", replace(late, owner="aborts U")
    elif s.owner == "aborts U":
        yield "owner: EndTxn(abort, U)", replace(end(s, 1, committed=False)[0], owner="ended")


def settler_moves(s: State, number: int, rules: Rules, state: PreparedTxnState) -> Iterator[tuple[str, State]]:
    settler = s.settlers[number]
    if settler.is_done:
        return
    for text, after, moved in _moves(s, settler, rules, state):
        others = (*s.settlers[:number], *s.settlers[number + 1 :])
        # All settlers are alike: one order of them stands for all.
        yield f"settler {number}: {text}", replace(after, settlers=tuple(sorted((*others, moved), key=hash)))


def _moves(s: State, settler: Settler, rules: Rules, state: PreparedTxnState) -> Iterator[tuple[str, State, Settler]]:
    known = settler.known
    if settler.adds is not None:
        epoch, committed = settler.adds
        after, answer = end(s, epoch, committed=committed)
        if answer is not EndAnswer.IN_PROGRESS:
            moved = Settler(settle_native.acted(known))
            yield f"ends its repair, epoch {epoch}, {'commit' if committed else 'abort'}: {answer.value}", after, moved
        return
    step = rules.next_step(known)
    if step is NativeStep.END:
        after, answer = end(s, state.epoch, committed=True)
        yield f"EndTxn(commit, S): {answer.value}", after, Settler(settle_native.ended(known, answer))
        if (late := late_copy(s, Request("commit", state.epoch))) is not None:
            yield "EndTxn(commit, S) is under way", late, settler
    elif step in {NativeStep.ABORT, NativeStep.JOIN}:
        assert known.view is not None
        committed = step is NativeStep.JOIN
        if rules.retires and not committed:
            yield "InitProducerId", initialise(s), Settler(settle_native.acted(known))
            return
        after, answer = end(s, known.view.epoch, committed=committed)
        yield f"{step.name} epoch {known.view.epoch}: {answer.value}", after, Settler(settle_native.acted(known))
        if (late := late_copy(s, Request("commit" if committed else "abort", known.view.epoch))) is not None:
            yield f"{step.name} epoch {known.view.epoch} is under way", late, settler
    elif step is NativeStep.REPAIR:
        yield _repair(s, known, rules)
    elif step in {NativeStep.FINISH, NativeStep.STOP}:
        yield (
            step.name,
            replace(s, is_settled=s.is_settled or step is NativeStep.FINISH),
            replace(settler, is_done=True),
        )
    else:
        after, now = _asked_or_recorded(s, known, step, rules)
        yield step.name, after, Settler(now)


def _repair(s: State, known: NativeKnowledge, rules: Rules) -> tuple[str, State, Settler]:
    assert known.view is not None
    partitions, committed = rules.to_repair(known)
    after: State | None = s
    for key in sorted(partitions):
        after = after and add(after, known.view.epoch, key[1])
    if after is None:
        return "adds partitions: refused", s, Settler(settle_native.acted(known))
    text = f"adds {sorted(key[1] for key in partitions)} under epoch {known.view.epoch}"
    return text, after, Settler(known, (known.view.epoch, committed))


_OUTCOME = {
    NativeStep.RECORD_COMMITTED: Outcome.COMMITTED,
    NativeStep.RECORD_LOST: Outcome.LOST,
    NativeStep.RECORD_UNVERIFIABLE: Outcome.UNVERIFIABLE,
}


def _asked_or_recorded(
    s: State, known: NativeKnowledge, step: NativeStep, rules: Rules
) -> tuple[State, NativeKnowledge]:
    if step is NativeStep.LOOK:
        return s, settle_native.looked_native(known, _view(s))
    if step is NativeStep.WAIT:
        return s, settle_native.acted(known)
    if step is NativeStep.PROVE:
        return s, settle_native.proved_native(known, _proof(s, known.prepared))
    if step is NativeStep.LOOK_FOR_OPEN:
        return s, settle_native.found_open(known, _still_open(s, known))
    if step is NativeStep.READ_FENCE:
        return s, settle_native.read_fence(known, known.prepared, s.fence)
    if step is NativeStep.RAISE_FENCE:
        written = s.fence == known.fence or not rules.compares_fence
        after = replace(s, fence=settle_native.new_fence(known)) if written else s
        return after, settle_native.fence_raised(known, written=written)
    outcome = _OUTCOME[step]
    return replace(s, recorded=s.recorded or outcome), settle_native.recorded(known, outcome)


def _view(s: State) -> TransactionView:
    known = s.status is not Status.NO_SUCH_ID
    partitions = tuple(PARTITIONS[index] for index in sorted(s.due)) if s.status in {Status.ONGOING, *_COMPLETE} else ()
    timeout_ms = 60_000 if s.is_limited else NEVER_MS
    return TransactionView(s.status, 0 if known else -1, s.epoch if known else -1, None, timeout_ms, partitions)


def _proof(s: State, state: PreparedTxnState) -> LogProof:
    seen = set()
    for first in state.first_offsets:
        log = s.logs[first.partition]
        seen.add(
            LogProof.ABORTED if "S" in log.aborted else LogProof.COMMITTED if "S" in log.committed else LogProof.OPEN
        )
    if LogProof.ABORTED in seen:
        return LogProof.ABORTED
    return LogProof.PARTLY if len(seen) > 1 else seen.pop()


def _still_open(s: State, known: NativeKnowledge) -> tuple[OpenTransaction, ...]:
    return tuple(
        OpenTransaction(key, s.logs[key[1]].epoch, S_OFFSET if "S" in s.logs[key[1]].open else U_OFFSET)
        for key in sorted(known.suspects)
        if s.logs[key[1]].open
    )


# The search


def moves(s: State, rules: Rules, state: PreparedTxnState) -> Iterator[tuple[str, State]]:
    yield from broker_moves(s)
    yield from owner_moves(s, rules)
    if not s.is_claimed:
        yield "the settlers have claimed", replace(s, is_claimed=True)
    else:
        for number in range(len(s.settlers)):
            yield from settler_moves(s, number, rules, state)


def drained(s: State) -> State:
    while s.status in _COMPLETE:
        _, s = next(broker_moves(replace(s, forgets=0)))
    return s


def finished(s: State, rules: Rules, state: PreparedTxnState) -> State | str:
    """The end that a new settler brings about, alone, with no more faults; or why it does not end."""
    s = replace(s, settlers=(_new(state, s.recorded),), forgets=0, times_out=0, delays=0, is_claimed=True)
    for _ in range(_LONGEST):
        if s.settlers[0].is_done:
            return drained(s)
        waits = s.settlers[0].adds is None and rules.next_step(s.settlers[0].known) is NativeStep.WAIT
        s = drained(s) if waits else s
        found = next(iter(settler_moves(s, 0, rules, state)), None)
        s = drained(s) if found is None else found[1]
    return "the settler does not end"


def wrong(s: State, began: State) -> str | None:
    """The fault at the end, if there is one."""
    stops = not s.is_settled
    for index, log in enumerate(s.logs):
        if "U" in log.committed:
            return f"U is not in the database, and Kafka shows it in p{index}"
        if log.open and not stops:
            return f"{sorted(log.open)} stay open in p{index}"
    whole = all("S" in log.committed for log in s.logs)
    visible = any("S" in log.committed for log in s.logs)
    if s.recorded is Outcome.LOST:
        if not began.has_timed_out:
            return "the protocol lost S"
        if whole or (visible and not s.has_forgotten):
            return "S is recorded as lost, and Kafka shows it"
    elif s.recorded is not Outcome.UNVERIFIABLE and not whole and not stops:
        return "S is in the database, Kafka has not all of it, and nobody was told"
    if s.recorded is Outcome.COMMITTED and not whole:
        return "S is recorded as committed, and Kafka has not all of it"
    return None


def judged(s: State, rules: Rules, state: PreparedTxnState) -> str | None:
    end_of = finished(s, rules, state)
    if isinstance(end_of, str):
        return end_of
    found = wrong(end_of, s)
    if found is None:
        for order in permutations(end_of.late):
            after = replace(end_of, late=())
            for request in order:
                after = drained(delivered(after, request))
                found = found or wrong(after, s)
    return found


def _new(state: PreparedTxnState, recorded: Outcome | None) -> Settler:
    return Settler(settle_native.initial_native(state, recorded))


def explore(
    rules: Rules | None = None,
    *,
    settlers: int = 2,
    forgets: int = 0,
    times_out: int = 0,
    delays: int = 0,
    witnesses: int = 2,
    hangs: bool = False,
    is_alive: bool = False,
    most: int = 1_000_000,
) -> Found:
    """Search breadth first: the first wrong state found has the shortest way to it.

    Args:
        rules: The rules.
        settlers: How many settlers run at once.
        forgets: How many markers may be forgotten.
        times_out: How many transactions the broker may time out. If any, the timeout is limited.
        delays: How many requests may be late.
        witnesses: In how many of the two partitions S has an offset.
        hangs: Whether to begin after the owner has ended S, and the broker has forgotten the marker in one partition.
        is_alive: Whether the owner lives then, and is about to begin U in the other one.
        most: The largest number of states.

    Raises:
        AssertionError: There are more states than ``most``.
    """
    rules = rules or Rules()
    state = prepared(witnesses=witnesses)
    first = State(
        settlers=(_new(state, None),) * settlers,
        forgets=forgets,
        times_out=times_out,
        delays=delays,
        is_limited=times_out > 0,
    )
    if hangs:
        logs = (first.logs[0].marked(1, committed=True), first.logs[1])
        first = replace(first, status=Status.COMPLETE_COMMIT, epoch=1, due=frozenset(), logs=logs, has_forgotten=True)
        first = replace(first, owner="writes U" if is_alive else "ended")
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    judged_already: set[State] = set()
    found, level = Found(states=1), [first]
    while level:
        following = []
        for s in level:
            for text, after in moves(s, rules, state):
                if after in came_from:
                    continue
                came_from[after] = (s, text)
                following.append(after)
                seen_alike = replace(after, settlers=(), owner="", is_claimed=True, forgets=0, times_out=0, delays=0)
                if seen_alike in judged_already:
                    continue
                judged_already.add(seen_alike)
                found.wrong = judged(after, rules, state)
                if found.wrong is not None:
                    found.trace = _way(came_from, after)
                    return replace(found, states=len(came_from))
        assert len(came_from) <= most, "too many states"
        level = following
        found.depth += 1
    return replace(found, states=len(came_from))


def _way(came_from: dict[State, tuple[State, str] | None], last: State) -> list[str]:
    way, at = [], came_from[last]
    while at is not None:
        way.append(at[1])
        at = came_from[at[0]]
    return way[::-1]
