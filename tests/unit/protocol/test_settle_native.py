"""The settle decision for native transactions, over the whole space of what can be known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle_native import (
    NativeKnowledge,
    NativeStep,
    acted,
    ended,
    fence_raised,
    found_open,
    initial_native,
    looked_native,
    new_fence,
    next_native_step,
    proved_native,
    read_fence,
    recorded,
    to_repair,
)
from dualwrite.protocol.values import (
    NEVER_MS,
    EndAnswer,
    LogProof,
    OpenTransaction,
    Outcome,
    TransactionStatus,
    TransactionView,
)

E, ID = 7, 42
P0, P1, ELSEWHERE = ("orders", 0), ("orders", 1), ("payments", 4)
S = PreparedTxnState.native(ID, E, 3, {P0: 17, P1: None}, {"orders": "b3JkZXJz"})
Status, Step = TransactionStatus, NativeStep
RECORDS = {Step.RECORD_COMMITTED, Step.RECORD_LOST, Step.RECORD_UNVERIFIABLE}
OWN = OpenTransaction(P1, E, 30)
MIXED = OpenTransaction(P0, E + 1, 17)
OTHER = OpenTransaction(ELSEWHERE, E + 1, 99)
AT_REST = (Status.EMPTY, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT)
IN_TRANSITION = (Status.PREPARE_COMMIT, Status.PREPARE_ABORT, Status.PREPARE_EPOCH_FENCE, Status.DEAD)


def view(status: Status, epoch: int = E + 1, producer_id: int = ID, **kwargs: object) -> TransactionView:
    return TransactionView(status, producer_id, epoch, timeout_ms=kwargs.pop("timeout_ms", NEVER_MS), **kwargs)  # type: ignore[arg-type]


GONE = TransactionView(Status.NO_SUCH_ID)
VIEWS = [
    GONE,
    view(Status.EMPTY, E + 2, timeout_ms=60_000),
    *(
        view(status, epoch, producer_id, partitions=(P1,))
        for status, epoch, producer_id in product(set(Status) - {Status.NO_SUCH_ID}, (E, E + 1, E + 2), (ID, ID + 1))
    ),
]
ANSWERS = [
    (None, None),
    (EndAnswer.IN_PROGRESS, None),
    (EndAnswer.ENDED, True),
    (EndAnswer.FENCED, None),
    (EndAnswer.FENCED, False),
]


@pytest.fixture(scope="module")
def steps() -> list[tuple[NativeKnowledge, NativeStep]]:
    every = [
        NativeKnowledge(
            S, outcome, S.partitions, answer, committed, shown, proof, still_open, confirmed, fence, is_known
        )
        for outcome, (answer, committed), shown, proof, (still_open, confirmed), (is_known, fence) in product(
            [None, Outcome.COMMITTED, Outcome.LOST],
            ANSWERS,
            [None, *VIEWS],
            [None, *LogProof],
            [(None, False), *product([(), (OWN,), (OTHER,)], [False, True])],
            [(False, None), (True, None), (True, E + 2)],
        )
    ]
    return [(known, next_native_step(known)) for known in every]


def test_every_step_is_reachable(steps: list[tuple[NativeKnowledge, NativeStep]]) -> None:
    assert {step for _, step in steps} == set(Step)


def test_what_is_never_done(steps: list[tuple[NativeKnowledge, NativeStep]]) -> None:
    for known, step in steps:
        shown = known.view
        if step in {Step.END, Step.WAIT, Step.LOOK}:
            continue
        assert shown is not None
        is_s = (shown.status, shown.producer_id, shown.epoch) == (Status.ONGOING, ID, E)
        assert not (step is Step.ABORT and is_s and known.recorded is not Outcome.LOST)
        assert not (step is Step.ABORT and shown.producer_id == ID and not known.is_fence_known)
        if step in RECORDS | {Step.PROVE}:
            assert known.is_pending
        if step is Step.RECORD_COMMITTED:
            assert known.committed or known.proof in {LogProof.COMMITTED, LogProof.PARTLY}
            assert known.committed is not False
            assert not known.own
            assert known.still_open is not None
        if step is Step.RECORD_LOST:
            assert known.committed is False or known.proof is LogProof.ABORTED
        if step in {Step.REPAIR, Step.STOP}:
            assert shown.status in AT_REST
            assert known.is_fence_known
            assert known.fence is not None
            assert shown.epoch >= known.fence
            assert shown.producer_id == ID
        if step is Step.FINISH:
            assert not known.is_pending
            assert shown.producer_id != ID or known.still_open == ()


SAYS_COMMITTED = {"answer": EndAnswer.ENDED, "committed": True}
REFUSED = {"answer": EndAnswer.FENCED}
RESTS = {"view": view(Status.COMPLETE_COMMIT)}
FENCED = {"view": view(Status.COMPLETE_ABORT, E + 2), "is_fence_known": True, "fence": E + 2}
SETTLED = {"recorded": Outcome.COMMITTED}


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        # the answers to ending S
        ({}, Step.END),
        ({"answer": EndAnswer.IN_PROGRESS}, Step.WAIT),
        ({"answer": EndAnswer.ENDED, "committed": True}, Step.LOOK),
        ({"answer": EndAnswer.INVALID_STATE}, Step.LOOK),
        ({"answer": EndAnswer.FENCED}, Step.LOOK),
        ({"answer": EndAnswer.NO_SUCH_ID}, Step.LOOK),
        # look, then prove
        ({**REFUSED, "view": view(Status.ONGOING, E)}, Step.END),
        ({**SETTLED, "view": view(Status.ONGOING, E)}, Step.END),
        ({**REFUSED, "committed": False, "view": view(Status.PREPARE_ABORT)}, Step.RECORD_LOST),
        ({**REFUSED, "committed": False, "view": view(Status.COMPLETE_ABORT)}, Step.RECORD_LOST),
        *(({**REFUSED, "view": view(status, E + 2)}, Step.WAIT) for status in IN_TRANSITION),
        ({**SETTLED, "view": view(Status.PREPARE_COMMIT)}, Step.WAIT),
        ({**SAYS_COMMITTED, **RESTS}, Step.PROVE),
        ({**REFUSED, "view": GONE}, Step.PROVE),
        ({**REFUSED, **RESTS, "proof": LogProof.ABORTED}, Step.RECORD_LOST),
        *(({**REFUSED, **RESTS, "proof": proof}, Step.LOOK_FOR_OPEN) for proof in LogProof if proof is not LogProof.ABORTED),
        ({**REFUSED, "view": GONE, "proof": LogProof.COMMITTED, "still_open": (OWN,)}, Step.RECORD_UNVERIFIABLE),
        ({**REFUSED, "view": view(Status.EMPTY, 0, ID + 1), "proof": LogProof.OPEN, "still_open": (OWN,)},
         Step.RECORD_UNVERIFIABLE),
        ({**SAYS_COMMITTED, **RESTS, "proof": LogProof.COMMITTED, "still_open": (OWN,)}, Step.READ_FENCE),
        ({**SAYS_COMMITTED, **FENCED, "proof": LogProof.OPEN, "still_open": (OWN, OTHER)}, Step.REPAIR),
        ({**SAYS_COMMITTED, **FENCED, "proof": LogProof.COMMITTED, "still_open": (OTHER,)}, Step.RECORD_COMMITTED),
        ({**REFUSED, **RESTS, "proof": LogProof.COMMITTED, "still_open": ()}, Step.RECORD_COMMITTED),
        *(({**REFUSED, **RESTS, "proof": proof, "still_open": ()}, Step.PROVE)
          for proof in (LogProof.OPEN, LogProof.PARTLY, LogProof.UNKNOWABLE)),
        ({**REFUSED, **RESTS, "proof": LogProof.PARTLY, "still_open": (), "confirmed": True}, Step.RECORD_COMMITTED),
        ({**SAYS_COMMITTED, **RESTS, "proof": LogProof.OPEN, "still_open": (), "confirmed": True}, Step.WAIT),
        ({**SAYS_COMMITTED, **RESTS, "proof": LogProof.UNKNOWABLE, "still_open": (), "confirmed": True}, Step.RECORD_COMMITTED),
        ({**REFUSED, **RESTS, "proof": LogProof.UNKNOWABLE, "still_open": (), "confirmed": True}, Step.RECORD_UNVERIFIABLE),
        ({**SETTLED, "view": GONE}, Step.FINISH),
        ({**SETTLED, "view": view(Status.ONGOING, 3, ID + 1)}, Step.ABORT),
        ({**SETTLED, "view": view(Status.EMPTY, 3, ID + 1)}, Step.FINISH),
        ({**SETTLED, **RESTS}, Step.READ_FENCE),
        ({**SETTLED, **FENCED}, Step.LOOK_FOR_OPEN),
        ({**SETTLED, **FENCED, "still_open": (OTHER,)}, Step.REPAIR),
        ({**SETTLED, **FENCED, "still_open": ()}, Step.FINISH),
        # fence
        ({**SETTLED, **RESTS, "is_fence_known": True}, Step.RAISE_FENCE),
        ({**SETTLED, "view": view(Status.ONGOING), "is_fence_known": True}, Step.RAISE_FENCE),
        ({**SETTLED, **RESTS, "is_fence_known": True, "fence": E + 2}, Step.ABORT),
        ({**SETTLED, "view": view(Status.ONGOING), "is_fence_known": True, "fence": E + 2}, Step.ABORT),
        ({**SETTLED, **FENCED, "view": view(Status.ONGOING, E + 2, partitions=(P1,))}, Step.LOOK_FOR_OPEN),
        ({**SETTLED, **FENCED, "view": view(Status.ONGOING, E + 2, partitions=(P1,)), "still_open": (OWN,)}, Step.JOIN),
        ({**SETTLED, **FENCED, "view": view(Status.ONGOING, E + 2, partitions=(P0,)), "still_open": (OWN,)}, Step.ABORT),
        ({**SETTLED, **FENCED, "view": view(Status.ONGOING, E + 2, partitions=(P1,)), "still_open": (OTHER,)}, Step.ABORT),
        ({"recorded": Outcome.LOST, **FENCED, "view": view(Status.ONGOING, E + 2, partitions=(P1,)), "still_open": (OWN,)},
         Step.ABORT),
        # repair
        ({**SETTLED, **FENCED, "view": view(Status.EMPTY, E + 2, timeout_ms=60_000), "still_open": (OWN,)}, Step.STOP),
        ({**SETTLED, **FENCED, "view": view(Status.EMPTY, E + 2, timeout_ms=60_000), "still_open": (MIXED,)}, Step.REPAIR),
        ({**SETTLED, **FENCED, "view": view(Status.EMPTY, E + 2, timeout_ms=60_000), "still_open": (OTHER,)}, Step.REPAIR),
        # another owner has decided meanwhile
        ({**REFUSED, **FENCED, "is_overwritten": True}, Step.FINISH),
    ],
)  # fmt: skip
def test_the_tables_row_by_row(facts: dict[str, object], step: NativeStep) -> None:
    assert next_native_step(replace(NativeKnowledge(S, suspects=S.partitions), **facts)) is step  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "still_open", "expected"),
    [
        (None, (OWN, OTHER), ({P1}, True)),
        (Outcome.COMMITTED, (MIXED, OTHER), ({P0}, True)),
        (Outcome.UNVERIFIABLE, (OWN, OTHER), ({P1}, True)),
        (Outcome.LOST, (OWN, OTHER), ({P1, ELSEWHERE}, False)),
        (Outcome.COMMITTED, (OTHER,), ({ELSEWHERE}, False)),
    ],
)
def test_own_partitions_are_committed_first_and_the_others_aborted_after_them(
    outcome: Outcome | None, still_open: tuple[OpenTransaction, ...], expected: tuple[set[tuple[str, int]], bool]
) -> None:
    assert to_repair(NativeKnowledge(S, outcome, still_open=still_open)) == expected


@pytest.mark.parametrize(
    ("shown", "committed"),
    [
        (view(Status.PREPARE_COMMIT), True),
        (view(Status.COMPLETE_COMMIT), True),
        (view(Status.ONGOING), True),
        (view(Status.PREPARE_ABORT), False),
        (view(Status.COMPLETE_ABORT), False),
        (view(Status.EMPTY), None),
        (GONE, None),
        *((view(status, epoch), None) for status in Status for epoch in (E, E + 2)),
        *((view(status, E + 1, ID + 1), None) for status in Status),
    ],
)
def test_the_coordinators_word_is_that_of_the_epoch_after_s_alone(
    shown: TransactionView, committed: bool | None
) -> None:
    assert looked_native(initial_native(S, None), shown).committed is committed


def test_every_round_begins_with_the_coordinator() -> None:
    known = initial_native(S, None, frozenset({ELSEWHERE}))
    assert known.suspects == {P0, P1, ELSEWHERE}
    known = ended(known, EndAnswer.ENDED)
    known = looked_native(known, view(Status.ONGOING, partitions=(("late", 0),)))
    assert ("late", 0) in known.suspects
    known = read_fence(found_open(proved_native(known, LogProof.OPEN), (OWN,)), S, E + 2)
    assert (known.fence, new_fence(known), known.confirmed) == (E + 2, E + 2, False)
    assert proved_native(known, LogProof.COMMITTED).confirmed
    for after in (acted(known), fence_raised(known, written=False), recorded(known, Outcome.COMMITTED)):
        assert (after.view, after.proof, after.still_open, after.confirmed, after.is_fence_known) == (
            None,
            None,
            None,
            False,
            False,
        )
        assert (after.committed, after.suspects) == (True, known.suspects)
    assert fence_raised(known, written=True).fence == E + 2
    assert recorded(known, Outcome.LOST).recorded is Outcome.LOST
    assert acted(ended(known, EndAnswer.IN_PROGRESS)).answer is None
    assert acted(known).answer is EndAnswer.ENDED


def test_a_row_that_names_another_transaction_was_settled_by_its_owner() -> None:
    known = read_fence(
        looked_native(initial_native(S, Outcome.COMMITTED), view(Status.EMPTY)), replace(S, epoch=9), None
    )
    assert next_native_step(known) is Step.FINISH
