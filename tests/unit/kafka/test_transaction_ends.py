"""Questions about the ends of transactions, of both engines in one round, on simulated servers."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress

import pytest
from harness.interruption import Interruption
from harness.simulated import TIMEOUT_S, TOPIC, Here, Servers
from harness.simulated_native import NativeOwner
from simulator.environment import expire_producer, resume, suspend

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError
from dualwrite.kafka import transaction_ends as producer_ends
from dualwrite.kafka.transaction_ends import EARLY_S, EndQuestions, PendingEnd, ask_for_ends, know_end
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Ended, EndStep
from dualwrite.protocol.values import LogProof, ShownProducer
from dualwrite.writing.dual_write import Ending


@pytest.fixture
def owner(servers: Servers) -> NativeOwner:
    owner = NativeOwner(servers)
    owner.produce("a")
    owner.produce("b", partition=1)
    return owner


def steps(servers: Servers, *ended: Ended) -> list[EndStep]:
    def work(here: Here) -> list[EndStep]:
        return list(ask_for_ends(here.context.coordinator, [PendingEnd(one) for one in ended], Deadline(TIMEOUT_S)))

    found = servers.run(work, "asks")
    assert isinstance(found, list)
    return found


def known(servers: Servers, ended: Ended) -> tuple[EndStep, float]:
    def work(here: Here) -> tuple[EndStep, float]:
        since = now_s()
        return know_end(here.context.coordinator, PendingEnd(ended), Deadline(TIMEOUT_S)), now_s() - since

    step, waited_s = servers.run(work, "asks")
    return step, waited_s


@pytest.mark.parametrize("committed", [True, False])
def test_both_engines_ends_are_known_in_one_round(servers: Servers, owner: NativeOwner, committed: bool) -> None:
    def prepares(here: Here) -> object:
        with here.block(here.ready("others"), Ending.PREPARE) as transaction:
            transaction.produce(TOPIC, "c", partition=0)
        return transaction.prepared

    shared = servers.run(prepares, "B")
    native = owner.state()
    both = Ended(native, committed), Ended(shared, committed=True)  # type: ignore[arg-type]
    assert steps(servers, *both) == [EndStep.WAIT, EndStep.WAIT]
    owner.end(committed=committed)
    assert steps(servers, *both) == [EndStep.KNOWN, EndStep.WAIT]


def test_a_marker_that_the_broker_has_forgotten_is_settled(servers: Servers, owner: NativeOwner) -> None:
    state = owner.state()
    owner.end(forgets=1)
    step, waited_s = known(servers, Ended(state, committed=True))
    assert step is EndStep.SETTLE
    assert waited_s >= EARLY_S


def test_the_next_transaction_in_the_same_partition_shows_nothing_of_the_last_one(
    servers: Servers, owner: NativeOwner
) -> None:
    """Written into what the broker has forgotten to end, it raises the epoch there."""
    state = owner.state()
    owner.end(forgets=1)
    owner.produce("next", partition=1)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]


def test_a_leader_that_does_not_answer_or_does_not_know_the_producer_shows_nothing(
    servers: Servers, owner: NativeOwner
) -> None:
    state = owner.state()
    owner.end()
    simulation, last = servers.simulation, (TOPIC, 1)
    simulation.broker = suspend(simulation.broker, last)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]
    simulation.broker = expire_producer(resume(simulation.broker, last), last, owner.producer_id)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]
    assert known(servers, Ended(state, committed=True))[0] is EndStep.SETTLE


def test_a_batch_that_was_not_acknowledged_ends_the_incarnation_at_once(servers: Servers, owner: NativeOwner) -> None:
    state = owner.state()
    owner.end(committed=False)
    assert known(servers, Ended(state, committed=False, complete=False)) == (EndStep.SETTLE, 0.0)


# --- one question about all ends


class Asked:
    """A coordinator that answers its questions when a test says so.

    Attributes:
        questions: For each question, the transactions that it was about.
        shown: What each producer's partitions show, by producer id.
    """

    def __init__(self) -> None:
        self.questions: list[list[PreparedTxnState]] = []
        self.shown: dict[int, ShownProducer] = {}
        self.has_answered = False
        self.knows_leaders = True
        self.fails_with: Exception | None = None
        self.native: list[dict[tuple[str, int], ShownProducer]] = []
        self.shared: list[dict[tuple[str, int], LogProof]] = []

    def post_question(self, native: list[PreparedTxnState], shared: list[PreparedTxnState]) -> Asked | None:
        if self.fails_with is not None:
            raise self.fails_with
        self.questions.append([*native, *shared])
        self._asked = native, shared
        return self if self.knows_leaders else None

    def has_come(self) -> bool:
        native, shared = self._asked
        self.native = [
            dict.fromkeys(state.partitions, self.shown[state.producer_id]) if state.producer_id in self.shown else {}
            for state in native
        ]
        self.shared = [dict.fromkeys(state.partitions, LogProof.COMMITTED) for state in shared]
        return self.has_answered

    def close(self) -> None:
        self.questions.clear()


def pending(producer_id: int, *, is_native: bool = True, complete: bool = True) -> PendingEnd:
    state = (
        PreparedTxnState.native(producer_id, 3, 1, {(TOPIC, 0): 5}, {TOPIC: "id"})
        if is_native
        else PreparedTxnState(producer_id, 0, 1, (FirstOffset(TOPIC, 0, 5),))
    )
    return PendingEnd(Ended(state, committed=True, complete=complete))


def test_all_ends_are_asked_for_at_once_and_one_question_at_a_time() -> None:
    kafka = Asked()
    ends, all_ends = EndQuestions(kafka), [pending(7), pending(8), pending(9, is_native=False)]
    for one in all_ends:
        ends.note(one)
    ends.ask()
    ends.ask()
    assert kafka.questions == [[one.ended.state for one in all_ends]]
    kafka.shown, kafka.has_answered = {7: ShownProducer(4), 8: ShownProducer(4, 9)}, True
    ends.take_answer()
    assert [one.known for one in all_ends] == [True, False, True]
    ends.ask()
    assert kafka.questions[1:] == [[all_ends[1].ended.state]]


def test_an_answer_tells_nothing_of_what_has_ended_after_its_question() -> None:
    kafka = Asked()
    ends, before, after = EndQuestions(kafka), pending(7), pending(8)
    ends.note(before)
    ends.ask()
    ends.note(after)
    kafka.shown, kafka.has_answered = {7: ShownProducer(4), 8: ShownProducer(4)}, True
    ends.take_answer()
    assert [before.known, after.known] == [True, False]


def test_nothing_is_asked_where_every_end_is_known_or_nobody_minds_any_more() -> None:
    kafka = Asked()
    ends, one = EndQuestions(kafka), pending(7)
    ends.ask()
    ends.note(one)
    ends.forget(one)
    ends.ask()
    assert kafka.questions == []


def test_whoever_needs_an_end_waits_for_the_question_about_all() -> None:
    kafka = Asked()
    ends, one = EndQuestions(kafka), pending(7)
    kafka.shown, kafka.has_answered = {7: ShownProducer(4)}, True
    assert ends.know(one, Deadline(TIMEOUT_S))


@pytest.mark.parametrize("known", [True, False])
def test_whoever_needs_an_end_asks_alone_where_the_question_cannot_show_it(known: bool) -> None:
    kafka = Asked()
    kafka.knows_leaders, kafka.has_answered = known, True
    assert not EndQuestions(kafka).know(pending(7), Deadline(TIMEOUT_S))
    assert not EndQuestions(None).know(pending(7), Deadline(TIMEOUT_S))
    assert not EndQuestions(kafka).know(pending(7, complete=False), Deadline(TIMEOUT_S))


def test_a_question_that_cannot_be_posted_disturbs_nobody_and_the_next_one_is() -> None:
    kafka = Asked()
    kafka.fails_with = ConfigurationError("no right to read the topic")
    ends, one = EndQuestions(kafka), pending(7)
    ends.note(one)
    ends.ask()
    kafka.fails_with = None
    kafka.shown, kafka.has_answered = {7: ShownProducer(4)}, True
    ends.ask()
    ends.take_answer()
    assert one.known


def test_a_question_without_an_answer_does_not_keep_others_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, clock = Asked(), [0.0]
    monkeypatch.setattr(producer_ends, "now_s", lambda: clock[0])
    ends, one = EndQuestions(kafka), pending(7)
    ends.note(one)
    ends.ask()
    clock[0] = 60.0
    ends.take_answer()
    ends.ask()
    assert len(kafka.questions) == 2


def test_an_interruption_at_any_line_leaves_the_questions_to_others() -> None:
    for line in itertools.count(1):
        kafka = Asked()
        ends, one = EndQuestions(kafka), pending(7)
        ends.note(one)
        kafka.shown, kafka.has_answered = {7: ShownProducer(4)}, True
        interruption = Interruption(line)
        with suppress(KeyboardInterrupt), interruption.armed():
            ends.ask()
            ends.take_answer()
        if interruption.at is None:
            break
        others = threading.Thread(target=lambda ends=ends: (ends.ask(), ends.take_answer()))
        others.start()
        others.join(60)
        assert one.known, interruption.at
    assert line > 20
