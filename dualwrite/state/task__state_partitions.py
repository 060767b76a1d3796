"""``PartitionStores``: the state of a consumer, one store for each partition that it reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dualwrite import waiting
from dualwrite.errors import IllegalStateError, Unavailable
from dualwrite.state.changelog import Changelog
from dualwrite.state.store import KeyValueStore
from dualwrite.state.task__state_logged import LoggedStore

if TYPE_CHECKING:
    from confluent_kafka import Message
    from typing_extensions import Self

    from dualwrite.writing.transaction import Transaction


@dataclass
class _Assigned:
    """A partition's store, and the assignment under which it was restored."""

    logged: LoggedStore
    assignment: object


class PartitionStores:
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
        max_memory_bytes: As for `KeyValueStore`, for each store.
        timeout_s: Limits each attempt to restore, in seconds; the next attempt continues where one has stopped.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        kafka: Mapping[str, object],
        changelog: str,
        max_memory_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        self._directory = Path(directory)
        self._kafka = dict(kafka)
        self._changelog = changelog
        self._max_memory_bytes = max_memory_bytes
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

    @contextmanager
    def _block(
        self, assignments: Mapping[int, object], check: Callable[[], None]
    ) -> Generator[Callable[[Transaction], Callable[[], None]], None, None]:
        """Surround a transaction with messages of these partitions. Called by the consumer.

        Args:
            assignments: By partition, an object that stands for its assignment; each new assignment has a new one.
            check: Called while a store is restored; raises to interrupt that.

        Yields:
            A function to call with the transaction when that has begun. It returns the one to call when the handler is done.

        Raises:
            DualWriteError: As `StateTask.restore`, before the transaction.
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
                store = KeyValueStore(self._directory / str(partition), max_memory_bytes=self._max_memory_bytes)
                changelog = Changelog(self._kafka, self._changelog, partition)
                found = self._assigned[partition] = _Assigned(LoggedStore(store, changelog, self._timeout_s), None)
            return found

    def close(self) -> None:
        """Close all stores, after the consumer has ended. Uncommitted writes are lost."""
        with self._lock:
            assigned, self._assigned = self._assigned, {}
        for one in assigned.values():
            one.logged.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PartitionStores {self._directory} of {sorted(self._assigned)}>"


def _join(stores: Sequence[LoggedStore], tx: Transaction) -> Callable[[], None]:
    for logged in stores:
        logged.join(tx)

    def log() -> None:
        for logged in stores:
            logged.log(tx)

    return log
