"""Mistakes of owners and settlers of librdkafka's transactions, and those that have nothing to do with the engine."""

from __future__ import annotations

from dataclasses import replace

from dualwrite.protocol import process, settle
from dualwrite.protocol.process import Doubt, DoubtStep
from dualwrite.protocol.settle import Knowledge, SettleStep
from dualwrite.protocol.values import TransactionStatus, shows_same_transaction
from search.mistakes.planting import OWNER_AND_SETTLER, TWO_OWNERS, budget, within
from search.rules import Rules
from search.world import Bounds

# --- the owner


@within(OWNER_AND_SETTLER, open_is_fine=True, name="no_check_before_the_first_produce_and_readers_wait_anyway")
@within(OWNER_AND_SETTLER)
class NoCheckBeforeTheFirstProduce(Rules):
    """An owner does not read the row's incarnation before it produces."""

    checks_incarnation = False


@within(OWNER_AND_SETTLER)
class CheckedByAnOldSnapshot(Rules):
    """An owner's check sees the row as it was when its last commit in Kafka was sent, as at REPEATABLE READ."""

    checks_by_an_old_snapshot = True


@within(TWO_OWNERS)
class UnconditionalUpdate(Rules):
    """An owner writes its state into the row even if another process owns the id by now."""

    updates_on_condition = False


@within(OWNER_AND_SETTLER._replace(budgets=budget(unseen=1)))
class DecidesInAnyTransaction(Rules):
    """An owner writes its state into the row although the database has ended its transaction: the UPDATE stands alone."""

    decides_in_its_own_transaction = False


@within(OWNER_AND_SETTLER._replace(budgets=budget(unseen=1)))
class CommitOfNothingBelieved(Rules):
    """An owner takes the answer to its COMMIT for a decision, although there was no transaction any more to commit."""

    believes_a_commit_of_nothing = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class KeptAfterADoubtfulEnd(Rules):
    """A producer goes on after a commit that may have been sent twice, because it answered success."""

    silently_repeated = frozenset({"commit"})


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1, abort=1)))
class KeptAfterADoubtfulAbort(Rules):
    """A producer goes on after an abort that may have been sent twice, because it answered success."""

    silently_repeated = frozenset({"abort"})


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1)))
class KeptAfterADoubtfulInit(Rules):
    """A producer is used although its initialisation may have been sent twice, because it answered success."""

    silently_repeated = frozenset({"init"})


@within(OWNER_AND_SETTLER._replace(budgets=budget(delay=1, failure=1)))
class KeptAfterADoubtfulNextEpoch(Rules):
    """A producer is used although its client may have asked for the next epoch twice, within an abort that answered success."""

    silently_repeated = frozenset({"epoch"})


@within(OWNER_AND_SETTLER._replace(budgets=budget(abort=1)))
class FailedCommitTakenForCommitted(Rules):
    """A COMMIT that the database has turned into a ROLLBACK is taken for done, and Kafka commits."""

    takes_a_failed_commit_for_committed = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1)))
class FencedTakenForCommitted(Rules):
    """An owner whose commit in Kafka is answered with "fenced" believes that the process that fenced it has committed."""

    answers_are_verdicts = True


@within(TWO_OWNERS)
class OneKafkaIdForAllIncarnations(Rules):
    """Every owner initialises the same Kafka id, as programs do that know nothing of incarnations."""

    @staticmethod
    def kafka_id(_incarnation: int) -> str:
        return "T"


@within(TWO_OWNERS)
class ConditionalInitTakenForACompareAndSet(OneKafkaIdForAllIncarnations):
    """All owners share a Kafka id, and a settler that retires it names the producer id and epoch that it has seen, to be safe."""

    retires_what_it_has_seen = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(forgotten=1)))
class GoneOnBeforeTheEndIsKnown(Rules):
    """An owner begins its next transaction as soon as Kafka has answered the end of the last one."""

    knows_ends = False


@within(Bounds((1, 0), 2, budget(forgotten=1)))
class RecordedAsCommittedWithoutProof(Rules):
    """An owner that closes records its last transaction as committed because Kafka has answered so."""

    knows_ends_before_it_closes = False


# --- a COMMIT without an answer


@within(OWNER_AND_SETTLER._replace(budgets=budget(answer=1)))
class LostCommitAnswerTakenForNo(Rules):
    """An owner whose COMMIT was not answered takes it for rolled back, aborts in Kafka, and may run the work again."""

    @staticmethod
    def next_doubt_step(_known: Doubt) -> DoubtStep:
        return DoubtStep.ABORTED


@within(OWNER_AND_SETTLER._replace(budgets=budget(answer=1)))
class RowInDoubtReadWithoutItsLock(Rules):
    """An owner whose COMMIT was not answered reads the row at once, while its old session may yet commit."""

    waits_for_the_lock_in_doubt = False


AT_ONCE = Bounds((2, 0), 5, budget(answer=1), at_once=True)


@within(AT_ONCE)
class NoClaimInDoubt(Rules):
    """An owner whose decision went with its COMMIT takes it for rolled back although it may still arrive, and find the row."""

    claims_in_doubt = False


@within(AT_ONCE)
class ClaimInDoubtTakenForTheAnswer(Rules):
    """The same owner claims the row, and does not ask once more what arrived before its claim."""

    asks_after_the_claim = False


@within(AT_ONCE)
class DecisionWithCommitOnNoCondition(Rules):
    """A decision that went with its COMMIT is written even if another process owns the id by now."""

    updates_on_condition = False


@within(Bounds((1, 1), 2, budget(answer=1)))
class OverwrittenRowTakenForAborted(Rules):
    """An owner whose COMMIT was not answered finds another's state in the row, and takes its own for rolled back."""

    @staticmethod
    def next_doubt_step(known: Doubt) -> DoubtStep:
        return DoubtStep.COMMITTED if known.row == known.ours else DoubtStep.ABORTED


@within(Bounds((1, 1), 2, budget(answer=1, timeout=1)))
class RecordedLossTakenForARollback(Rules):
    """An owner in doubt asks the log and not the recorded losses: what the broker timed out looks rolled back."""

    @staticmethod
    def next_doubt_step(known: Doubt) -> DoubtStep:
        return process.next_doubt_step(replace(known, records_asked=True, incident=None))


# --- claiming and settling


@within(OWNER_AND_SETTLER)
class ClaimReturnsARowReadBefore(Rules):
    """A claim returns the state as it was read before the claim had the row's lock."""

    reads_row_before_claiming = True


@within(OWNER_AND_SETTLER)
class SettlingWithoutAClaim(Rules):
    """A recovery settles without claiming first: the owner may be alive."""

    settlers_claim = False


@within(TWO_OWNERS)
class NothingSettledAtTheStart(Rules):
    """A new owner begins without settling what former owners have left."""

    settles_former = False


@within(Bounds((2, 1, 0), 3), caught=False)
class SettledMarkMaySink(Rules):
    """A slow settler writes its mark over the higher one of a faster one. Settling again is harmless, so nothing is lost."""

    mark_only_rises = False


@within(Bounds((2, 1, 0), 3), caught=False)
class StateOfAnotherIncarnationTakenForOnesOwn(Rules):
    """A settler holds the row's state against every incarnation. Its producer id gives it away, so nothing is lost."""

    @staticmethod
    def belongs(state, _incarnation: int) -> bool:
        return state.has_transaction


def _retire_at_once(known: Knowledge) -> SettleStep:
    """Retire, and be done with it."""
    return SettleStep.FINISH if known.retired else SettleStep.RETIRE


class Choosing(Rules):
    """Another choice than the product's."""

    def next_step(self, known: Knowledge) -> SettleStep:
        return self.choose(known, settle.next_step(known))

    def choose(self, _known: Knowledge, step: SettleStep) -> SettleStep:
        raise NotImplementedError


@within(OWNER_AND_SETTLER)
class StateWithoutFirstOffsets(Choosing):
    """The row names a transaction by producer id and epoch alone, as KIP-939 does."""

    def choose(self, _known, step):
        return SettleStep.COMMIT if step is SettleStep.LOOK_AT_PARTITIONS else step


@within(OWNER_AND_SETTLER)
class RetireBeforeComplete(Choosing):
    """A settler retires an incarnation whose decided transaction it should have committed first."""

    looks_again_before_retiring = False

    def choose(self, known, step):
        return _retire_at_once(known) if step is SettleStep.LOOK_AT_PARTITIONS or known.retired else step


@within(OWNER_AND_SETTLER)
class PartitionAskedBeforeTheCoordinator(Rules):
    """A settler asks the partitions what is open before it asks the coordinator."""

    asks_partitions_first = True


@within(OWNER_AND_SETTLER)
class DeposedLeaderBelieved(Rules):
    """A settler takes the answer of a broker that leads the partition no longer."""

    stale_partitions = True


@within(OWNER_AND_SETTLER)
class DeposedCoordinatorBelieved(Rules):
    """A settler takes the answer of a coordinator that is none any more."""

    stale_coordinator = True


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1)))
class UnmatchedIsRetired(Choosing):
    """A settler retires at once what is not the row's transaction, and proves nothing: the broker may have timed it out."""

    looks_again_before_retiring = False

    def choose(self, known, step):
        asked = known.view is not None and known.view.status is TransactionStatus.ONGOING
        unmatched = step is SettleStep.PROVE and (asked or known.evidence is False)
        return _retire_at_once(known) if unmatched or known.retired else step


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1)))
class LossNotRecorded(Choosing):
    """A settler that finds a decided transaction aborted retires its id and does not report the loss."""

    looks_again_before_retiring = False

    def choose(self, known, step):
        return _retire_at_once(known) if step is SettleStep.RECORD_LOST or known.retired else step


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1, expire=1)))
class NoSuchIdMeansNothingToDo(Choosing):
    """A settler takes an id that the coordinator has forgotten for settled, though the row names a transaction of it."""

    def choose(self, known, step):
        forgotten = known.view is not None and known.view.status is TransactionStatus.NO_SUCH_ID
        return SettleStep.FINISH if forgotten else step


@within(OWNER_AND_SETTLER._replace(budgets=budget(timeout=1, retention=2)))
class AbsenceTakenForProof(Choosing):
    """A settler takes a transaction for committed because the log shows no sign of its abort."""

    def choose(self, _known, step):
        return SettleStep.RECORD_COMMITTED if step is SettleStep.RECORD_UNVERIFIABLE else step


@within(OWNER_AND_SETTLER._replace(dies=True, budgets=budget(marker=1)))
class CoordinatorOutweighsTheLog(Choosing):
    """A settler believes the coordinator's CompleteCommit without reading the log."""

    def choose(self, known, step):
        said = known.view is not None and known.view.status is TransactionStatus.COMPLETE_COMMIT
        own = known.prepared is not None and said and shows_same_transaction(known.view, known.prepared)
        return SettleStep.RECORD_COMMITTED if own and known.recorded is None else step


@within(OWNER_AND_SETTLER)
class MarkedSettledWithoutWaiting(Choosing):
    """A second settler finds the first one's commit or abort under way, and marks the incarnation settled at once."""

    def choose(self, known, step):
        under_way = {TransactionStatus.PREPARE_ABORT, TransactionStatus.PREPARE_COMMIT}
        return SettleStep.FINISH if known.view is not None and known.view.status in under_way else step


@within(Bounds((1, 0, 0), 3, budget(forgotten=1), epochs=4))
class RetiredWithoutTheRowsLock(Rules):
    """A settler retires an id without looking again under the row's lock: another one may be ending what was forgotten."""

    looks_again_before_retiring = False


@within(OWNER_AND_SETTLER._replace(incarnations=3, budgets=budget(forgotten=1, timeout=1), epochs=4))
class ProofFromBeforeTheLookBelieved(Choosing):
    """A settler finds nothing open any more, and believes what the log had proved while something was."""

    def choose(self, known, _step):
        return settle.next_step(replace(known, confirmed=True))


@within(OWNER_AND_SETTLER)
class NeverRetired(Choosing):
    """A settler leaves what is open and undecided to the broker's time-out, which may be weeks."""

    def choose(self, _known, step):
        return SettleStep.FINISH if step is SettleStep.RETIRE else step
