"""Mistakes with messages that wait in the database: of blocks, of their sender, and of the owners that follow one another."""

from contextlib import contextmanager
from typing import Final

import pytest

from dualwrite.protocol.outbox import Way
from dualwrite.protocol.values import OutboxMode
from dualwrite.stores.sql.access import Borrowed
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.stores.sql.outbox import SqlOutbox
from dualwrite.writing import falling_back, sender, writer
from harness.mistakes.registry import Check, mistake

_ORDER: Final = "integration/test_outbox_order.py::"
_LAST: Final = f"{_ORDER}test_the_last_send_waits_for_a_block_whose_messages_wait_and_then_sends_them[postgresql]"
_LOOKS_AGAIN: Final = f"{_ORDER}test_a_block_that_waits_for_the_last_send_looks_again_and_goes_directly[postgresql]"
_OUT_OF_ORDER: Final = "assert not 1"


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


@mistake(
    Check(
        f"{_ORDER}test_a_writer_of_never_sends_first_what_another_setting_has_left[postgresql]",
        r"assert \[2, 1\]",
    )
)
def never_does_not_look(patch: pytest.MonkeyPatch) -> None:
    """A writer of *never* sends directly although a former owner has left messages that wait."""
    real = writer.DualWriter._prepare_sending

    def prepare_sending(self, opened, first, deadline):
        if self._outbox != "never":
            real(self, opened, first, deadline)

    patch.setattr(writer.DualWriter, "_prepare_sending", prepare_sending)
