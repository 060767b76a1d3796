"""``DualWriter.bind``: the application's own sessions, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.writing.sessions import Joining, Kind, asynchronous, two_phase

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from sqlalchemy import Engine

    from dualwrite.writing.sessions import Block
    from dualwrite.writing.transaction import Transaction

SessionT = TypeVar("SessionT", bound=Session)

_ASYNC: Final = "sqlalchemy.ext.asyncio"
_BIND_ASYNC: Final = "bind the async_sessionmaker to an AsyncDualWriter, and await its produce()"


class BoundSessions:
    """The sessions of one factory, which may produce messages that commit with their rows. Made by ``DualWriter.bind``.

    A session that produces joins a dual write: it takes a lane, and the writer checks in the session's transaction that it
    still owns the lane, before the message is sent. From then on ``session.commit()``, or the end of ``with session.begin()``,
    commits both sides, with the errors of ``DualWriter.transaction()``; after an error call ``session.rollback()``, as after
    every commit that fails. ``rollback()`` and ``close()`` abort both sides. A message that is produced inside
    ``begin_nested()`` is dropped when that savepoint is rolled back. Sessions that produce nothing are left alone.

    Args:
        transactional_id: The writer's.
        source: The factory, or the class, of the sessions.
        block: Begins a dual write in a transaction.
        joins_first: See :class:`dualwrite.writing.sessions.Joining`.

    Raises:
        ConfigurationError: Sessions of this kind cannot be bound.
    """

    def __init__(
        self, transactional_id: str, source: object, block: Block, *, joins_first: Engine | None = None
    ) -> None:
        self.transactional_id = transactional_id
        self._class = _class_of(source)
        self._joining = Joining(transactional_id, Kind(self._class), block, joins_first=joins_first)

    def produce(
        self,
        session: Session | scoped_session[SessionT],
        topic: str,
        value: object = None,
        key: object = None,
        *,
        partition: int | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Hand one message to the producer, in the session's transaction; see :meth:`Transaction.produce`.

        Nothing is durable on return: the message becomes visible once ``session.commit()`` has committed both sides.

        Raises:
            DualWriteError: As :meth:`join` and :meth:`Transaction.produce`. The session can no longer commit: roll it back.
        """
        self.join(session).produce(
            topic,
            value,
            key,
            partition=partition,
            headers=headers,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
        )

    def join(self, session: Session | scoped_session[SessionT]) -> Transaction:
        """Let the session's transaction join a dual write, unless it has; :meth:`produce` does so by itself.

        Call it before the session's first statement if its isolation level is REPEATABLE READ or SERIALIZABLE: with a snapshot
        that is older than the dual write, the writer could not see that another owner has taken over.

        Returns:
            The dual write, for its other methods (``produce_many``, ``send_offsets_to_transaction``); usable until the
            transaction of the session ends. It has no session of its own.

        Raises:
            IllegalStateError: The session is not one of the bound factory, this thread is inside another dual write of this
                writer, or the transaction can no longer join.
            ConfigurationError: The session leads to another database, works with several databases, is in autocommit, in
                two-phase mode, or asynchronous.
            Unavailable: No lane was free, or a server does not answer.
            Fenced: Another owner took over.
        """
        return self._joining.join(self._own(session))

    def _own(self, session: object) -> Session:
        found = session() if isinstance(session, scoped_session) else session
        if isinstance(found, self._class):
            return found
        raise IllegalStateError(
            f"{type(found).__name__} is not a session of the factory that was bound",
            transactional_id=self.transactional_id,
            next_step=_BIND_ASYNC
            if is_asynchronous(type(found))
            else "make the session with that factory, or bind the factory that made it",
        )

    def __repr__(self) -> str:
        return f"<BoundSessions {self.transactional_id} {self._class.__name__}>"


def _class_of(source: object) -> type[Session]:
    """The class of a factory's sessions, which is the factory's own."""
    kind = source if isinstance(source, type) else type(source)
    if is_asynchronous(kind):
        raise asynchronous()
    if isinstance(source, scoped_session):
        source = source.session_factory
    if isinstance(source, sessionmaker):
        if source.kw.get("twophase"):
            raise two_phase()
        source = source.class_
    if isinstance(source, type) and issubclass(source, Session):
        return source
    raise ConfigurationError(
        f"{source!r} makes no sessions that can be bound",
        next_step="give a sessionmaker, a scoped_session with a sessionmaker, or a subclass of Session",
    )


def is_asynchronous(kind: type) -> bool:
    """Whether this is a class of SQLAlchemy's asynchronous sessions, or of their factories."""
    return any(base.__module__.startswith(_ASYNC) for base in kind.__mro__)
