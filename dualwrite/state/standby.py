"""Stores that follow a changelog: rolled forward by what Kafka has committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import StoreTooOld
from dualwrite.state.changelog import Changelog, first_to_read, require_complete
from dualwrite.state.entries import Committed
from dualwrite.state.store import KeyValueStore

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the offset reached so far, and the end."""


def ignore_progress(reached: int, end: int) -> None:
    """Do nothing."""


def do_not_ask() -> None:
    """Let the work continue."""


class Standby:
    """A copy of a task's store, kept warm: it follows the changelog that the task's process writes.

    To take over, stop calling `catch_up`, and give the store to a `StateTask`.

    Args:
        store: The store; nobody else writes to it.
        kafka: librdkafka configuration.
        changelog: The changelog's topic.
        partition: The changelog's partition.
        timeout_s: Limits each `catch_up`, in seconds.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        kafka: Mapping[str, object],
        changelog: str,
        partition: int,
        timeout_s: float = 600.0,
    ) -> None:
        self.store = store
        self._changelog = Changelog(kafka, changelog, partition)
        self._timeout_s = timeout_s

    def catch_up(self, on_progress: OnProgress = ignore_progress) -> int:
        """Apply what is committed in the changelog since the last call. Call it repeatedly.

        An interrupted call leaves the store at the last part that it has committed; the next one continues there.

        Args:
            on_progress: Called with the offset reached and the end, after each part.

        Returns:
            The number of records applied. On return they are durable.

        Raises:
            ChangelogDiffers: The changelog is another topic than before, was truncated, or its beginning was deleted.
            StoreTooOld: Deletions may be gone that the store has not seen.
            ConfigurationError: The topic, or a right on it, is missing, or it deletes records.
            Unavailable: The brokers did not answer, or the end was not reached in time.
        """
        return roll_forward(self.store, self._changelog, self._timeout_s, wait_for_end=False, on_progress=on_progress)


def roll_forward(
    store: KeyValueStore,
    changelog: Changelog,
    timeout_s: float,
    *,
    wait_for_end: bool,
    on_progress: OnProgress,
    check: Callable[[], None] = do_not_ask,
) -> int:
    """Discard uncommitted writes, apply what the changelog has committed since the store's last commit, and count the records.

    ``wait_for_end`` waits until no transaction is open in the partition. ``check`` is called between any two steps; it raises
    to interrupt the call, which leaves the store at the last part committed.
    """
    deadline = Deadline(timeout_s)
    store.recover(0)
    identity = changelog.identity(deadline, check)
    store.follow(identity)
    began_ms = int(time.time() * 1000)
    at_least = None if wait_for_end else store.committed.offset or 0
    log = changelog.describe(deadline, at_least, check)
    require_complete(log)
    try:
        start = first_to_read(store.committed, log, began_ms)
    except StoreTooOld as refused:
        if not store.rebuild_if_too_old:
            raise
        # Raises if the changelog cannot build a store either: then the old one stays.
        start = first_to_read(Committed(), log, began_ms)
        logger.warning("%s; the data moves to %s, and is built again", refused, store.path / "too-old")
        store.start_over()
        store.follow(identity)
    # Tombstones may vanish from the log while it is read: the store counts as old as before until the end is reached.
    as_of_ms = store.committed.at_ms or began_ms
    applied = 0
    for changes, reached in changelog.read(start, log.end, deadline, check):
        store.put_all(changes)
        applied += len(changes)
        store.commit(reached, as_of_ms=began_ms if reached == log.end else as_of_ms)
        failpoints.hit("state.restored")
        on_progress(reached, log.end)
    if start == log.end:
        store.commit(log.end, as_of_ms=began_ms)
    logger.info("state store %s: %d records applied, at offset %d", store.path, applied, log.end)
    return applied
