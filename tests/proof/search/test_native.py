"""Settling a native transaction, over every interleaving within small bounds; and every planted mistake is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep, next_native_step, to_repair
from dualwrite.protocol.values import EndAnswer, TransactionStatus
from search.native import Rules, explore

thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({}, id="two settlers", marks=thorough),
        pytest.param({"hangs": True}, id="forgotten marker, two settlers"),
        pytest.param({"hangs": True, "is_alive": True}, id="forgotten marker, two settlers, the owner is alive", marks=thorough),
        pytest.param({"hangs": True, "delays": 1}, id="forgotten marker, two settlers, a late request", marks=thorough),
        pytest.param({"hangs": True, "forgets": 1}, id="forgotten again, two settlers", marks=thorough),
        pytest.param({"hangs": True, "times_out": 1, "witnesses": 1}, id="forgotten marker, two settlers, a limited timeout"),
        pytest.param({"settlers": 1, "forgets": 1, "delays": 1}, id="one settler, a forgotten marker, a late request", marks=thorough),
        pytest.param({"settlers": 1, "forgets": 1, "times_out": 1}, id="one settler, a forgotten marker, a timeout", marks=thorough),
        pytest.param({"delays": 1}, id="two settlers, a late request", marks=thorough),
        pytest.param({"times_out": 1}, id="two settlers, a timeout", marks=thorough),
        pytest.param({"forgets": 1}, id="two settlers, any marker forgotten", marks=thorough),
        pytest.param({"hangs": True, "settlers": 3}, id="forgotten marker, three settlers", marks=thorough),
    ],
)  # fmt: skip
def test_nothing_is_torn_and_no_settler_waits_for_ever(bounds: dict[str, Any]) -> None:
    found = explore(**bounds)
    assert found.wrong is None, "\n".join([*found.trace, f"=> {found.wrong}"])
    assert found.states > 100


def fence_is_not_in_the_row(known: NativeKnowledge) -> NativeStep:
    """A settler takes any epoch from S's second successor on for fenced if nothing is open, and aborts what is."""
    view = known.view
    if known.is_fence_known and view is not None:
        fenced = view.status is not TransactionStatus.ONGOING and view.epoch >= known.prepared.epoch + 2
        known = replace(known, fence=view.epoch if fenced else view.epoch + 1)
    return next_native_step(known)


def aborts_although_what_is_open_is_s(known: NativeKnowledge) -> NativeStep:
    if known.view is None:
        return NativeStep.LOOK
    return NativeStep.ABORT if known.view.status is TransactionStatus.ONGOING else next_native_step(known)


def timeout_taken_for_a_commit(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(known)
    return NativeStep.RECORD_COMMITTED if step is NativeStep.RECORD_LOST else step


def nothing_open_taken_for_evidence(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(replace(known, committed=None))
    if step is NativeStep.PROVE and known.still_open is None:
        return NativeStep.LOOK_FOR_OPEN
    return NativeStep.RECORD_COMMITTED if step is NativeStep.PROVE and not known.still_open else step


def success_taken_for_the_end_everywhere(known: NativeKnowledge) -> NativeStep:
    if known.is_pending and known.answer is EndAnswer.ENDED:
        return NativeStep.RECORD_COMMITTED
    return next_native_step(known) if known.is_pending else NativeStep.FINISH


def repairs_before_s_is_recorded_as_lost(known: NativeKnowledge) -> NativeStep:
    """The word of the coordinator on the timeout is ignored until the repair has overwritten it."""
    return next_native_step(replace(known, committed=None))


def aborts_another_settlers_repair(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(known)
    return NativeStep.ABORT if step is NativeStep.JOIN else step


def commits_every_repair_of_another_settler(known: NativeKnowledge) -> NativeStep:
    step, view = next_native_step(known), known.view
    is_repair = known.fence is not None and view is not None and view.epoch >= known.fence
    return NativeStep.JOIN if step is NativeStep.ABORT and is_repair else step


def repairs_although_it_could_time_out(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(known)
    return NativeStep.REPAIR if step is NativeStep.STOP else step


def repair_commits_everything(known: NativeKnowledge):
    return frozenset(found.partition for found in known.still_open or ()), True


def repair_aborts_everything(known: NativeKnowledge):
    return frozenset(found.partition for found in known.still_open or ()), False


def waits_for_what_is_forgotten(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(known)
    return NativeStep.WAIT if step is NativeStep.REPAIR else step


HANGS = {"hangs": True}
ALIVE = {"hangs": True, "is_alive": True}
UNDECIDED = {"settlers": 1, "forgets": 1}
MISTAKES: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        step: ({"next_step": step}, bounds)
        for step, bounds in {
            fence_is_not_in_the_row: HANGS,
            aborts_although_what_is_open_is_s: {"settlers": 1},
            timeout_taken_for_a_commit: {"settlers": 1, "times_out": 1},
            nothing_open_taken_for_evidence: {"settlers": 1, "times_out": 1},
            success_taken_for_the_end_everywhere: {"settlers": 1, "forgets": 1},
            repairs_before_s_is_recorded_as_lost: {"settlers": 1, "forgets": 1, "times_out": 1, "witnesses": 1},
            aborts_another_settlers_repair: HANGS,
            commits_every_repair_of_another_settler: {"forgets": 1},
            repairs_although_it_could_time_out: {"hangs": True, "times_out": 1, "witnesses": 1},
            waits_for_what_is_forgotten: HANGS,
        }.items()
    },
    repair_commits_everything: ({"to_repair": repair_commits_everything}, UNDECIDED),
    repair_aborts_everything: ({"to_repair": repair_aborts_everything}, HANGS),
}


SLOW = {commits_every_repair_of_another_settler}


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.__name__, marks=thorough if one in SLOW else ()) for one in MISTAKES]
)
def test_every_planted_mistake_is_found(mistake: Callable[..., Any]) -> None:
    changed, bounds = MISTAKES[mistake]
    found = explore(Rules(**changed), **bounds)
    assert found.wrong is not None
    assert found.trace


@pytest.mark.parametrize(
    ("changed", "bounds"),
    [
        pytest.param({"retires": True}, HANGS, id="fences by InitProducerId"),
        pytest.param({"compares_fence": False}, ALIVE, id="writes the fence without its condition", marks=thorough),
        pytest.param({"knows_end": lambda *_: True}, UNDECIDED, id="the owner goes on before S has ended"),
        pytest.param(
            {"knows_end": lambda s, _: s.status is TransactionStatus.COMPLETE_COMMIT},
            UNDECIDED,
            id="the owner goes on when the coordinator shows that S is complete",
        ),
    ],
)
def test_what_the_rules_need_of_others_is_needed(changed: dict[str, Any], bounds: dict[str, Any]) -> None:
    assert explore(Rules(**changed), **bounds).wrong is not None


def test_the_repair_is_the_products() -> None:
    assert Rules().next_step is next_native_step
    assert Rules().to_repair is to_repair
