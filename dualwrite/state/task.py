"""``StateTask``: state, messages, offsets and rows that become permanent together."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Generic, Protocol, TypeVar

from dualwrite.errors import DualWriteError, IllegalStateError
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.lives__protocol_tables_producer_life import ProducerState
from dualwrite.state.changelog import Changelog
from dualwrite.state.standby import OnProgress, ignore_progress
from dualwrite.state.store import KeyValueStore
from dualwrite.state.task__state_logged import LoggedStore
from dualwrite.writing.transaction import Transaction

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
        blocks: An open `DualWriter`, not in bulk mode, or `ProducerBlocks`. It must have fenced the partition's former task.
        store: The store; nobody else writes to it.
        kafka: librdkafka configuration.
        changelog: A topic with ``cleanup.policy=compact``.
        partition: The changelog's partition, which is this store's alone.
        timeout_s: Limits `restore`, in seconds.

    Source: KIP-844, "Transactional State Stores".
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
    ) -> None:
        self._blocks: Blocks[Tx] = blocks
        self.store = store
        self._logged = LoggedStore(store, Changelog(kafka, changelog, partition), timeout_s)
        self._in_use = threading.Lock()

    @property
    def behind(self) -> bool:
        """Whether the store must be restored before the next block, which does so."""
        return self._logged.behind

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
