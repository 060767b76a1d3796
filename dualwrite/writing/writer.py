"""``DualWriter``: rows and messages, together or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.orm import Session

from dualwrite.runtime.deadline import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator.client import KafkaCoordinator
from dualwrite.kafka.producer.transactional import TransactionalProducer
from dualwrite.protocol.naming import lane_id
from dualwrite.recovery.claim import OwnerContext, claim_lanes, unique_owner
from dualwrite.recovery.reported import noting_told, telling_at_open
from dualwrite.stores.connecting import engine_of
from dualwrite.stores.failures import conflict_behind, map_database_error
from dualwrite.stores.schema import check_schema
from dualwrite.stores.state import SqlStateStore
from dualwrite.writing import entered
from dualwrite.writing.block import dual_write, session_of_block
from dualwrite.writing.lanes.end_watcher import EndWatcher
from dualwrite.writing.lanes.lane import Lane
from dualwrite.writing.lanes.lane_pool import Lanes
from dualwrite.writing.lanes.losses import Losses, OnLoss
from dualwrite.writing.transaction import Transaction
from dualwrite.writing.lanes.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualwrite.protocol.rows import StateRow

logger = logging.getLogger(__name__)

_LANES_FROM_THE_START = 2


class DualWriter:
    """Commits Kafka messages and database rows together or not at all.

    The database commit is the decision; Kafka follows it. After any crash, opening a writer of the same transactional id
    settles what was left behind: committed rows get their messages, everything else is aborted on both sides.

    One process at a time owns a transactional id: opening a second writer of that name fences the first. Threads share one
    writer; concurrent transactions each take a *lane*, a transactional id of its own (``orders``, ``orders#1``, ...).

    Args:
        transactional_id: Name of this sequence of dual writes: stable over restarts, unique among writers that run at the
            same time. At most 240 characters, without ``#``.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least.
        engine: A SQLAlchemy engine or a database URL. The tables must exist: ``dualwrite migrate``.
        schema: The database schema of the library's tables, if it is not the default one.
        max_lanes: The maximum number of concurrent transactions.
        timeout_s: Limits opening, and each ending of a transaction, in seconds.
        lane_timeout_s: How long a transaction waits for a free lane, in seconds.
        margin_s: The time that must be left of the broker's transaction timeout once the database has committed, in seconds. On
            PostgreSQL the session of an owner that is paused before its COMMIT ends after this time at the latest, sooner if
            the broker leaves less.
        idle_after_s: After this time without a transaction the row records that its last one is complete, in seconds.
        paused_owner_timeout_s: An owner that is paused inside a transaction loses its database session after this time, so
            that it does not hold its row for ever (PostgreSQL's ``idle_in_transaction_session_timeout``, set for the
            transaction); None leaves the server's own setting. In seconds.
        session_factory: Makes the ORM session of ``tx.session``, called with ``bind=connection``.
        bulk: For large transactions: less work per message, no ``on_delivery``.
        owner: The writer's name for people who read the row; ``user@host:pid`` by default.
        on_loss: Called with a `DecidedTransactionLost`, `OutcomeUnverifiable` or `DatabaseWentBack` that is found after its
            block has ended in another way, for instance with `CompletionPending`. Its ``state`` names the transaction. Called
            in the thread that found it: one in the background, or one that begins a block of its own, which waits for the call
            and then goes on. An exception that it raises is logged. Without it, or if it has failed, :meth:`close` raises such
            a loss.

    Raises:
        ConfigurationError: A setting cannot work.

    Source: KIP-939, "dual write recipe".
    """

    def __init__(
        self,
        transactional_id: str,
        *,
        kafka: Mapping[str, object],
        engine: Engine | str,
        schema: str | None = None,
        max_lanes: int = 8,
        timeout_s: float = 60.0,
        lane_timeout_s: float = 30.0,
        margin_s: float = 10.0,
        idle_after_s: float = 60.0,
        paused_owner_timeout_s: float | None = 60.0,
        session_factory: Callable[..., Session] = session_of_block,
        bulk: bool = False,
        owner: str | None = None,
        on_loss: OnLoss | None = None,
    ) -> None:
        _check_arguments(transactional_id, max_lanes)
        self.transactional_id = transactional_id
        self._config = KafkaConfig.parse(kafka)
        self._owns_engine = isinstance(engine, str)
        self._engine = engine_of(engine)
        self._schema = schema
        self._max_lanes = max_lanes
        self._timeout_s = timeout_s
        self._margin_s = margin_s
        self._paused_owner_timeout_s = paused_owner_timeout_s
        self._session_factory = session_factory
        self._bulk = bulk
        self._owner = unique_owner(owner)
        self._pid = os.getpid()
        self._context: OwnerContext | None = None
        self._lanes = Lanes(
            transactional_id,
            self._new_lane,
            max_lanes=max_lanes,
            timeout_s=timeout_s,
            lane_timeout_s=lane_timeout_s,
            idle_after_s=idle_after_s,
        )
        self._watcher: EndWatcher | None = None
        self._claiming = Turns([None])
        self._losses = Losses(on_loss)

    def open(self) -> None:
        """Claim the transactional id, settle what former owners left behind, and make the producers.

        Call it once, before the first transaction; ``with writer:`` does so. On return no former owner can write any more,
        and everything that was decided is complete in Kafka.

        Raises:
            ConfigurationError: The tables are missing or of another version, the cluster is another one, the database has
                gone back in time, or a right is missing. Nothing was changed.
            DatabaseWentBack: The database has lost decisions. If it has lost a claim, nothing was changed, and every ``open()``
                fails until ``dualwrite recover --after-restore``; otherwise it is recorded, and the next ``open()`` goes on.
            DecidedTransactionLost, OutcomeUnverifiable: Kafka does not have what the database decided. It is recorded; the
                next ``open()`` goes on. Also raised if another process found the loss, but ended before it could report it.
            Unavailable: A server does not answer.
            IllegalStateError: The writer is open, or was closed.
        """
        if self._context is not None or self._lanes.closed:
            raise IllegalStateError("the writer was already opened", transactional_id=self.transactional_id)
        check_schema(self._engine, self._schema)
        coordinator = KafkaCoordinator(self._config)
        store = SqlStateStore(
            self._engine,
            schema=self._schema,
            paused_owner_timeout_s=self._paused_owner_timeout_s,
        )
        self._context = OwnerContext(coordinator, store, self._owner)
        # Its own connections: a broker works through the requests of one connection one by one.
        self._watcher = EndWatcher(self.transactional_id, KafkaCoordinator(self._config), self._lanes.look_again)
        try:
            self._claim_all(self._context, Deadline(self._timeout_s))
        except BaseException:
            self.close()
            raise

    def _claim_all(self, context: OwnerContext, deadline: Deadline) -> None:
        count = min(_LANES_FROM_THE_START, self._max_lanes)
        with telling_at_open(context.store, self.transactional_id):
            rows = claim_lanes(context, self.transactional_id, count, deadline)
        lanes = [self._new_lane(number) for number in range(count)]
        for lane in lanes:
            lane.adopt(rows[lane.transactional_id])
        try:
            with ThreadPoolExecutor(len(lanes)) as threads:
                for future in [threads.submit(lane.ready, deadline) for lane in lanes]:
                    future.result()
        except BaseException:
            for lane in lanes:
                lane.discard()
            raise
        self._lanes.open(lanes)

    def _new_lane(self, number: int) -> Lane:
        context = self._opened()

        def make_producer(row: StateRow) -> TransactionalProducer:
            return TransactionalProducer(
                self._config,
                row.kafka_id(row.incarnation),
                coordinator=context.coordinator,
                incarnation=row.incarnation,
                # The other half is for settling, if the producer gets no answer.
                call_timeout_s=self._timeout_s / 2,
                bulk=self._bulk,
            )

        def first_lane() -> tuple[str, int]:
            return self.transactional_id, self._lanes.first.row.incarnation

        return Lane(
            lane_id(self.transactional_id, number),
            context,
            make_producer,
            claiming=self._claiming,
            guard=first_lane if number else None,
            watcher=self._watcher,
            losses=self._losses,
        )

    @contextmanager
    def transaction(self, connection: Connection | None = None) -> Generator[Transaction, None, None]:
        """Run one dual write: the block's end commits both sides, an exception in the block aborts both.

        Args:
            connection: A connection of the engine, not inside a transaction; one is taken from the engine if not given. A
                connection of another engine must lead to the same database, which is checked once for each connection.

        Yields:
            The transaction, usable until the block ends.

        Raises:
            TransactionAborted: Neither side changed. Also raised when a deadlock or a serialization failure of a statement
                leaves the block; inside the block that is the driver's own error, which becomes the cause of this one.
            Fenced: Another owner took over; neither side changed.
            TransactionInDoubt: The database's answer is missing. Do not run the work again.
            CompletionPending: The rows of this block are committed. Do not run the work again: settling completes the messages,
                or finds that they are lost. ``outcome`` is ``decided`` if Kafka shows that they will become visible, and
                ``unknown`` if Kafka could not be asked.
            DecidedTransactionLost, OutcomeUnverifiable: The rows of this block are committed; its messages are not, or that
                can no longer be known. Losses of other blocks go to the log and to ``on_loss``.
            DatabaseWentBack: The database has lost commits. Nothing was begun; or, with ``outcome`` ``unknown``, this block was
                committed, and the database lost it before Kafka had answered.
            ConfigurationError, Unavailable: Nothing was begun, or both sides are aborted. Also raised for a connection to
                another database.
            IllegalStateError: The writer is not open, the argument is not a connection or is in a transaction, or this thread
                is already inside a transaction of this writer.

        Every other exception from the block is passed on unchanged. A block may be entered in one thread and left in another,
        as web frameworks do with dependencies; two threads must not use it at the same time.
        """
        context = self._opened()
        entered.refuse_nested(self, self.transactional_id)
        if connection is not None:
            _require_connection(connection)
            context.store.check_same_database(connection)
        ticket = self._lanes.ticket()
        try:
            try:
                entered.enter(self, ticket)
                lane = self._lanes.take(ticket)
                lane.ready(Deadline(self._timeout_s))
                with (
                    _conflicts_named(lane),
                    _borrowed(connection, self._engine) as borrowed,
                    dual_write(
                        lane,
                        context,
                        borrowed,
                        session_factory=self._session_factory,
                        margin_s=self._margin_s,
                        timeout_s=self._timeout_s,
                    ) as transaction,
                ):
                    yield transaction
            finally:
                ticket.end()
        finally:
            ticket.end()  # the first one may have been interrupted

    def close(self) -> None:
        """Wait for running transactions, settle and record what is left, and disconnect. May be called more than once.

        Transactions that have not ended after ``timeout_s``, and all that cannot be settled within seconds, are left to the
        next settler. In a forked process it does nothing: the connections are the parent's.

        Raises:
            DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable: A loss that only the log has reported: ``on_loss``
                was not given, or has failed. It is recorded.
            Unavailable: The database does not take the record that all is complete; the next opening proves it by the log.
        """
        if os.getpid() != self._pid:
            return
        try:
            with noting_told(self._context.store) if self._context is not None else nullcontext():
                self._lanes.close()
                self._losses.raise_untold()
        finally:
            if self._watcher is not None:
                self._watcher.close()
            if self._context is not None:
                self._context.coordinator.close()
                self._context = None
            if self._owns_engine:
                self._engine.dispose()

    def _opened(self) -> OwnerContext:
        if os.getpid() != self._pid:
            raise IllegalStateError(
                "the writer was made in another process",
                transactional_id=self.transactional_id,
                next_step="a fork cannot share a producer: make a writer in each process, with an id of its own",
            )
        if self._context is None:
            raise IllegalStateError(
                "the writer is not open",
                transactional_id=self.transactional_id,
                next_step="use `with writer:` or open()",
            )
        return self._context

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable):
            if error is None:
                raise
            logger.exception(
                "%s: loss reported only in this log: the block raises another error", self.transactional_id
            )

    def __repr__(self) -> str:
        shown = "closed" if self._lanes.closed else "open" if self._context else "not open"
        return f"<DualWriter {self.transactional_id} {shown}, {len(self._lanes)} lanes>"


def _check_arguments(transactional_id: str, max_lanes: int) -> None:
    if not 1 <= len(transactional_id) <= 240 or "#" in transactional_id:  # noqa: PLR2004 - leaves room for a lane's number
        raise ConfigurationError(
            f"{transactional_id!r} cannot be a transactional id",
            next_step="use 1 to 240 characters without '#', which separates the numbers of lanes",
        )
    if max_lanes < 1:
        raise ConfigurationError(f"max_lanes is {max_lanes}; it must be at least 1", transactional_id=transactional_id)


def _require_connection(connection: object) -> None:
    if not isinstance(connection, Connection):
        raise IllegalStateError(
            f"transaction() takes a SQLAlchemy Connection, not {type(connection).__name__}",
            next_step="give engine.connect(), or nothing; for the ORM use tx.session, or bind a session to tx.connection",
        )


@contextmanager
def _conflicts_named(lane: Lane) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        if (conflict := conflict_behind(error, lane.transactional_id)) is not None:
            raise conflict from error
        raise


@contextmanager
def _borrowed(connection: Connection | None, engine: Engine) -> Generator[Connection, None, None]:
    if connection is not None:
        yield connection
        return
    try:
        own = engine.connect()
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine) from error
    with own:
        yield own
