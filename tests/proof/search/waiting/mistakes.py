"""One rule broken at a time, and the smallest bounds in which that shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dualwrite.protocol.process import Doubt, DoubtStep
from dualwrite.protocol.settle import Ended
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep, next_native_step, to_repair
from dualwrite.protocol.values import Partition, ShownProducer
from search import native
from search.waiting.configurations import WAITING, A, B, C, D, E, owner
from search.waiting.rules import Rules, knows_end
from search.waiting.values import Block, Budgets
from search.waiting.world import Bounds, World


class Mistake(NamedTuple):
    """A mistake."""

    sentence: str
    bounds: Bounds
    changed: dict[str, object]

    def world(self) -> World:
        """The configuration to search."""
        return World(self.bounds, type("Mistaken", (Rules,), self.changed)())


def _any_count(doubt: Doubt) -> DoubtStep:
    assert doubt.waits is not None
    return DoubtStep.COMMITTED if doubt.counted >= doubt.waits else DoubtStep.ABORTED


def _one_marker_is_enough(ended: Ended, shown: Mapping[Partition, ShownProducer]) -> bool:
    return any(found.epoch > ended.state.epoch for found in shown.values())


def _aborts_need_no_marker(ended: Ended, shown: Mapping[Partition, ShownProducer]) -> bool:
    return not ended.committed or knows_end(ended, shown)


def _takes_for_complete(known: NativeKnowledge) -> NativeStep:
    step = next_native_step(known)
    if known.committed and step is NativeStep.LOOK_FOR_OPEN:
        return NativeStep.RECORD_COMMITTED if known.is_pending else NativeStep.FINISH
    return step


def _with_abort(known: NativeKnowledge) -> tuple[frozenset[Partition], bool]:
    return to_repair(known)[0], False


_TWO_LANES = Bounds((owner("P", (A, C), (B,), sends=1),))
_ONE_LANE = Bounds((owner("P", (A, C), sends=1),))
_TWO_SENDERS = Bounds((owner("P", (A, C), sends=1), owner("Q", (E,), sends=1)))
_ALWAYS_BETWEEN = Bounds(
    (owner("P", (), (), sends=2), owner("Q", (A,), sends=0, outbox="always"), owner("R", (C,), sends=0)),
    Budgets(outage=0),
    later=True,
)
_NEVER_NEXT = Bounds((owner("P", (A,), sends=0), owner("Q", (E,), sends=0, outbox="never")))
_SENT_IN_TWO = Bounds(
    (owner("P", (Block("a", (0, 1)), Block("c", (1,))), sends=2, outbox="always"),),
    Budgets(outage=0, abort=1, forgotten=1),
)
_COPIED = Bounds((owner("P", (A,), sends=1), owner("Q", (E,), sends=1)), Budgets(outage=0, restore=1), later=True)

WAITING_MISTAKES = {
    "sends_although_messages_wait": Mistake(
        "A block sends at once although messages wait.", _ONE_LANE, {"heeds_the_mode": False}
    ),
    "no_second_look_under_the_share": Mistake(
        "A block that found *later* does not look again under its share of the lock.",
        _TWO_LANES,
        {"looks_again": False},
    ),
    "share_given_back_too_early": Mistake(
        "A block gives its share of the lock back before its COMMIT.", _TWO_LANES, {"share_to_the_end": False}
    ),
    "turned_without_a_lock": Mistake(
        "A block turns the mode to *later* without having it alone.", _TWO_LANES, {"locks_to_turn": False}
    ),
    "rows_without_a_fence": Mistake(
        "A decision of messages that wait does not look whether its owner was replaced.",
        Bounds((owner("P", (A,), sends=0, outbox="always"), owner("Q", (C,), sends=1)), Budgets(outage=0)),
        {"fences_rows": False},
    ),
    "pending_state_overwritten": Mistake(
        "A block whose messages wait overwrites the decision in its lane's row, which may be pending in Kafka.",
        _ONE_LANE,
        {"leaves_state": False},
    ),
    "sends_on_in_an_open_transaction": Mistake(
        "A lane sends again without an end to what it has left open.", _ONE_LANE, {"ends_what_is_open": False}
    ),
    "settler_commits_whatever_is_open": Mistake(
        "A settler commits what is open, though no row names it.", _ONE_LANE, {"ends_only_what_is_not_named": False}
    ),
    "rows_outlive_their_savepoint": Mistake(
        "Messages of a savepoint that was rolled back become rows.",
        Bounds((owner("P", (Block("a", (0, 1), savepoint=True),), sends=0),)),
        {"rows_follow_savepoints": False},
    ),
    "count_of_another_owner_believed": Mistake(
        "An owner whose COMMIT was not answered believes the row's count although another has claimed the row.",
        Bounds((owner("P", (A,), sends=0), owner("Q", (E,), sends=0)), Budgets(outage=1, answer=1)),
        {"next_doubt_step": staticmethod(_any_count)},
    ),
    "claim_kept_after_a_doubt": Mistake(
        "After a COMMIT in doubt the next block decides under the same claim, and so under the same number.",
        Bounds((owner("P", (A, C, D), sends=0),), Budgets(outage=1, answer=2)),
        {"claims_after_a_doubt": False},
    ),
    "deletes_not_counted": Mistake(
        "A sender does not count the rows that it deletes: one whose COMMIT was not answered has read them again.",
        Bounds((owner("P", (A,), sends=2, outbox="always"),), Budgets(outage=0, answer=1)),
        {"counts_deleted": False},
    ),
    "sender_without_a_fence": Mistake(
        "A sender does not look whether its owner was replaced.", _TWO_SENDERS, {"fences_sender": False}
    ),
    "empty_last_send_without_a_fence": Mistake(
        "A sender that has nothing to send ends *later* without a look whether its owner was replaced.",
        _ALWAYS_BETWEEN,
        {"fences_the_empty_last": False},
    ),
    "sender_claimed_without_a_guard": Mistake(
        "A sender claims its id anew although the writer has another owner.",
        _ALWAYS_BETWEEN,
        {"guards_the_sender": False},
    ),
    "last_send_without_a_lock": Mistake(
        "The last send does not have the mode alone, and ends *later*.", _TWO_LANES, {"locks_the_last": False}
    ),
    "last_send_reads_an_older_snapshot": Mistake(
        "The last send reads the rows in a snapshot that is older than its lock: at REPEATABLE READ, say.",
        _TWO_LANES,
        {"reads_under_the_lock": False},
    ),
    "direct_before_all_is_sent": Mistake("The last send leaves rows behind.", _TWO_LANES, {"last_reads_all": False}),
    "looks_only_above_what_was_sent": Mistake(
        "A sender looks only above the highest number that it has sent.",
        Bounds((owner("P", (A, C), (B,), sends=2, outbox="always"),), Budgets(outage=0)),
        {"floor_is_what_was_sent": True},
    ),
    "floor_without_a_proof": Mistake(
        "A sender does not look whether somebody holds a lower number uncommitted before it raises its floor.",
        WAITING["waiting_floors"].bounds,
        {"proves_the_floor": False},
    ),
    "always_ends": Mistake(
        "The sender of a writer of *always*, whose blocks take no share, ends *later*.",
        Bounds((owner("P", (A,), sends=1, outbox="always"), owner("Q", (E,), sends=0)), Budgets(outage=0)),
        {"keeps_always": False},
    ),
    "never_does_not_look": Mistake(
        "A writer of *never* sends although a former owner has left messages that wait.",
        _NEVER_NEXT,
        {"never_looks": False},
    ),
    "never_looks_before_its_claim": Mistake(
        "A writer of *never* looks at the mode before it claims.", _NEVER_NEXT, {"never_looks_first": True}
    ),
    "sender_goes_on_unsettled": Mistake(
        "A sender goes on without an end to what was sent before.",
        Bounds((owner("P", (A, C), sends=2),), Budgets(outage=0), later=True),
        {"settles_the_sender": False},
    ),
    "sender_goes_on_without_a_marker": Mistake(
        "A sender goes on although one partition lacks the marker of what it has sent before.",
        _SENT_IN_TWO,
        {"knows_end": staticmethod(_one_marker_is_enough)},
    ),
    "lane_goes_on_after_an_abort_without_a_marker": Mistake(
        "A lane goes on after an abort without a look for its markers.",
        WAITING["waiting_marker_skipped_directly"].bounds,
        {"knows_end": staticmethod(_aborts_need_no_marker)},
    ),
    "sent_without_a_marker_taken_for_complete": Mistake(
        "Settling takes for complete what lacks its marker in one partition.",
        _SENT_IN_TWO,
        {"settling": native.Rules(next_step=_takes_for_complete)},
    ),
    "sent_without_a_marker_repaired_with_abort": Mistake(
        "Settling ends with an abort what lacks its marker in one partition.",
        _SENT_IN_TWO,
        {"settling": native.Rules(to_repair=_with_abort)},
    ),
    "restored_rows_sent_again": Mistake(
        "A sender does not find out that the database was put back, and has rows again that are sent.",
        _COPIED,
        {"finds_lost_decisions": False},
    ),
}
