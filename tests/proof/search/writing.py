"""The producer of librdkafka's engine and its transactions, step by step: ``Lane._start``, ``Lane.complete``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from simulator import requests as sim

from dualwrite.protocol.lives import ProducerEvent, ProducerState, WriteEvent
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Ended, EndStep
from search.owning import Owning
from search.stepping import LATER, OK
from search.values import PLACES, name, prepared_state
from search.views import open_offset, proofs_now

_E, _W = ProducerEvent, WriteEvent


class Writing(Owning):
    """An owner's producer, initialised once, and its transactions until it closes."""

    writes_by = "add"

    def shown_ends(self) -> tuple[str, Callable[..., EndStep]]:
        proofs = proofs_now(self.broker, self.p.ended.state)
        shown = ", ".join(f"{place[1]}: {proof.value}" for place, proof in sorted(proofs.items()))
        return shown, partial(self.rules.next_end_step, self.p.ended, proofs)

    def init(self) -> None:
        p = self.p
        request = sim.InitProducerId(self.rules.kafka_id(p.incarnation))
        broker, answer = self.ask(request)
        if answer.error_code in LATER:
            if broker != self.broker:
                self.go("init_transactions aborts what is ongoing", broker=broker)
            return
        ready = p._replace(
            doing="begin", producer=self.life(_E.INIT, state=ProducerState.CREATED),
            producer_id=answer.producer_id, epoch=answer.producer_epoch,
        )  # fmt: skip
        if self.rules.checks_by_an_old_snapshot:
            ready = ready._replace(item=self.db.incarnation)
        self.go("init_transactions", ready, broker=broker)
        if "init" in self.rules.silently_repeated:
            self.go("init_transactions, silently repeated", ready, broker=broker, sent=request, spends="delay")
        doubtful = self.reusable(ready._replace(producer=self.life(_E.DOUBT, state=ready.producer)))
        text = "init_transactions, slow or asked for again: maybe sent twice"
        self.go(text, doubtful, broker=broker, sent=request, spends="delay")
        self.go("init_transactions stays in the network, no answer", doubtful, sent=request, spends="delay")

    @property
    def at(self) -> int:
        """The partition that is next: both in turn."""
        return 0 if self.p.firsts[0] < 0 else 1

    def add(self) -> None:
        p, number = self.p, self.at
        request = sim.AddPartitionsToTxn(self.rules.kafka_id(p.incarnation), p.producer_id, p.epoch, (PLACES[number],))
        broker, answer = self.ask(request)
        error = answer.error_codes[0]
        text = f"AddPartitionsToTxn {number} for {name(p.label)}"
        if error is OK:
            self.go(text, p._replace(doing="produce"), broker=broker)
        elif error not in LATER:
            self.go(f"{text}: {error.name}", self.failed(_E.DOUBT))
        self.go(f"{text}: a first copy stays in the network", sent=request, spends="delay")
        if number == 1:
            self.go(f"the user's code fails in {name(p.label)}", p._replace(doing="abort"), spends="abort")

    def produce(self) -> None:
        p, number = self.p, self.at
        request = sim.Produce(
            self.rules.kafka_id(p.incarnation), p.producer_id, p.epoch, PLACES[number], p.sequences[number], (p.label,)
        )
        broker, answer = self.ask(request)
        text = f"Produce of {name(p.label)} to {number}"
        trying = p if not self.walk.forgets else p._replace(sent=p.sent | {PLACES[number]})
        if answer.error_code is OK:
            sequences = tuple(sent + (index == number) for index, sent in enumerate(p.sequences))
            firsts = (answer.base_offset, -1) if number == 0 else (p.firsts[0], answer.base_offset)
            sent = trying._replace(firsts=firsts, sequences=sequences, producer=self.life(_E.PRODUCE))
            if number == 0:
                sent = sent._replace(doing="add")
            else:
                sent = sent._replace(
                    doing="update",
                    producer=self.life(_E.PRODUCE, _E.PREPARE, _E.NAME),
                    write=self.writes(_W.PRODUCE, _W.PREPARE),
                )
                sent = sent._replace(ours=prepared_state(sent), firsts=(-1, -1))
            self.go(f"{text}: offset {answer.base_offset}", sent, broker=broker)
        elif answer.error_code not in LATER:
            self.go(f"{text}: {answer.error_code.name}", self.failed(_E.FAIL, trying))
        self.go(f"{text} stays in the network, given up", self.failed(_E.DOUBT, trying), sent=request, spends="delay")
        self.go(f"{text} fails and is not retried", self.failed(_E.FAIL, trying), spends="failure")

    def end(self) -> None:
        """``Lane.complete``: the commit in Kafka of what is decided."""
        p = self.p
        broker, error, request, text = self.end_txn(committed=True)
        known = p._replace(known=p.ours)
        if error is OK:
            ended = known._replace(producer=self.life(_E.COMMIT))
            if self.rules.knows_ends and self.walk.forgets:
                ended = ended._replace(ended=Ended(p.ours, committed=True))
            done = self.counted(ended)
            self.go(f"{text}: NONE", done, broker=broker)
            if "commit" in self.rules.silently_repeated:
                self.go(f"{text}: NONE, silently repeated", done, broker=broker, sent=request, spends="delay")
            doubtful = self.counted(ended._replace(producer=self.life(_E.DOUBT, state=ended.producer)))
            self.go(f"{text}: NONE, slow: maybe sent twice", doubtful, broker=broker, sent=request, spends="delay")
            renewed = self.renewed(known)
            self.go(f"{text}: the answer is lost", renewed, broker=broker, spends="delay")
            self.go(f"{text} stays in the network, no answer", renewed, sent=request, spends="delay")
        elif error not in LATER:
            if self.rules.answers_are_verdicts:
                done = self.counted(known._replace(producer=ProducerState.DOUBTFUL))
                wrong = self.told_complete(broker)
                self.go(f"{text}: {error.name}, taken for committed", done, wrong=wrong)
            else:
                self.go(f"{text}: {error.name}", self.renewed(known))

    def abort(self) -> None:
        """``DualWrite.abort``: the database first, then Kafka, which need not take it."""
        p = self.p
        self.writes(_W.ABORT)
        wrong = self.told_aborted()
        stopped = p._replace(todo=max(0, p.todo - 1), number=p.number + 1)
        if self.rules.knows_ends and self.walk.forgets:
            stopped = stopped._replace(ended=self.aborted())
        if p.producer is ProducerState.DOUBTFUL:
            self.go(f"has aborted {name(p.label)}, throws its producer away", self.reusable(stopped), wrong=wrong)
            return
        if p.producer is ProducerState.FAILED:
            text = f"has aborted {name(p.label)}, its client asks for the next epoch"
            self.go(text, stopped._replace(doing="raise_epoch"), wrong=wrong)
        broker, error, request, text = self.end_txn(committed=False)
        if error in LATER:
            return
        if error is OK:
            ended = stopped._replace(producer=self.life(_E.ABORT))
            done = self.reusable(ended)
            if p.producer is ProducerState.FAILED:
                done = stopped._replace(doing="raise_epoch")
            self.go(f"{text}: NONE", done, broker=broker, wrong=wrong)
            if "abort" in self.rules.silently_repeated:
                self.go(
                    f"{text}: NONE, silently repeated", done, broker=broker, sent=request, spends="delay", wrong=wrong
                )
            doubtful = self.reusable(ended._replace(producer=self.life(_E.DOUBT, state=ended.producer)))
            self.go(
                f"{text}: NONE, slow: maybe sent twice",
                doubtful,
                broker=broker,
                sent=request,
                spends="delay",
                wrong=wrong,
            )
        thrown = self.reusable(stopped._replace(producer=self.life(_E.DOUBT)))
        if error is OK:
            self.go(f"{text} stays in the network, no answer", thrown, sent=request, spends="delay", wrong=wrong)
        else:
            self.go(f"{text}: {error.name}", thrown, wrong=wrong)

    def aborted(self) -> Ended | None:
        """``Evidence.ended``: what is going to be aborted, as the partitions show it."""
        p = self.p
        if not p.sent:
            return None
        if p.ours is not None:
            return Ended(p.ours, committed=False)
        ids = PreparedTxnState(p.producer_id, p.epoch, p.incarnation)
        shown = ((place, open_offset(self.broker, place, ids)) for place in sorted(p.sent))
        firsts = tuple(FirstOffset(*place, offset, "id") for place, offset in shown if offset is not None)
        return Ended(replace(ids, first_offsets=firsts), committed=False)

    def raise_epoch(self) -> None:
        """The step of librdkafka within an abort after some errors, before the producer may be used again."""
        p = self.p
        request = sim.InitProducerId(
            self.rules.kafka_id(p.incarnation), producer_id=p.producer_id, producer_epoch=p.epoch
        )
        broker, answer = self.ask(request)
        text = f"InitProducerId with epoch {p.epoch}"
        thrown = self.reusable(p._replace(producer=self.life(_E.DOUBT)))
        if answer.error_code in LATER:
            if broker != self.broker:
                self.go(f"{text} aborts what is ongoing", broker=broker)
        elif answer.error_code is OK:
            raised = p._replace(
                producer=self.life(_E.ABORT),
                producer_id=answer.producer_id,
                epoch=answer.producer_epoch,
                sequences=(0, 0),
            )
            # Where markers are skipped, settling relies on it that no owner writes under a later epoch: ``Lane._is_usable``.
            done = thrown if self.walk.forgets else self.reusable(raised)
            self.go(f"{text}: {answer.producer_epoch}", done, broker=broker)
            if "epoch" in self.rules.silently_repeated:
                self.go(f"{text}, silently repeated", done, broker=broker, sent=request, spends="delay")
            self.go(
                f"{text}, slow or asked for again: maybe sent twice",
                thrown,
                broker=broker,
                sent=request,
                spends="delay",
            )
        else:
            self.go(f"{text}: {answer.error_code.name}", thrown)

    def end_txn(self, *, committed: bool):
        p = self.p
        request = sim.EndTxn(self.rules.kafka_id(p.incarnation), p.producer_id, p.epoch, committed)
        broker, answer = self.ask(request)
        return broker, answer.error_code, request, f"EndTxn({'commit' if committed else 'abort'}) of {name(p.label)}"
