"""Mistakes with messages that wait in the database: of blocks, of their sender, and of the owners that follow one another."""

from contextlib import contextmanager
from typing import Final

import pytest
from sqlalchemy import delete, select, update

from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.protocol.outbox import Way
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DoubtStep
from dualwrite.protocol.values import OutboxMode, TransactionStatus, WaitingMessages, outbox_id
from dualwrite.recovery import claim, in_doubt, settle
from dualwrite.stores.sql import outbox
from dualwrite.stores.sql.access import Borrowed
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.outbox import Floor, SqlOutbox
from dualwrite.stores.sql.store import Claim, Decisions, SqlStateStore
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.writing import lane, lane_pool, relay, sender, writer
from dualwrite.writing import outbox as falling_back
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.lane import Lane
from harness.mistakes.registry import Check, mistake, performed

_ORDER: Final = "integration/test_outbox_order.py::"
_LAST: Final = f"{_ORDER}test_the_last_send_waits_for_a_block_whose_messages_wait_and_then_sends_them[postgresql]"
_LOOKS_AGAIN: Final = f"{_ORDER}test_a_block_that_waits_for_the_last_send_looks_again_and_goes_directly[postgresql]"
_OUT_OF_ORDER: Final = "assert not 1"
_LOWER: Final = f"{_ORDER}test_a_message_with_a_lower_number_that_is_committed_later_is_not_left_behind[postgresql]"
_NEVER: Final = f"{_ORDER}test_a_writer_of_never_sends_first_what_another_setting_has_left[postgresql]"
_OF_SENDERS: Final = outbox_id("")
"""The end of the ids under which senders send."""


@mistake(Check(f"{_ORDER}test_a_block_does_not_overtake_what_waits[postgresql]", r"assert \[2, 1"))
def sends_although_messages_wait(patch: pytest.MonkeyPatch) -> None:
    """A block goes to Kafka directly although messages of its writer wait: it overtakes them."""
    real = falling_back.way_of

    def way_of(setting, mode, **known):
        del mode
        return real(setting, OutboxMode.DIRECT, **known)

    patch.setattr(falling_back, "way_of", way_of)
    patch.setattr(falling_back, "asks_kafka_first", lambda setting, **_: setting != "always")


@mistake(Check(_LOOKS_AGAIN, "assert not True"))
def no_second_look_under_the_share(patch: pytest.MonkeyPatch) -> None:
    """A block that found *later* lets its messages wait, whatever the mode is once it has its share of the lock."""
    real = falling_back.way_of
    patch.setattr(
        falling_back,
        "way_of",
        lambda *given, shared, **known: Way.WAIT if shared else real(*given, shared=shared, **known),
    )


@mistake(Check(_LAST, _OUT_OF_ORDER))
def share_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block whose messages wait does not hold its share of the lock on the mode."""
    patch.setattr(SqlOutbox, "share", lambda self, connection, writer, **_: self.mode(connection, writer))


@mistake(Check(_LAST, _OUT_OF_ORDER))
def last_send_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    """The last send does not lock the mode before it reads what is left, and sets it to direct."""
    patch.setattr(sender.Sending, "_lock", lambda *_: None)


@mistake(Check(_LAST, _OUT_OF_ORDER))
def last_send_reads_an_older_snapshot(patch: pytest.MonkeyPatch) -> None:
    """The last send reads what is left in a snapshot that it has taken before it got the lock on the mode."""

    @contextmanager
    def connect_to_send(self):
        with Borrowed(self.engine) as connection:
            connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    patch.setattr(SqlDatabase, "connect_to_send", connect_to_send)
    patch.setattr(sender, "_LOCK_S", 10.0)  # the block ends while it waits for the lock


@mistake(Check(_NEVER, r"assert \[2, 1\]"))
def never_does_not_look(patch: pytest.MonkeyPatch) -> None:
    """A writer of *never* sends directly although a former owner has left messages that wait."""
    real = writer.DualWriter._prepare_sending

    def prepare_sending(self, opened, first, deadline):
        if self._outbox != "never":
            real(self, opened, first, deadline)

    patch.setattr(writer.DualWriter, "_prepare_sending", prepare_sending)


@mistake(Check(_NEVER, r"assert \[2, 1\]"))
def never_looks_before_its_claim(patch: pytest.MonkeyPatch) -> None:
    """A writer of *never* looks at the mode before it claims: a block of the former owner may decide in between."""
    real = writer.DualWriter._claim

    def claim_(self, opened):
        if self._outbox == "never":
            seen = opened.context.store.outbox_mode(self.transactional_id)
            patch.setattr(SqlStateStore, "outbox_mode", lambda *_: seen)
        return real(self, opened)

    patch.setattr(writer.DualWriter, "_claim", claim_)


@mistake(Check(f"{_ORDER}test_a_block_that_turns_the_mode_has_it_alone_until_its_commit[postgresql]", _OUT_OF_ORDER))
def turned_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    """A block turns the mode to *later* in a transaction of its own, and so does not have it alone until its COMMIT."""
    real = SqlOutbox.turn

    def turn(self, connection, writer, mode):
        if mode is OutboxMode.LATER:
            self._own.run(lambda own: real(self, own, writer, mode))
        else:
            real(self, connection, writer, mode)

    def lock(self, connection, writer, *, within_s, beside_shares=False):
        if not beside_shares:
            return locked(self, connection, writer, within_s=within_s)
        return self._own.run(lambda own: locked(self, own, writer, within_s=within_s))

    locked = SqlOutbox.lock
    patch.setattr(SqlOutbox, "turn", turn)
    patch.setattr(SqlOutbox, "lock", lock)


# Blocks


@mistake(
    Check(
        "integration/test_waiting_messages.py::test_units_of_a_group_wait_without_those_that_have_failed[postgresql]",
        r"assert \[0, 1, 2, 3, 4, ",
    )
)
def rows_outlive_their_savepoint(patch: pytest.MonkeyPatch) -> None:
    """Messages of a savepoint that was rolled back become rows."""
    real = DualWrite.hold

    def hold(self, message):
        if self.may_wait is None or not self.may_wait.waits:
            return real(self, message)
        message = self.kept(message)
        self.may_wait.keep(message)
        return message.payload

    patch.setattr(DualWrite, "hold", hold)


@mistake(performed("owner_replaced_while_messages_wait", "told None, not Fenced"))
def rows_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    """A decision of messages that wait does not look whether its owner was replaced."""
    real = SqlOutbox.decide

    def decide(self, connection, decision, *rest):
        return real(self, connection, _as_of_now(connection, self._tables.state, decision), *rest)

    patch.setattr(SqlOutbox, "decide", decide)


@mistake(performed("decision_pending_under_messages_that_wait", r"shows \['m2', 'm3'\]"))
def pending_state_overwritten(patch: pytest.MonkeyPatch) -> None:
    """A block whose messages wait overwrites the decision in its lane's row, which may be pending in Kafka."""
    real = SqlOutbox.decide

    def decide(self, connection, decision, *rest):
        ended = real(self, connection, decision, *rest)
        _forget_state(connection, self._tables.state, [decision.transactional_id])
        return ended

    patch.setattr(SqlOutbox, "decide", decide)


@mistake(performed("commit_in_doubt_of_messages_that_wait", "told TransactionAborted, not None"))
def count_of_decisions_not_read(patch: pytest.MonkeyPatch) -> None:
    """An owner takes a COMMIT of messages that wait for rolled back, because the row's state is as it was."""
    real = in_doubt.next_doubt_step
    patch.setattr(in_doubt, "next_doubt_step", lambda doubt: real(doubt) if doubt.waits is None else DoubtStep.ABORTED)


@mistake(
    Check(
        "conformance/test_outbox.py::test_a_commit_in_doubt_is_known_by_the_number[postgresql-False]",
        r"assert <DoubtStep.COMMITTED.* is <DoubtStep.ABORTED",
    )
)
def count_of_another_owner_believed(patch: pytest.MonkeyPatch) -> None:
    """An owner whose COMMIT was not answered believes the row's count although another has claimed the row, and raised it."""
    real = in_doubt.next_doubt_step

    def next_doubt_step(doubt):
        overtaken = doubt.waits is not None and doubt.counted > doubt.waits
        return DoubtStep.COMMITTED if overtaken else real(doubt)

    patch.setattr(in_doubt, "next_doubt_step", next_doubt_step)


@mistake(
    Check(
        f"{_ORDER}test_after_a_commit_in_doubt_the_next_block_waits_for_it_and_decides_under_another_number[postgresql]",
        r"assert \[4294967297, 4294967297\] == \[4294967297\]",
    )
)
def claim_kept_after_a_doubt(patch: pytest.MonkeyPatch) -> None:
    """After a COMMIT in doubt the next block decides under the same claim, and so under the same number."""
    patch.setattr(Lane, "leave_in_doubt", Lane.discard)


@mistake(
    Check(
        "unit/writing/test_lane_pool.py"
        "::test_a_lane_that_could_take_messages_that_wait_is_kept_in_the_background_for_seconds_alone[True-within_s1]",
        r"29\.99",
    )
)
def lane_kept_while_kafka_is_silent(patch: pytest.MonkeyPatch) -> None:
    """Housekeeping keeps the only lane until Kafka answers, or half a minute is over: no block can let its messages wait."""
    patch.setattr(lane_pool.Lanes, "_attempt_s", lambda *_: 30.0)


# What blocks leave open in Kafka


@mistake(
    Check(
        f"{_ORDER}test_a_decision_that_is_pending_in_kafka_outlives_blocks_whose_messages_wait[postgresql]",
        r"\[2, 3\] == \[1, 2, 3\]|stays open|DatabaseWentBack|Lost",
    )
)
def sends_on_in_an_open_transaction(patch: pytest.MonkeyPatch) -> None:
    """A lane sends again without an end to what it has left open, though that may be decided."""
    real = lane.settle
    patch.setattr(lane, "settle", lambda rows, **known: real([row for row in rows if row.incarnation == 1], **known))


@mistake(performed("silence_in_the_middle_of_a_block", r"shows \['m1', 'm2', 'm2'"))
def settler_commits_whatever_is_open(patch: pytest.MonkeyPatch) -> None:
    """A settler commits what is open, though no row names it: messages that wait as rows, too, come twice."""
    real = settle._Settling._make_unusable

    def make_unusable(self, items):
        for item in items:
            if item.known.view.status is TransactionStatus.ONGOING:
                shown = PreparedTxnState(item.known.view.producer_id, item.known.view.epoch)
                self._coordinator.end({item.kafka_id: shown}, committed=True, deadline=self._deadline)
        real(self, items)

    patch.setattr(settle._Settling, "_make_unusable", make_unusable)


# Their sender


@mistake(Check(_LOWER, r"assert \[2, 3, 4\] == "))
def looks_only_above_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    """A sender looks only above the highest number that it has sent."""
    real = Floor.look

    def look(self, transaction, last, seen):
        real(self, transaction, last, seen)
        self.number = last

    _look_at_once(patch)
    patch.setattr(Floor, "look", look)


@mistake(Check(_LOWER, r"assert \[2, 3, 4\] == "))
def floor_without_a_proof(patch: pytest.MonkeyPatch) -> None:
    """A sender raises the floor of its reads without a look who holds lower numbers uncommitted."""
    real = Floor.look
    _look_at_once(patch)
    patch.setattr(
        Floor, "look", lambda self, read_in, last, seen: real(self, read_in, last, seen._replace(free=[*seen.counts]))
    )


def _look_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outbox, "_WORTH", 0)
    patch.setattr(outbox, "_AGAIN_S", 0.0)


@mistake(Check(_LAST, _OUT_OF_ORDER))
def direct_before_all_is_sent(patch: pytest.MonkeyPatch) -> None:
    """The last send sets the mode to direct without a look at what has come to wait until it had the lock."""
    real = sender.Sending._read_next

    def read_next(self, rows, handle, made):
        if not made.last:
            return real(self, rows, handle, made)
        self._read = WaitingMessages([], [], [], [], None, None, None, [], 0, more=False)
        return self._read

    patch.setattr(sender.Sending, "_read_next", read_next)


@mistake(
    Check(
        f"{_ORDER}test_a_sender_whose_owner_was_replaced_sends_nothing[write.prepared-postgresql]",
        "DecidedTransactionLost",
    )
)
def sender_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    """A sender looks neither in its row nor in Kafka whether its owner was replaced: it decides on what that one has aborted."""
    state = declare_tables(None).state
    real = Decisions.decide

    def decide(self, connection, decision, *rest):
        if decision.transactional_id.endswith(_OF_SENDERS):
            decision = _as_of_now(connection, state, decision)
        return real(self, connection, decision, *rest)

    patch.setattr(ProducerInstance, "require_still_open", lambda *_: None)
    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(Decisions, "decide", decide)


@mistake(
    Check(
        f"{_ORDER}test_a_sender_whose_owner_was_replaced_cannot_claim_its_id_anew[postgresql]",
        "DID NOT RAISE",
    )
)
def sender_claimed_without_a_guard(patch: pytest.MonkeyPatch) -> None:
    """A sender claims its id anew although the writer has another owner, who is fenced by that."""
    real = lane.claim_rows

    def claim_rows(context, ids, deadline, *, guard=None, **known):
        return real(context, ids, deadline, guard=None if ids[0].endswith(_OF_SENDERS) else guard, **known)

    patch.setattr(lane, "claim_rows", claim_rows)


@mistake(
    Check(
        "integration/test_kill_at_failpoints.py::"
        "test_a_sender_killed_then_what_waits_is_sent_once_and_in_order[write.decided:2-postgresql-fallback]",
        "stays open",
    )
)
def sender_goes_on_unsettled(patch: pytest.MonkeyPatch) -> None:
    """A sender goes on without an end to what was sent before, though that may be decided."""
    real = settle.settle

    def settle_others(rows, **known):
        return real([row for row in rows if not row.transactional_id.endswith(_OF_SENDERS)], **known)

    for module in (claim, lane):
        patch.setattr(module, "settle", settle_others)


@mistake(
    Check(
        f"{_ORDER}test_a_database_that_was_put_back_is_noticed_before_its_rows_are_sent_again[postgresql]",
        "DID NOT RAISE",
    )
)
def restored_rows_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A sender does not find out that the database was put back, and has rows again that are sent."""
    real = settle.lost_decisions

    def lost_decisions(rows, **known):
        return real([row for row in rows if not row.transactional_id.endswith(_OF_SENDERS)], **known)

    patch.setattr(settle, "lost_decisions", lost_decisions)


@mistake(
    Check(
        "integration/test_outbox_sender.py::test_a_sender_whose_rows_somebody_else_has_taken_aborts[postgresql]",
        "assert 10 == 9",
    )
)
def deletes_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A sender does not count the rows that it deletes, of which a person, or its own late COMMIT, may have taken some.

    A sender that was replaced needs no count: its decision fails at its row, and its deletes are rolled back.
    """
    real = SqlOutbox.delete

    def delete_uncounted(self, connection, writer, numbers):
        real(self, connection, writer, numbers)
        return len(numbers)

    patch.setattr(SqlOutbox, "delete", delete_uncounted)


@mistake(
    Check(
        f"{_ORDER}test_a_last_send_that_finds_nothing_ends_nothing_once_its_owner_was_replaced[postgresql]",
        "assert 'direct' == 'later'",
    )
)
def empty_last_send_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    """A sender that has nothing to send ends *later* without a look whether its owner was replaced.

    One that has something to send would be stopped by Kafka, too, which has retired its id.
    """
    state = declare_tables(None).state
    real = Decisions.hold

    def hold(self, connection, decision):
        if decision.transactional_id.endswith(_OF_SENDERS):
            decision = _as_of_now(connection, state, decision)
        return real(self, connection, decision)

    patch.setattr(Decisions, "hold", hold)


@mistake(
    Check(f"{_ORDER}test_a_message_that_is_committed_while_others_are_sent_is_not_deleted[postgresql]", r"\[2, 3\] == ")
)
def deletes_a_range(patch: pytest.MonkeyPatch) -> None:
    """A sender deletes all rows up to the last one that it has read, and so those that were committed meanwhile.

    With its count it would abort and read them.
    """

    def delete_up_to(self, connection, writer, numbers):
        table = self._tables.outbox
        connection.execute(delete(table).where(table.c.writer == writer, table.c.seq <= max(numbers)))
        return len(numbers)

    patch.setattr(SqlOutbox, "delete", delete_up_to)


@mistake(Check(_LOOKS_AGAIN, "assert not True"))
def turned_after_the_last_delete(patch: pytest.MonkeyPatch) -> None:
    """The last send ends *later* in another transaction, once it has decided: a block may have put messages in between."""
    real, turned = sender.Sending._write, SqlOutbox.turn

    def write(self, made):
        direct = real(self, made)
        if direct:
            rows = self._rows
            rows._own.run(lambda connection: turned(rows, connection, self._writer, OutboxMode.DIRECT))
        return direct

    def turn(self, connection, writer, mode):
        if mode is not OutboxMode.DIRECT:
            turned(self, connection, writer, mode)

    patch.setattr(sender.Sending, "_write", write)
    patch.setattr(SqlOutbox, "turn", turn)


@mistake(
    Check(
        f"{_ORDER}test_the_mode_of_a_writer_of_always_stays_until_its_next_owner_has_sent_all[postgresql]",
        r"assert \('direct', 0\) == \('later', 0\)",
    )
)
def always_ends(patch: pytest.MonkeyPatch) -> None:
    """The sender of a writer of *always*, whose blocks take no share, ends *later*."""
    real = sender.Sending.__init__
    patch.setattr(
        sender.Sending, "__init__", lambda self, *given, **known: real(self, *given, **{**known, "turns_back": True})
    )


@mistake(
    Check(
        "integration/test_outbox_sender.py::test_a_record_has_todays_time_and_the_blocks_own_in_a_header[postgresql]",
        r"assert 978307200000 > ",
    )
)
def sent_with_the_time_of_its_block(patch: pytest.MonkeyPatch) -> None:
    """A message that has waited is sent with the time of its block as its timestamp: retention may delete it at once."""
    real = SqlOutbox.read

    def read(self, *given, **known):
        found = real(self, *given, **known)
        return found._replace(timestamps_ms=found.produced_ms) if found.numbers else found

    patch.setattr(SqlOutbox, "read", read)


@mistake(
    Check(
        "integration/test_relay.py::"
        "test_each_row_is_sent_once_and_in_order_though_kafka_goes_away_and_comes_back[away0-postgresql]",
        "the relay has ended by itself",
    )
)
def relay_ends_with_an_error(patch: pytest.MonkeyPatch) -> None:
    """A relay ends with the first round that fails, and nobody starts it again."""

    def failed(self, error, *, once):
        del self, once
        raise error

    patch.setattr(relay.Relay, "_failed", failed)


# Owners


@mistake(performed("owner_opens_in_silence", r"shows \['m2', 'm3'\]"))
def claim_in_silence_forgets_the_state(patch: pytest.MonkeyPatch) -> None:
    """A claim without Kafka begins with an empty state, although the former one may be pending in Kafka."""
    real = Claim._raise

    def raise_(self, connection, ids):
        real(self, connection, ids)
        if self._cluster_id is None:
            _forget_state(connection, self._state, ids)

    patch.setattr(Claim, "_raise", raise_)


def _forget_state(connection, state, ids) -> None:
    connection.execute(update(state).where(state.c.transactional_id.in_(ids)).values(prepared_transaction_state=None))


def _as_of_now(connection, state, decision):
    """The decision, under whatever incarnation its row has."""
    row = select(state.c.incarnation).where(state.c.transactional_id == decision.transactional_id)
    return decision._replace(incarnation=connection.scalar(row))
