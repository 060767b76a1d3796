"""A decision and its COMMIT in one exchange with PostgreSQL, through psycopg, which saves a dual write one wait.

The server executes the statements of one text in order, and stops at the first that fails. So what is otherwise judged between
the two must *fail* here, in SQL: an UPDATE that matches no row, and a transaction that has become too old. Then COMMIT is not
reached. The age is that of the database transaction, by the server's clock alone. Kafka's transaction is younger, because
nothing is produced before the database has answered. The server looks at its clock after the wait for the row's lock.

One answer stands for both. If it is missing, the COMMIT is in doubt, wherever the connection was lost. The row shows the
outcome, but only after a claim: until the server has the text, its session holds no lock on the row.

Where something must happen between the two, or this connection cannot do it, the caller sends one after the other.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import BigInteger, Integer, Update, and_, bindparam, case, cast, exc, func, literal_column
from sqlalchemy import select as select_of

from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError, TransactionAborted
from dualwrite.protocol.values import Decided, Decision
from dualwrite.stores.sql import dialect as committing
from dualwrite.stores.sql.access import begun_on, driver_words, let_go, sqlstate_of
from dualwrite.stores.sql.drivers import CompiledOnce
from dualwrite.stores.sql.postgresql import (
    IMMEDIATE,
    IN_TRANSACTION,
    IS_BEGUN,
    NOT_PREPARED,
    Session,
    durable_within,
    ended_unseen,
    exchange,
    literals,
    raise_mapped,
)
from dualwrite.stores.sql.tables import check_decidable

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select

    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.drivers import OwnText

_FENCED: Final = "dualwrite: the row is not ours any more"
_LATE: Final = "dualwrite: too late to commit"
_ENDED: Final = "dualwrite: not the transaction that was begun"
_LONG_S: Final = 86_400.0
"""No block lasts that long, so its age need not be checked here."""
_COMMITS: Final = frozenset({psycopg.Connection.commit, psycopg.AsyncConnection.commit})


def _failing(update: Update) -> Select[Any]:
    """The statement that records the decision, and fails unless it may be committed.

    A word that is no number fails as it is made one, and stands in the server's log. It must not be a constant: the server
    would make a number of it as it reads the statement.
    """
    recorded = update.returning(*durable_within(bindparam("within_ms_", type_=Integer()))).cte("recorded")
    found = func.count() == literal_column("0")
    late = literal_column("extract(epoch FROM clock_timestamp() - now()) * 1000", BigInteger()) > bindparam(
        "age_ms_", type_=BigInteger()
    )
    word = case(
        (and_(found, IS_BEGUN), literal_column(f"'{_FENCED}'")),
        (found, literal_column(f"'{_ENDED}'")),
        (late, literal_column(f"'{_LATE}'")),
        else_=literal_column("'1'"),
    )
    return select_of(cast(word, Integer)).select_from(recorded)


class CommitWithDecision:
    """Implements :class:`dualwrite.interfaces.DecisionWithCommit` on PostgreSQL.

    For the arguments see :meth:`dualwrite.stores.sql.dialect.Dialect.with_commit`.
    """

    def __init__(
        self,
        dialect: Dialect,
        update: Update,
        bound: Callable[[Connection, Decision], dict[str, Any]],
        mapped: Callable[[exc.SQLAlchemyError, str], DualWriteError],
    ) -> None:
        self._dialect = dialect
        self._bound = bound
        self._mapped = mapped
        self._statement = CompiledOnce(_failing(update))

    def is_possible(self, connection: Connection, age_s: float) -> bool:
        begun = begun_on(connection)
        if begun is None or not isinstance(begun.session, Session):
            return False  # asyncpg
        driver = begun.driver
        conn = driver.pgconn
        if (
            conn.transaction_status != IN_TRANSACTION
            or conn.pipeline_status
            or connection.connection is not begun.pooled
            or type(driver).commit not in _COMMITS
            or getattr(driver, "_num_transactions", 0)  # in a block of psycopg's, which refuses a COMMIT
            or self._statement.text(connection) is None
        ):
            return False
        if age_s < _LONG_S and now_s() - begun.limits.asked_at > age_s / 2:
            return False  # the transaction of the database is old, that of Kafka may not be
        for listener in connection.dispatch.commit:
            if listener is not committing.refuse_commit:
                return False  # it may work in the transaction, or stop the COMMIT
        # What a server says unasked, is that it has ended the session. Nothing is in doubt then, if nothing is sent.
        said = select.poll()
        said.register(conn.socket, select.POLLIN)
        return not said.poll(0)

    def execute(self, connection: Connection, decision: Decision, age_s: float) -> Decided:
        begun, within_s = begun_on(connection), decision.within_s
        assert begun is not None  # it is possible
        _, within_ms = begun.limits.lower(None, None if within_s is None else max(1, int(within_s * 1000)))
        bound = {
            **self._bound(connection, decision),
            "state_": check_decidable(decision),
            "within_ms_": within_ms,
            "age_ms_": int(age_s * 1000),
        }
        own = self._statement.text(connection)
        assert own is not None
        sent = _Exchange(connection, own, bound)
        transactional_id = decision.transactional_id
        try:
            committing.commit(
                connection, self._dialect, transactional_id, answer_s=decision.answer_s, with_decision=sent.send
            )
        except TransactionAborted as aborted:
            if not sent.failed_before_commit:
                raise
            cause = aborted.__cause__
            if not isinstance(cause, exc.SQLAlchemyError):
                raise
            if len(sent.results) == 1:
                raise committing.deferred_failed(cause, transactional_id) from cause
            words = driver_words(cause)
            if _FENCED in words:
                return Decided.FENCED
            if _LATE in words:
                return Decided.LATE
            if _ENDED in words:
                raise ended_unseen() from None
            if sqlstate_of(cause.orig if isinstance(cause, exc.DBAPIError) else None) == NOT_PREPARED:
                raise TransactionAborted(
                    "the session has forgotten its prepared statements inside the block, and psycopg does not know it",
                    transactional_id=transactional_id,
                    next_step="run it again; send DEALLOCATE and DISCARD through psycopg",
                ) from cause
            raise self._mapped(cause, transactional_id) from cause
        finally:
            let_go(connection)
        return Decided.COMMITTED


class _Exchange:
    """One decision with its COMMIT, and what was answered."""

    def __init__(self, connection: Connection, own: OwnText, bound: dict[str, Any]) -> None:
        self._connection, self._own, self._bound = connection, own, bound
        self._texts = [IMMEDIATE]
        self.results: list[Any] = []

    @property
    def failed_before_commit(self) -> bool:
        """Whether the server has answered that a statement before COMMIT has failed."""
        return 0 < len(self.results) < len(self._texts)

    def send(self) -> None:
        begun = begun_on(self._connection)
        assert begun is not None
        own, driver, texts = self._own, begun.driver, self._texts
        session: Session = begun.session
        execution = session.certainly_prepared_in(own, driver, texts)
        texts += (execution or own.template) % literals({**own.constants, **self._bound}), "COMMIT"
        try:
            exchange(driver, "; ".join(texts), self.results, awaits=begun.awaits)
        except BaseException as error:  # noqa: BLE001 - an interruption too, which SQLAlchemy passes on
            session.is_lost(own, execution, error)
            raise_mapped(self._connection, error, own.template, self._bound)
        if execution is not None:
            session.keep(own, driver, execution)
