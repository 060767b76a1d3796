"""``StateTask``: one transaction for output, offsets, rows and stores; a consumer's stores, one for each partition."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dualwrite import failpoints, waiting
from dualwrite.errors import ConfigurationError, DualWriteError, IllegalStateError, Unavailable
from dualwrite.interfaces import Closing
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.lives import ProducerState
from dualwrite.state.changelog import Changelog, OnProgress, do_not_ask, ignore_progress, roll_forward
from dualwrite.state.reader import Isolation, Reader
from dualwrite.state.store import KeyValueStore, hold, refuse_in_savepoints
from dualwrite.writing.transaction import Transaction, write_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

Tx = TypeVar("Tx", Transaction, TransactionalProducer)
Tx_co = TypeVar("Tx_co", covariant=True)
_OPEN = {ProducerState.BEGUN, ProducerState.PREPARED, ProducerState.FAILED}


class Blocks(Protocol[Tx_co]):
    """Makes the block around one transaction: a `DualWriter`, or `ProducerBlocks`."""

    def transaction(self) -> AbstractContextManager[Tx_co]:
        """Return a context manager: leaving it commits, an exception in it aborts."""


class ProducerBlocks:
    """Blocks around the transactions of a `TransactionalProducer`: Kafka alone, without a database.

    Args:
        producer: Ready for its next transaction: after ``init_transactions``. The caller closes it.
    """

    def __init__(self, producer: TransactionalProducer) -> None:
        self._producer = producer

    @contextmanager
    def transaction(self) -> Generator[TransactionalProducer, None, None]:
        """Begin a transaction; commit it at the block's end, abort it on an exception.

        Raises:
            DualWriteError: As the producer's calls. After `CompletionPending` the transaction may be committed.
        """
        self._producer.begin_transaction()
        try:
            yield self._producer
            self._producer.commit_transaction()
        except BaseException:
            if self._producer.state in _OPEN:
                with suppress(DualWriteError):  # the first error is the one to raise; the producer is then in doubt
                    self._producer.abort_transaction()
            raise


class StateTask(Generic[Tx]):
    """Processes input with a state store: output, consumed offsets, rows and the store's changes count once, together.

    Each block is one transaction. At its end the changes of the store are produced to the changelog; once the transaction has
    committed, so does the store. If anything fails in between, the next block first restores the store from what Kafka has
    committed in the changelog: it is never wiped.

    One task at a time uses a changelog's partition: give the partition's tasks one transactional id, which fences the former
    one. One thread at a time uses a task.

    Args:
        blocks: An open `DualWriter` with ``outbox="never"``, not in bulk mode; or `ProducerBlocks`. It must have fenced the
            partition's former task.
        store: The store; nobody else writes to it.
        kafka: librdkafka configuration.
        changelog: A topic with ``cleanup.policy=compact``.
        partition: The changelog's partition, which is this store's alone.
        timeout_s: Limits `restore`, in seconds.
        max_uncommitted_bytes: Above this size of a block's writes, `commit_is_due` asks to end the block. Below the store's
            ``max_memory_bytes``, so that a block which ends then has spilled nothing.

    Source: KIP-892, "Transactional Semantics for StateStores".
    """

    def __init__(
        self,
        blocks: Blocks[Tx],
        store: KeyValueStore,
        *,
        kafka: Mapping[str, object],
        changelog: str,
        partition: int,
        timeout_s: float = 600.0,
        max_uncommitted_bytes: int = 32 << 20,
    ) -> None:
        self._blocks: Blocks[Tx] = blocks
        self.store = store
        self._max_uncommitted_bytes = max_uncommitted_bytes
        self._logged = LoggedStore(store, Changelog(kafka, changelog, partition), timeout_s)
        self._in_use = threading.Lock()

    @property
    def behind(self) -> bool:
        """Whether the store must be restored before the next block, which does so."""
        return self._logged.behind

    @property
    def commit_is_due(self) -> bool:
        """Whether the block has written so much to the store that it should end: ask after each message, and leave the block.

        It may go on: what exceeds the store's ``max_memory_bytes`` is spilled, which costs more.
        """
        return self.store.approximate_uncommitted_bytes > self._max_uncommitted_bytes

    def restore(self, on_progress: OnProgress = ignore_progress) -> int:
        """Bring the store to the changelog's end, as a block does if needed. Call it first to see the progress.

        Waits until no transaction is open in the partition. After an interruption, the next call continues where it stopped.

        Args:
            on_progress: Called with the offset reached and the end, after each part.

        Returns:
            The number of records applied. On return they are durable.

        Raises:
            DualWriteError: As `Standby.catch_up`; also `Unavailable` if a transaction stays open.
            IllegalStateError: A block is open.
        """
        with self._alone():
            return self._logged.restore(on_progress)

    @contextmanager
    def transaction(self) -> Generator[Tx, None, None]:
        """Run one transaction: its end commits everything, an exception in the block aborts everything.

        Restores the store first where it must. Inside, use :attr:`store` and the object that it gives: a `Transaction`, or the
        `TransactionalProducer`.

        Raises:
            DualWriteError: As the writer's block, and as `restore`. After an error that leaves the outcome open
                (`CompletionPending`, `TransactionInDoubt`) do not run the work again; the next block waits for the outcome.
            ConfigurationError: The messages of the writer's block may wait in its database; nothing was written.
            IllegalStateError: A block is open already, or the writer is in bulk mode, or a savepoint is open at a `put`.
        """
        with self._alone():
            self._logged.begin()
            try:
                with self._blocks.transaction() as tx:
                    self._logged.join(tx)
                    yield tx
                    self._logged.log(tx)
                self._logged.commit()
            except BaseException:
                self._logged.discard()
                raise

    @contextmanager
    def _alone(self) -> Generator[None, None, None]:
        if not self._in_use.acquire(blocking=False):
            raise IllegalStateError("the task is in use: one block, or one restore, at a time")
        try:
            yield
        finally:
            self._in_use.release()


# `PartitionStores`: the state of a consumer, one store for each partition that it reads.


@dataclass
class _Assigned:
    logged: LoggedStore
    assignment: object


class PartitionStores(Closing):
    """The state of a member of a consumer group: a `KeyValueStore` for each partition of the topic that it reads.

    Give it to `ExactlyOnceConsumer` or `AsyncExactlyOnceConsumer` as ``state``. Before the first messages of a partition are
    handled, and after each rebalance and failure, the partition's store is brought to the end of its changelog: a partition's
    new member takes over the former member's state. What the handler writes is produced to the changelog in the transaction of
    the messages, and the store commits after it.

    Each partition of the changelog belongs to the partition of the topic with the same number. A store stays open until
    `close`; its directory stays, so that a partition which comes back is only rolled forward.

    Args:
        directory: Holds a directory for each partition. This member's own: another process cannot open the same stores.
        kafka: librdkafka configuration.
        changelog: A topic with ``cleanup.policy=compact`` and at least as many partitions as the one that is read.
        max_memory_bytes: As for `KeyValueStore`, for each store; likewise the next two.
        sync: Whether a store's commit waits until the disk has it.
        rebuild_if_too_old: Whether to build a store again that is too old for its changelog.
        timeout_s: Limits each attempt to restore, in seconds; the next attempt continues where one has stopped.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        kafka: Mapping[str, object],
        changelog: str,
        max_memory_bytes: int = 64 << 20,
        sync: bool = True,
        rebuild_if_too_old: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._directory = Path(directory)
        self._kafka = dict(kafka)
        self._changelog = changelog
        self._open_store = partial(
            KeyValueStore, max_memory_bytes=max_memory_bytes, sync=sync, rebuild_if_too_old=rebuild_if_too_old
        )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._assigned: dict[int, _Assigned] = {}
        self._in_block: set[int] = set()

    def of(self, message: Message) -> KeyValueStore:
        """Return the store of the message's partition. Call it in the handler, with one of the handler's messages.

        Raises:
            IllegalStateError: The message is not one of a handler that runs now.
        """
        partition = message.partition()
        if partition is None or partition not in self._in_block:
            raise IllegalStateError(
                f"the store of partition {partition} belongs to no handler that runs",
                next_step="call of() in the handler, with one of its messages; give these stores to the consumer as state=",
            )
        return self._assigned[partition].logged.store

    def reader(self, partition: int, isolation: Isolation = "read_committed") -> Reader:
        """Return a reader of a partition's store, for other threads. As :meth:`KeyValueStore.reader`.

        It stays usable when the partition goes away, and shows what the store had by then: compare the offset with the
        changelog's end, or ask the group's coordinator who has the partition now.

        Raises:
            IllegalStateError: The store is not open: no message of the partition has been handled yet.
        """
        with self._lock:
            found = self._assigned.get(partition)
        if found is None:
            raise IllegalStateError(
                f"the store of partition {partition} is not open here",
                next_step="ask the member that has the partition, or wait until its first messages are handled",
            )
        return found.logged.store.reader(isolation)

    @contextmanager
    def _block(
        self, assignments: Mapping[int, object], check: Callable[[], None]
    ) -> Generator[Callable[[Transaction], Callable[[], None]], None, None]:
        """Surround a transaction with messages of these partitions. Called by the consumer.

        ``assignments`` has, by partition, an object that stands for its assignment; each new assignment has a new one.
        ``check`` is called while a store is restored, and raises to interrupt that. Restoring raises before the transaction.

        Yields a function to call with the transaction when that has begun. It returns the one to call when the handler is
        done.
        """
        ready: list[LoggedStore] = []
        try:
            for partition, assignment in sorted(assignments.items(), key=lambda item: item[0]):
                ready.append(waiting.elsewhere(partial(self._begun, partition, assignment, check)))
            self._in_block.update(assignments)
            yield partial(_join, ready)
            for logged in ready:
                waiting.elsewhere(logged.commit)
        except BaseException:
            for logged in ready:
                logged.discard()
            raise
        finally:
            self._in_block.difference_update(assignments)

    def _begun(self, partition: int, assignment: object, check: Callable[[], None]) -> LoggedStore:
        try:
            found = self._opened(partition)
            if found.assignment is not assignment:
                found.logged.behind, found.assignment = True, assignment
            found.logged.begin(check)
        except Exception as refused:
            if type(refused) is not Exception:  # rocksdict raises Exception itself
                raise
            # A full disk is no message's fault.
            raise Unavailable(f"the state store of partition {partition} cannot be restored: {refused}") from refused
        return found.logged

    def _opened(self, partition: int) -> _Assigned:
        with self._lock:
            found = self._assigned.get(partition)
            if found is None:
                store = self._open_store(self._directory / str(partition))
                changelog = Changelog(self._kafka, self._changelog, partition)
                found = self._assigned[partition] = _Assigned(LoggedStore(store, changelog, self._timeout_s), None)
            return found

    def close(self) -> None:
        """Close all stores, after the consumer has ended. Uncommitted writes are lost."""
        with self._lock:
            assigned, self._assigned = self._assigned, {}
        for one in assigned.values():
            one.logged.store.close()

    def __repr__(self) -> str:
        return f"<PartitionStores {self._directory} of {sorted(self._assigned)}>"


def _join(stores: Sequence[LoggedStore], tx: Transaction) -> Callable[[], None]:
    for logged in stores:
        logged.join(tx)

    def log() -> None:
        for logged in stores:
            logged.log(tx)

    return log


# One store in the transactions that carry its changelog: restored before each, logged in it, committed after it.

logger = logging.getLogger(__name__)


class LoggedStore:
    """A store and its changelog across a sequence of transactions: `begin`, `join`, `log`, then `commit` or `discard`.

    Nobody else writes to the store. ``behind`` says that it must be restored before the next transaction.
    """

    def __init__(self, store: KeyValueStore, changelog: Changelog, timeout_s: float) -> None:
        self.store = store
        self.behind = True
        self._changelog = changelog
        self._timeout_s = timeout_s
        self._logged = _Logged()

    def restore(self, on_progress: OnProgress = ignore_progress, check: Callable[[], None] = do_not_ask) -> int:
        """Bring the store to the changelog's end, and count the records applied. Calls ``check`` repeatedly; it may raise."""
        hold(self.store, held=False)
        applied = roll_forward(
            self.store,
            self._changelog,
            timeout_s=self._timeout_s,
            wait_for_end=True,
            on_progress=on_progress,
            check=check,
        )
        self.behind = False
        return applied

    def begin(self, check: Callable[[], None] = do_not_ask) -> None:
        """Get ready for a transaction. Until `commit`, the store counts as behind; only `commit` and `discard` end its own.

        Refuses, with `IllegalStateError`, a store that was written since the last transaction.
        """
        if self.behind:
            self.restore(check=check)
        elif self.store.has_uncommitted:
            raise IllegalStateError(f"{self.store!r} was written outside of a block")
        self.behind = True
        hold(self.store, held=True)

    def join(self, tx: Transaction | TransactionalProducer) -> None:
        """Note that the transaction has begun: what is written inside its savepoints could not be taken back with them.

        Refuses one whose messages may wait in the database: the changelog would end before what was decided, and a store that
        is restored from it would lose that.
        """
        if isinstance(tx, Transaction):
            if tx.outbox is not False:
                raise ConfigurationError(
                    "a state store follows its changelog in Kafka, and this writer's messages may wait in the database",
                    transactional_id=tx.transactional_id,
                    next_step='make the writer with outbox="never", the default',
                )
            write = write_of(tx)
            refuse_in_savepoints(self.store, lambda: write.in_savepoint)

    def log(self, tx: Transaction | TransactionalProducer) -> None:
        """Produce the store's changes to the changelog, as the last step before the transaction is decided."""
        self._logged = logged = _Logged()
        # The store's keys and values are bytes: the writer's serializers must not touch them.
        raw = tx.without_serializers if isinstance(tx, Transaction) else tx
        for key, value in self.store.uncommitted():
            logged.produced += 1
            raw.produce(
                self._changelog.topic,
                value,
                key,
                partition=self._changelog.partition,
                on_delivery=logged.delivered,
            )
        failpoints.hit("state.logged")

    def commit(self) -> None:
        """Commit the store, after the transaction has. If that fails, the store is behind, and the transaction stands."""
        failpoints.hit("state.before_commit")
        hold(self.store, held=False)
        logged = self._logged
        if not logged.produced:
            self.behind = False
        elif not logged.is_complete:  # the changelog knows more than the producer does
            logger.warning(
                "state store %s: not every changelog offset was reported; the next block restores the store first",
                self.store.path,
            )
        else:
            try:
                self.store.commit(logged.last + 1)
            except Exception:
                # If raised, it would look as though the transaction had failed, and its work would run again.
                logger.exception(
                    "state store %s: cannot commit; the next block restores the store first", self.store.path
                )
                self.discard()
            else:
                self.behind = False

    def discard(self) -> None:
        """Let reads after a failed transaction see what is committed. The next `begin` does so itself if this fails."""
        hold(self.store, held=False)
        try:
            self.store.recover()
        except Exception:
            logger.exception("state store %s: cannot discard uncommitted writes yet", self.store.path)


class _Logged:
    """The deliveries of one transaction's changelog records."""

    def __init__(self) -> None:
        self.produced = 0
        self._delivered = 0
        self.last = -1

    @property
    def is_complete(self) -> bool:
        return self._delivered == self.produced

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        if error is None and offset is not None and offset >= 0:
            self._delivered += 1
            self.last = max(self.last, offset)
