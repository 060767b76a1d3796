"""The rules that the processes go by: the product's. A mistake is a class with one of them changed."""

from __future__ import annotations

from dataclasses import replace

from dualwrite.protocol import process, settle, settle_native, values
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Knowledge
from dualwrite.protocol.values import Outcome, Partition
from dualwrite.stores.sql.tables import check_not_gone_back
from search import views


class Rules:
    """The product's rules. The decisions are its own functions; the attributes say what its recipes do."""

    sentence = ""
    next_step = staticmethod(settle.next_step)
    next_doubt_step = staticmethod(process.next_doubt_step)
    next_end_step = staticmethod(settle.next_end_step)
    next_native_step = staticmethod(settle_native.next_native_step)
    next_native_end_step = staticmethod(settle.next_native_end_step)
    rows_of = staticmethod(settle.rows_of)
    native_step_at_rest = staticmethod(settle.native_step_at_rest)
    to_repair = staticmethod(settle_native.to_repair)
    belongs = staticmethod(values.belongs)
    is_open = staticmethod(values.is_open)
    is_older = staticmethod(values.is_older)
    prove = staticmethod(views.prove)
    check_not_gone_back = staticmethod(check_not_gone_back)

    settlers_claim = True
    reads_row_before_claiming = False
    settles_former = True
    asks_partitions_first = False
    checks_incarnation = True
    checks_by_an_old_snapshot = False
    updates_on_condition = True
    decides_in_its_own_transaction = True  # the update matches nothing in another one than was begun, nor on its own
    believes_a_commit_of_nothing = False
    silently_repeated = frozenset()  # requests of whose silent repetition a producer takes no notice
    waits_for_the_lock_in_doubt = True
    claims_in_doubt = True  # where the decision went with its COMMIT, before it is taken for rolled back
    asks_after_the_claim = True  # what became of it, once more
    mark_only_rises = True
    stale_partitions = False
    stale_coordinator = False
    answers_are_verdicts = False  # a fenced commit is taken for committed
    takes_a_failed_commit_for_committed = False
    retires_what_it_has_seen = False
    knows_ends = True  # of its last transaction, before it goes on
    knows_ends_before_it_closes = True
    looks_again_before_retiring = True  # under the row's lock, where a transaction is pending
    # Of native transactions:
    takes_epoch_over = True  # of the next transaction, from the answer to the end of the last one
    waits_for_acknowledgements = True  # before it prepares
    aborts_only_what_is_acknowledged = False
    repeats_init_after_silence = False
    takes_silence_for_success = False
    asks_before_the_answer = False  # to the end of a transaction, how it has ended
    keeps_former_answers = False  # about ends, for the next transaction
    takes_complete_for_the_end = False  # the coordinator's word
    fences_by_init = False
    compares_fence = True  # the row's fence is written if it is as it was read
    handle = None  # another broker's answers

    @staticmethod
    def kafka_id(incarnation: int) -> str:
        """The Kafka id of an incarnation."""
        return f"T.{incarnation}"

    def initial_knowledge(
        self,
        prepared: PreparedTxnState,
        completed: Outcome | None,
        incarnation: int,
        undecided_in: frozenset[Partition] = frozenset(),
        *,
        forgets: bool = False,
    ) -> Knowledge:
        """As ``looking._initial_knowledge``."""
        known = settle.initial(prepared, completed) if self.belongs(prepared, incarnation) else Knowledge()
        suspects = known.suspects | undecided_in if forgets else frozenset()
        return replace(known, suspects=suspects, tainted=undecided_in)


PRODUCT = Rules()
