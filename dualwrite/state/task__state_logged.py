"""One store in the transactions that carry its changelog: restored before each, logged in it, committed after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import hit
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.state.changelog import Changelog
from dualwrite.state.standby import OnProgress, do_not_ask, ignore_progress, roll_forward
from dualwrite.state.store import KeyValueStore, hold, refuse_in_savepoints
from dualwrite.writing.transaction import Transaction, write_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

logger = logging.getLogger(__name__)


class LoggedStore:
    """A store and its changelog across a sequence of transactions: `begin`, `join`, `log`, then `commit` or `discard`.

    Args:
        store: The store; nobody else writes to it.
        changelog: Its changelog.
        timeout_s: Limits `restore`, in seconds.

    Attributes:
        behind: Whether the store must be restored before the next transaction.
    """

    def __init__(self, store: KeyValueStore, changelog: Changelog, timeout_s: float) -> None:
        self.store = store
        self.behind = True
        self._changelog = changelog
        self._timeout_s = timeout_s
        self._logged = _Logged()

    def restore(self, on_progress: OnProgress = ignore_progress, check: Callable[[], None] = do_not_ask) -> int:
        """Bring the store to the changelog's end. Returns the number of records applied.

        Raises:
            DualWriteError: As `StateTask.restore`.
            Exception: Whatever ``check`` raises; it is called repeatedly.
        """
        hold(self.store, held=False)
        applied = roll_forward(
            self.store, self._changelog, self._timeout_s, wait_for_end=True, on_progress=on_progress, check=check
        )
        self.behind = False
        return applied

    def begin(self, check: Callable[[], None] = do_not_ask) -> None:
        """Get ready for a transaction. Until `commit`, the store counts as behind; only `commit` and `discard` end its own.

        Raises:
            DualWriteError: As `restore`.
            IllegalStateError: The store was written since the last transaction.
        """
        if self.behind:
            self.restore(check=check)
        elif self.store.has_uncommitted:
            raise IllegalStateError(f"{self.store!r} was written outside of a block")
        self.behind = True
        hold(self.store, held=True)

    def join(self, tx: Transaction | TransactionalProducer) -> None:
        """Note that the transaction has begun: what is written inside its savepoints could not be taken back with them."""
        if isinstance(tx, Transaction):
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
        hit("state.logged")

    def commit(self) -> None:
        """Commit the store, after the transaction has. If that fails, the store is behind, and the transaction stands."""
        hit("state.before_commit")
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
            self.store.recover(0)
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
