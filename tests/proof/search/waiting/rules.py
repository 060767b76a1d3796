"""The rules that the processes go by. A mistake is a class with one of them changed.

Each attribute says what the product does at that step; `dualwrite.protocol.outbox` decides where it has a decision.
"""

from __future__ import annotations

from collections.abc import Mapping

from dualwrite.protocol import outbox, process
from dualwrite.protocol.settle import Ended, EndStep, next_native_end_step
from dualwrite.protocol.values import Partition, ShownProducer
from search import native


def knows_end(ended: Ended, shown: Mapping[Partition, ShownProducer]) -> bool:
    """The product's decision once waiting for a marker no longer helps: if it is not there by then, the producer is discarded."""
    return next_native_end_step(ended, shown, early=False) is EndStep.KNOWN


class Rules:
    """The product's rules."""

    sentence = ""

    way_of = staticmethod(outbox.way_of)
    sends = outbox.Sends

    # A block
    heeds_the_mode = True  # a block reads the mode in its first statement
    looks_again = True  # the mode that counts is the one that it reads under its share of the lock
    share_to_the_end = True  # a block whose messages wait keeps its share until COMMIT
    always_takes_shares = False  # a block of a writer of ``always``, which never ends *later*, takes no share
    locks_to_turn = True  # a block that turns the mode has the lock alone
    fences_rows = True  # a decision of messages that wait fails if the row has another incarnation
    leaves_state = True  # such a decision leaves the state of the row as it is
    ends_what_is_open = True  # before a lane sends again, what it left undecided is aborted
    ends_only_what_is_not_named = True  # what the row names is committed
    rows_follow_savepoints = True  # messages of a savepoint that was rolled back become no rows

    claims_after_a_doubt = True  # also on a lane without a producer
    next_doubt_step = staticmethod(process.next_doubt_step)  # about a COMMIT whose messages wait

    # Markers
    knows_end = staticmethod(knows_end)  # a producer goes on once its last transaction has ended in every partition
    settling = native.Rules()  # how a settler repairs a decided transaction

    # The sender
    fences_sender = True
    fences_the_empty_last = True  # also a sender that found nothing, and only ends *later*
    counts_deleted = True  # the rows that it deletes are the rows that it has read
    guards_the_sender = True  # a sender's id is claimed anew by the writer's owner alone
    locks_the_last = True
    reads_under_the_lock = True  # not in a snapshot that is older than the lock
    last_reads_all = True
    proves_the_floor = True  # not to look below a number, it has seen that no lane holds a lower one uncommitted
    floor_is_what_was_sent = False  # it does not look below the highest number that it has sent
    settles_the_sender = True  # what former owners have sent and decided is completed before it sends
    keeps_always = True  # the sender of a writer of ``always`` never ends *later*

    # Owners
    never_looks = True  # a writer of ``never`` looks at the mode once it has claimed, and sends what waits first
    never_looks_first = False  # at the mode, before its claim
    checks_ids_before_sending = True  # an incarnation that was claimed without Kafka asks whether its ids are known
    finds_lost_decisions = True  # Kafka has committed what the row does not name: the database went back


PRODUCT = Rules()
