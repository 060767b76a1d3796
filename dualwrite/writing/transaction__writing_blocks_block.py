"""A block around one dual write: its end commits both sides, an exception in it aborts both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from dualwrite.errors import IllegalStateError
from dualwrite.interfaces__ports_database import SQL, Traits
from dualwrite.interfaces__ports_observer import NO_WRITE_OBSERVER, WriteObserver
from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
from dualwrite.recovery.in_doubt import noting_told
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.dual_write__writing_blocks_serializing import NO_SERIALIZERS, Serializing
from dualwrite.writing.transaction import Transaction

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from dualwrite.interfaces import Handle
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.writing.lane import Lane

_ENDED = frozenset({WriteState.COMPLETED, WriteState.ABORTED, WriteState.HANDED_OVER})


class Ending(Enum):
    """The ways in which the end of a block ends its dual write."""

    COMMIT = "commit both sides"
    HAND_OVER = "hand it over undecided; the database's part is committed, where nobody reads it"
    PREPARE = "hand it over undecided; the database's part is prepared"


def session_of_block(bind: Connection) -> Session:
    """The ORM session of a block. Its objects stay readable after the block has ended."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - large, and loaded only where it is used

    return Session(bind=bind, expire_on_commit=False)


def no_session(**_: object) -> Session:
    """Stands in for ``tx.session`` in a block that joins another session's transaction.

    Raises:
        IllegalStateError: Always.
    """
    raise IllegalStateError("the dual write of a session has no other session", next_step="use your own session")


@contextmanager
def dual_write(
    lane: Lane,
    context: OwnerContext,
    handle: Handle,
    *,
    traits: Traits = SQL,
    session_factory: Callable[..., Session] = session_of_block,
    margin_s: float,
    timeout_s: float,
    ending: Ending = Ending.COMMIT,
    permit: Callable[[Handle], None] = lambda _: None,
    savepoints: bool = True,
    observer: WriteObserver = NO_WRITE_OBSERVER,
    serializing: Serializing = NO_SERIALIZERS,
) -> Generator[Transaction, None, None]:
    """Run one dual write on a ready lane: the block's end commits both sides or hands them over; an exception aborts both.

    Args:
        lane: Only this dual write uses it until the block has ended.
        context: The servers.
        handle: The database's: a connection that is not inside a transaction, or what it has instead.
        traits: What the kind of database is like.
        session_factory: Makes the ORM session, called with ``bind=connection``.
        margin_s: Seconds that must be left of the broker's transaction timeout at the decision.
        timeout_s: Limits the ending, in seconds.
        ending: How the block's end ends the dual write.
        permit: May still refuse the ending; see :meth:`DualWrite.commit` and :meth:`DualWrite.hand_over`.
        savepoints: Whether messages wait for savepoints. False if the block's code opens none: then it may also produce in the
            middle of a COPY.
        observer: Observes this dual write.
        serializing: Makes the bytes of messages.

    Raises:
        DualWriteError: As :meth:`DualWrite.begin`, :meth:`DualWrite.commit` and :meth:`DualWrite.hand_over` say.
    """
    write = DualWrite(
        lane,
        context,
        handle,
        traits=traits,
        session_factory=session_factory,
        margin_s=margin_s,
        timeout_s=timeout_s,
        savepoints=savepoints,
        observer=observer,
    )
    with noting_told(context.store):
        write.begin()
    try:
        try:
            write.lent = True
            yield Transaction(write, serializing)
        except BaseException:
            write.lent = False
            if not write.is_parents:
                write.abort()
            raise
        write.lent = False
        write.require_not_parents()
        if ending is Ending.COMMIT:
            with noting_told(context.store):
                write.commit(permit=permit)
        else:
            write.hand_over(prepared=ending is Ending.PREPARE, permit=permit)
    except BaseException as error:
        _raise_from_callback(error, write.sending.take_callback_error())
        raise
    finally:
        write.lent = False
        if write.is_parents:
            # A forked process, which leaves the block too. The servers must hear nothing of it: not even of a rollback.
            context.store.discard(handle)
        else:
            write.release()
            if write.state not in _ENDED:
                # Neither the connection nor the producer may be used again before the id is reclaimed: claiming waits for
                # the old backend and settles.
                lane.discard()
                context.store.discard(handle)


def _raise_from_callback(error: BaseException, raised: BaseException | None) -> None:
    """Show what a delivery callback raised as the context of the block's own error, which outweighs it.

    Callers and `run` decide by the block's error whether they run the work again. Only an interruption (``KeyboardInterrupt``,
    a cancellation) is raised in its place: it must not get lost.
    """
    if raised is None or raised is error:
        return
    if isinstance(error, Exception) and not isinstance(raised, Exception):
        raise raised from error
    chain = list(_explained(error))
    for one in _explained(raised):
        if one.__context__ in chain or one.__cause__ in chain:
            one.__context__ = one.__cause__ = None  # an abort has called it because of this error: no circle
    if raised not in chain:
        # ``raise ... from`` hides contexts, except at the end of the chain of causes.
        chain[-1].__context__, chain[-1].__suppress_context__ = raised, False


def _explained(error: BaseException | None) -> Iterator[BaseException]:
    """The error and, one by one, what a traceback shows above it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
