"""The rules that the processes go by: the product's. A mistake is a class with one of them changed."""

from __future__ import annotations

from dualwrite.observations import Outcome
from dualwrite.prepared_state import PreparedTxnState
from dualwrite.protocol import doubt, settle
from dualwrite.protocol.settle import Knowledge
from dualwrite.stores.rows import check_not_gone_back
from search import views


class Rules:
    """What the product does. The decisions are its own functions; the attributes say what its recipes do."""

    sentence = ""
    next_step = staticmethod(settle.next_step)
    next_doubt_step = staticmethod(doubt.next_doubt_step)
    belongs = staticmethod(settle.belongs)
    is_open = staticmethod(settle.is_open)
    is_older = staticmethod(settle.is_older)
    prove = staticmethod(views.prove)
    check_not_gone_back = staticmethod(check_not_gone_back)

    settlers_claim = True
    reads_row_before_claiming = False
    settles_former = True
    asks_partitions_first = False
    checks_incarnation = True
    checks_by_an_old_snapshot = False
    updates_on_condition = True
    silently_repeated = frozenset()  # requests of whose silent repetition a producer takes no notice
    waits_for_the_lock_in_doubt = True
    mark_only_rises = True
    stale_partitions = False
    stale_coordinator = False
    answers_are_verdicts = False  # a fenced commit is taken for committed
    takes_a_failed_commit_for_committed = False
    retires_what_it_has_seen = False

    @staticmethod
    def kafka_id(incarnation: int) -> str:
        """The Kafka id of an incarnation."""
        return f"T.{incarnation}"

    def initial_knowledge(self, prepared: PreparedTxnState, completed: Outcome | None, incarnation: int) -> Knowledge:
        """As ``settling._initial_knowledge``."""
        if not self.belongs(prepared, incarnation):
            return Knowledge()
        return Knowledge(prepared=prepared, recorded=completed)


PRODUCT = Rules()
