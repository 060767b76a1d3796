"""Mistakes of owners and settlers of native transactions, and of brokers that serve them."""

from __future__ import annotations

from dataclasses import replace

from simulator import broker as kafka
from simulator import requests as sim
from simulator.state import Broker, transaction

from dualwrite.protocol import settle, settle_native
from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.settle import EndStep
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep
from dualwrite.protocol.values import EndAnswer, TransactionStatus
from search.mistakes.planting import budget, within
from search.rules import Rules
from search.world import Bounds

NATIVE, LIBRDKAFKA = Engine.NATIVE, Engine.LIBRDKAFKA
OWNER_AND_SETTLER = Bounds((2, 0), 2, engines=(NATIVE, NATIVE))
TWO_OWNERS = Bounds((2, 1), 2, engines=(NATIVE, NATIVE))
ONE_AND_SETTLER = Bounds((1, 0), 2, engines=(NATIVE, NATIVE))
TWO_SETTLERS = Bounds((1, 0, 0), 3, budget(forgotten=1), epochs=5, engines=(NATIVE, NATIVE, NATIVE))


# --- the owner


@within(OWNER_AND_SETTLER, caught=False)
class EpochNotTakenOver(Rules):
    """A producer begins its next transaction under the epoch of the last one. Where the end of that is known, brokers refuse it."""

    takes_epoch_over = False


@within(OWNER_AND_SETTLER)
class EpochNotTakenOverAndNoEndAwaited(Rules):
    """A producer begins its next transaction at once, under the epoch of the last one."""

    takes_epoch_over = False
    knows_ends = False


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class PreparedBeforeAllAcknowledgements(Rules):
    """A transaction counts as prepared, and is decided and committed, though a batch is not acknowledged."""

    waits_for_acknowledgements = False


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class UnacknowledgedBatchNotAborted(Rules):
    """A producer sends no abort where no batch was acknowledged, and goes on under the same epoch."""

    aborts_only_what_is_acknowledged = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1)))
class EndedByTheTimeOutTakenForACommit(Rules):
    """A commit that is refused because the transaction is not open any more counts as a repetition that succeeded."""

    answers_are_verdicts = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1, timeout=1)))
class SilenceTakenForACommit(Rules):
    """A producer takes a commit without an answer for done, and goes on under the next epoch."""

    takes_silence_for_success = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class BeginsOnTheCoordinatorsWord(Rules):
    """A native producer begins its next transaction on the answer to its last one."""

    knows_ends = False


@within(OWNER_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class CompleteTakenForTheEndEverywhere(Rules):
    """A native producer begins its next transaction when the coordinator shows that the last one is complete."""

    takes_complete_for_the_end = True


class _AnotherRow(Rules):
    @staticmethod
    def rows_of(_producer_id, partitions, shown):
        return {place: max(shown[place].values(), key=lambda row: row.epoch) for place in partitions if shown[place]}


@within(Bounds((2, 2), 2, budget(forgotten=1), engines=(NATIVE, NATIVE)))
class AnotherProducersRowTakenForItsOwn(_AnotherRow):
    """In the answer to the question about all producers, a native producer takes the row with the latest epoch for its own."""


@within(OWNER_AND_SETTLER._replace(budgets=budget(forgotten=1), answers_late=True), caught=False)
class AsksBeforeTheAnswerToTheEnd(Rules):
    """A native producer asks how its transaction has ended before the end is answered. Leaders show a later epoch after it alone."""

    asks_before_the_answer = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(forgotten=1), answers_late=True), caught=False)
class FormerAnswerTakenForTheNextEnd(Rules):
    """A native producer reads the answer about its last transaction once more. It shows no epoch that is later than the next one's."""

    keeps_former_answers = True


@within(Bounds((3, 0), 2, budget(forgotten=1), engines=(NATIVE, NATIVE), answers_late=True))
class NothingOpenInAFormerAnswer(Rules):
    """A native producer takes "nothing open" for the end, and reads the answer about its last transaction for the next one."""

    keeps_former_answers = True

    @staticmethod
    def next_native_end_step(ended, shown, *, early: bool) -> EndStep:
        if ended.complete and shown and all(row.open_from is None for row in shown.values()):
            return EndStep.KNOWN
        return settle.next_native_end_step(ended, shown, early=early)


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class ANewProducerAskedForAgainAfterSilence(Rules):
    """A producer repeats InitProducerId without an answer: the first copy may come late, and abort what it has begun since."""

    repeats_init_after_silence = True


@within(OWNER_AND_SETTLER)
class NoCheckBeforeTheFirstNativeProduce(Rules):
    """A native owner does not read the row's incarnation before it produces."""

    checks_incarnation = False


@within(TWO_OWNERS)
class UnconditionalUpdateByANativeOwner(Rules):
    """A native owner writes its state into the row even if another process owns the id by now."""

    updates_on_condition = False


@within(ONE_AND_SETTLER._replace(budgets=budget(marker=1), tools_hit_owners=True))
class NativeClosesWithoutTheProof(Rules):
    """An owner that closes or idles records a native transaction as committed because it has ended everywhere."""

    @staticmethod
    def native_step_at_rest(_state, _proofs) -> EndStep:
        return EndStep.KNOWN


@within(Bounds((1, 1), 2, engines=(NATIVE, NATIVE)))
class OneKafkaIdForAllNativeIncarnations(Rules):
    """Every native owner initialises the same Kafka id."""

    @staticmethod
    def kafka_id(_incarnation: int) -> str:
        return "T"


# --- settling


class Choosing(Rules):
    """Another choice than the product's."""

    def next_native_step(self, known: NativeKnowledge) -> NativeStep:
        return self.choose(known, settle_native.next_native_step(known))

    def choose(self, _known: NativeKnowledge, step: NativeStep) -> NativeStep:
        raise NotImplementedError


@within(ONE_AND_SETTLER)
class NativeAbortedBeforeComplete(Choosing):
    """A settler aborts what is open under a native owner's epoch, though it is what the row names."""

    def choose(self, known, step):
        if known.view is None:
            return NativeStep.LOOK
        return NativeStep.ABORT if known.view.status is TransactionStatus.ONGOING else step


@within(ONE_AND_SETTLER._replace(budgets=budget(timeout=1)))
class NativeTimeOutTakenForACommit(Choosing):
    """A settler finds that the broker has timed out a decided native transaction, and records it as committed."""

    def choose(self, _known, step):
        return NativeStep.RECORD_COMMITTED if step is NativeStep.RECORD_LOST else step


@within(ONE_AND_SETTLER._replace(budgets=budget(timeout=1)))
class NothingOpenTakenForACommit(Choosing):
    """A settler takes a native transaction for committed because nothing is open any more."""

    def choose(self, known, _step):
        step = settle_native.next_native_step(replace(known, committed=None))
        if step is NativeStep.PROVE and known.still_open is None:
            return NativeStep.LOOK_FOR_OPEN
        return NativeStep.RECORD_COMMITTED if step is NativeStep.PROVE and not known.still_open else step


@within(ONE_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class SuccessTakenForTheEndEverywhere(Choosing):
    """A settler whose commit was answered with success looks at no partition."""

    def choose(self, known, step):
        if known.is_pending and known.answer is EndAnswer.ENDED:
            return NativeStep.RECORD_COMMITTED
        return step if known.is_pending else NativeStep.FINISH


@within(ONE_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class WaitsForWhatIsForgotten(Choosing):
    """A settler waits for a marker that the broker has skipped."""

    def choose(self, _known, step):
        return NativeStep.WAIT if step is NativeStep.REPAIR else step


@within(ONE_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class RepairAbortsEverything(Rules):
    """A settler ends with abort what the broker has forgotten to end, the decided transaction too."""

    @staticmethod
    def to_repair(known: NativeKnowledge):
        return frozenset(found.partition for found in known.still_open or ()), False


@within(OWNER_AND_SETTLER._replace(incarnations=3, budgets=budget(forgotten=1, abort=1), epochs=6))
class RepairCommitsEverything(Rules):
    """A settler ends with commit what the broker has forgotten to end, an undecided transaction too."""

    @staticmethod
    def to_repair(known: NativeKnowledge):
        return frozenset(found.partition for found in known.still_open or ()), True


@within(TWO_SETTLERS)
class AbortsAnotherSettlersRepair(Choosing):
    """A settler aborts whatever it finds open under a settler's epoch."""

    def choose(self, _known, step):
        return NativeStep.ABORT if step is NativeStep.JOIN else step


@within(TWO_SETTLERS._replace(transactions=(2, 0, 0), budgets=budget(forgotten=1, abort=1), epochs=6))
class CommitsEveryRepairOfAnotherSettler(Choosing):
    """A settler commits whatever it finds open under a settler's epoch."""

    def choose(self, known, step):
        view = known.view
        is_repair = known.fence is not None and view is not None and view.epoch >= known.fence
        return NativeStep.JOIN if step is NativeStep.ABORT and is_repair else step


LIMITED = ONE_AND_SETTLER._replace(incarnations=3, budgets=budget(forgotten=1, timeout=1), epochs=5, witnesses=1)


@within(LIMITED)
class RepairsBeforeTheLossIsRecorded(Choosing):
    """A settler ignores the coordinator's word on the time-out until its own repair has overwritten it."""

    def choose(self, known, _step):
        return settle_native.next_native_step(replace(known, committed=None))


@within(LIMITED)
class RepairsAlthoughItCouldTimeOut(Choosing):
    """A settler repairs with commit a partition of which no offset is known, though the broker may time the repair out."""

    def choose(self, _known, step):
        return NativeStep.REPAIR if step is NativeStep.STOP else step


@within(TWO_SETTLERS)
class FencesByInitProducerId(Rules):
    """A settler raises the epoch by InitProducerId, which names no transaction."""

    fences_by_init = True


@within(TWO_SETTLERS, caught=False)
class FenceWrittenWithoutItsCondition(Rules):
    """A settler writes the fence whatever the row shows by then. As no owner raises an epoch before its decided end is known, all
    settlers write the same."""

    compares_fence = False


@within(TWO_SETTLERS)
class FenceNotWritten(Choosing):
    """A settler raises the epoch without writing first into the row that it will."""

    def choose(self, known, step):
        view = known.view
        if known.is_fence_known and view is not None:
            fenced = view.status is not TransactionStatus.ONGOING and view.epoch >= known.prepared.epoch + 2
            return settle_native.next_native_step(replace(known, fence=view.epoch if fenced else view.epoch + 1))
        return step


# --- the broker: what its rules for native transactions rule out


class OtherBroker(Rules):
    """A broker with another rule."""

    sentence = ""

    def handle(self, broker: Broker, request: sim.Request):
        return kafka.handle(broker, self.taken_for(broker, request))

    def taken_for(self, broker: Broker, request: sim.Request) -> sim.Request:
        raise NotImplementedError

    @staticmethod
    def later_epoch(broker: Broker, request: sim.EndTxn | sim.Produce) -> int:
        """The coordinator's epoch if a transaction of a later epoch than the request's is open."""
        known = transaction(broker, request.transactional_id)
        if known is None or known.state != sim.ONGOING or known.producer_id != request.producer_id:
            return request.producer_epoch
        return max(request.producer_epoch, known.producer_epoch)


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class BrokerEndsWhateverIsOpen(OtherBroker):
    """A broker takes a late EndTxn for the end of what the same producer has open by then (KAFKA-17754)."""

    def taken_for(self, broker, request):
        if isinstance(request, sim.EndTxn):
            return request._replace(producer_epoch=self.later_epoch(broker, request))
        return request


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1, abort=1)))
class BrokerTakesMessagesOfAFormerEpoch(OtherBroker):
    """A broker adds a late message to what the same producer has open by then."""

    def taken_for(self, broker, request):
        if isinstance(request, sim.Produce):
            return request._replace(producer_epoch=self.later_epoch(broker, request))
        return request
