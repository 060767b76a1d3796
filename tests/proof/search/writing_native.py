"""The native producer and its transactions, step by step: ``NativeInstance``, whose every transaction has an epoch of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from simulator import requests as sim
from simulator.requests import ErrorCode, TopicPartition

from dualwrite.kafka.error_codes import Phase
from dualwrite.kafka.native.produce_state import Meaning, Refusal, Request, meaning_of
from dualwrite.kafka.native.producer import failure_of, refused
from dualwrite.protocol.lives import ProducerEvent, ProducerState, WriteEvent
from dualwrite.protocol.settle import Ended, EndStep
from dualwrite.protocol.values import ShownProducer, TransactionStatus
from search.owning import Owning
from search.values import PLACES, Process, name, prepared_state
from search.views import describe, producers, proofs_now

_E, _W = ProducerEvent, WriteEvent
_AGAIN = frozenset({Meaning.AGAIN, Meaning.MOVED})
_COMPLETE = {TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT}
_IN_THE_NETWORK = "stays in the network"


@cache
def event_after_end(code: ErrorCode, phase: Phase) -> ProducerEvent:
    """The product's event after an ``EndTxn`` that was refused."""
    return failure_of(code, phase, transactional_id="T").event


@cache
def event_after_produce(code: ErrorCode | None, meaning: Meaning, place: TopicPartition) -> ProducerEvent:
    """The product's event after a batch that was refused; not acknowledged, if ``code`` is None."""
    return refused(Refusal(meaning, code, place), Phase.DELIVERY, transactional_id="T").event


class NativeWriting(Owning):
    """An owner's native producer, initialised once, and its transactions until it closes."""

    writes_by = "produce"

    def init(self) -> None:
        """``CoordinatorRequests.init_producer_id``: never sent again after silence."""
        p = self.p
        request = sim.InitProducerId(self.rules.kafka_id(p.incarnation), self.walk.native_timeout_ms)
        broker, answer = self.ask(request)
        if meaning_of(Request.INIT_PRODUCER_ID, answer.error_code) in _AGAIN:
            if broker != self.broker:
                self.go("InitProducerId aborts what is ongoing", broker=broker)
            return
        ids = {"producer_id": answer.producer_id, "epoch": answer.producer_epoch}
        ready = p._replace(doing="begin", producer=self.life(_E.INIT, state=ProducerState.CREATED), **ids)
        if self.rules.checks_by_an_old_snapshot:
            ready = ready._replace(item=self.db.incarnation)
        self.go(f"InitProducerId: epoch {answer.producer_epoch}", ready, broker=broker)
        doubtful = self.reusable(ready._replace(producer=self.life(_E.DOUBT, state=ProducerState.CREATED)))
        self.go("InitProducerId: the answer is lost", doubtful, broker=broker, spends="delay")
        self.go(f"InitProducerId {_IN_THE_NETWORK}, no answer", doubtful, sent=request, spends="delay")
        if self.rules.repeats_init_after_silence:
            self.go(f"InitProducerId {_IN_THE_NETWORK}, and is sent again", sent=request, spends="delay")

    @property
    def at(self) -> int:
        """The partition that is next: both in turn."""
        return 0 if self.p.firsts[0] < 0 else 1

    def produce(self) -> None:
        """``ProduceCore``: a batch is sent again until it is answered, refused or given up."""
        p, number = self.p, self.at
        place, id_ = PLACES[number], self.rules.kafka_id(p.incarnation)
        request = sim.Produce(id_, p.producer_id, p.epoch, place, 0, (p.label,), 2)
        text = f"Produce of {name(p.label)} to {number}"
        sent = p._replace(sent=p.sent | {place})
        waiting = sent._replace(unanswered=p.unanswered | {place})
        broker, answer = self.ask(request)
        meaning = meaning_of(Request.PRODUCE, answer.error_code)
        if meaning is Meaning.DONE:
            done = self.acknowledged(sent._replace(unanswered=p.unanswered - {place}), number, answer.base_offset)
            self.go(f"{text}: offset {answer.base_offset}", done, broker=broker)
            self.go(f"{text}: the answer is lost, and it is sent again", waiting, broker=broker, spends="delay")
            given_up = self.failed(event_after_produce(None, Meaning.ABORT, place), waiting)
            self.go(f"{text}: the answers are lost, and it is given up", given_up, broker=broker, spends="delay")
        elif meaning not in _AGAIN:
            event = event_after_produce(answer.error_code, meaning, place)
            self.go(f"{text}: {answer.error_code.name}", self.failed(event, sent))
        self.go(f"{text} {_IN_THE_NETWORK}, and is sent again", waiting, sent=request, spends="delay")
        given_up = self.failed(event_after_produce(None, Meaning.ABORT, place), waiting)
        self.go(f"{text} {_IN_THE_NETWORK}, and is given up", given_up, sent=request, spends="delay")
        if not self.rules.waits_for_acknowledgements:
            unacknowledged = self.acknowledged(waiting, number, answer.base_offset)
            self.go(f"{text} {_IN_THE_NETWORK}, and is not waited for", unacknowledged, sent=request, spends="delay")
        failed = self.failed(event_after_produce(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, Meaning.ABORT, place), sent)
        self.go(f"{text} is refused for good", failed, spends="failure")
        self.go(f"the user's code fails in {name(p.label)}", p._replace(doing="abort"), spends="abort")

    def acknowledged(self, sent: Process, number: int, offset: int) -> Process:
        """The process after the last answer about a batch; after all of them, it is prepared."""
        firsts = (offset, -1) if number == 0 else (sent.firsts[0], offset)
        if number == 0:
            return sent._replace(firsts=firsts, producer=self.life(_E.PRODUCE))
        prepared = sent._replace(
            doing="update", firsts=firsts, producer=self.life(_E.PRODUCE, _E.PREPARE, _E.NAME),
            write=self.writes(_W.PRODUCE, _W.PREPARE),
        )  # fmt: skip
        return prepared._replace(ours=prepared_state(prepared, witnesses=self.walk.witnesses), firsts=(-1, -1))

    def end(self) -> None:
        """``NativeInstance.commit``: sent again until it is answered."""
        p = self.p
        broker, answer, request, text = self.end_txn(committed=True)
        meaning = meaning_of(Request.END_TXN, answer.error_code)
        known = p._replace(known=p.ours)
        if meaning is Meaning.DONE:
            ended = self.following(known, answer)._replace(producer=self.life(_E.COMMIT))
            self.go(f"{text}: epoch {answer.producer_epoch}", self.counted(self.noted(ended, p.ours)), broker=broker)
            self.unanswered_end(text, request, broker, self.renewed(known))
        elif meaning not in _AGAIN:
            assert event_after_end(answer.error_code, Phase.COMMIT) is _E.DOUBT
            if self.rules.answers_are_verdicts:
                following = known._replace(producer=self.life(_E.COMMIT), epoch=p.epoch + 1)
                wrong = self.told_complete(broker)
                self.go(f"{text}: {answer.error_code.name}, taken for committed", self.counted(following), wrong=wrong)
            else:
                self.go(f"{text}: {answer.error_code.name}", self.renewed(known))
        if self.rules.takes_silence_for_success:
            following = known._replace(producer=self.life(_E.COMMIT), epoch=p.epoch + 1)
            text = f"{text} {_IN_THE_NETWORK}, and is taken for done"
            self.go(text, self.counted(following), sent=request, spends="delay")

    def unanswered_end(
        self, text: str, request: sim.EndTxn, broker, given_up: Process, wrong: str | None = None
    ) -> None:
        """The ways in which an ``EndTxn`` is not answered that would succeed."""
        self.go(f"{text}: the answer is lost, and it is sent again", broker=broker, spends="delay")
        self.go(f"{text} {_IN_THE_NETWORK}, and is sent again", sent=request, spends="delay")
        lost = f"{text}: the answers are lost, and it is given up"
        self.go(lost, given_up, broker=broker, spends="delay", wrong=wrong)
        late = f"{text} {_IN_THE_NETWORK}, and is given up"
        self.go(late, given_up, sent=request, spends="delay", wrong=wrong)

    def following(self, p: Process, answer: sim.EndTxnResponse) -> Process:
        """With the producer id and epoch of the next transaction."""
        if not self.rules.takes_epoch_over:
            return p
        return p._replace(producer_id=answer.producer_id, epoch=answer.producer_epoch)

    def noted(self, p: Process, state, *, committed: bool = True, complete: bool = True) -> Process:
        """With the transaction of which the end has to be known."""
        if not self.rules.knows_ends:
            return p
        noted = p._replace(ended=Ended(state, committed, complete))
        if self.walk.answers_late and self.rules.asks_before_the_answer:
            # The leaders have answered before the coordinator has.
            before = {place: producers(self.broker, place) for place in PLACES}
            rows = self.rules.rows_of(state.producer_id, sorted(noted.ended.partitions), before)
            noted = noted._replace(shown=tuple(rows.items()))
        return noted

    def abort(self) -> None:
        """``DualWrite.abort``, ``NativeInstance.abort``: the database first, then Kafka, which need not take it."""
        p = self.p
        self.writes(_W.ABORT)
        wrong = self.told_aborted()
        stopped = p._replace(todo=max(0, p.todo - 1), number=p.number + 1)
        if p.producer is ProducerState.DOUBTFUL:
            self.go(f"has aborted {name(p.label)}, throws its producer away", self.reusable(stopped), wrong=wrong)
            return
        acknowledged = p.ours is not None or p.sent - p.unanswered
        if not (acknowledged if self.rules.aborts_only_what_is_acknowledged else p.sent):
            ready = stopped._replace(producer=self.life(_E.ABORT))
            self.go(f"has aborted {name(p.label)}, nothing to end", self.reusable(ready), wrong=wrong)
            return
        broker, answer, request, text = self.end_txn(committed=False)
        meaning = meaning_of(Request.END_TXN, answer.error_code)
        given_up = Ended(p.ours or prepared_state(p), committed=False, complete=not p.unanswered)
        thrown = self.reusable(stopped._replace(producer=self.life(_E.DOUBT), ended=given_up))
        if meaning is Meaning.DONE:
            ended = self.following(stopped, answer)._replace(producer=self.life(_E.ABORT))
            noted = self.noted(ended, given_up.state, committed=False, complete=given_up.complete)
            self.go(f"{text}: epoch {answer.producer_epoch}", self.reusable(noted), broker=broker, wrong=wrong)
            self.unanswered_end(text, request, broker, thrown, wrong)
        elif meaning not in _AGAIN:
            assert event_after_end(answer.error_code, Phase.ABORT) is _E.DOUBT
            self.go(f"{text}: {answer.error_code.name}", thrown, wrong=wrong)

    def end_txn(self, *, committed: bool):
        p = self.p
        request = sim.EndTxn(self.rules.kafka_id(p.incarnation), p.producer_id, p.epoch, committed, 2)
        broker, answer = self.ask(request)
        return broker, answer, request, f"EndTxn({'commit' if committed else 'abort'}) of {name(p.label)}"

    def shown_ends(self) -> tuple[str, Callable[..., EndStep]]:
        ended = self.p.ended
        if self.rules.takes_complete_for_the_end:
            view = describe(self.broker, self.rules.kafka_id(self.p.incarnation))
            step = EndStep.KNOWN if view.status in _COMPLETE else EndStep.WAIT
            return f"the coordinator shows {view.status.value}", lambda **_: step
        shown = self.rows() if self.p.shown is None else dict(self.p.shown)
        words = ", ".join(
            f"{place[1]}: epoch {one.epoch}, "
            + ("nothing open" if one.open_from is None else f"open from {one.open_from}")
            for place, one in shown.items()
        )
        return words, partial(self.rules.next_native_end_step, ended, shown)

    def rows(self) -> dict[TopicPartition, ShownProducer]:
        """The rows of its own producer in the answer to one question about all producers."""
        ended = self.p.ended
        shown = {place: producers(self.broker, place) for place in PLACES}
        return self.rules.rows_of(ended.state.producer_id, sorted(ended.partitions), shown)

    def know_end(self) -> None:
        """``EndQuestions``: one question about all, whose answer may be read long after the leaders have given it."""
        p = self.p
        if not self.walk.answers_late or not (p.todo or self.rules.knows_ends_before_it_closes):
            super().know_end()
            return
        answer = tuple(self.rows().items())
        if p.shown is None:
            self.go("asks how all transactions have ended", p._replace(shown=answer))
            return
        super().know_end()
        self.go("asks again how all transactions have ended", p._replace(shown=answer))

    def end_at_rest(self) -> EndStep:
        return self.rules.native_step_at_rest(self.p.known, proofs_now(self.broker, self.p.known))
