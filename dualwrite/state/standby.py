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
from dualwrite.state.entries import Position, position_in
from dualwrite.state.store import KeyValueStore

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the offset reached so far, and the end; of several partitions, with those of each in turn."""


def ignore_progress(reached: int, end: int) -> None:
    """Do nothing."""


def do_not_ask() -> None:
    """Let the work continue."""


class Standby:
    """A copy of a task's store, kept warm: it follows the changelog that the task's process writes.

    To take over, stop calling `catch_up`, and give the store to a `StateTask`.

    With ``partition=None`` it is a copy of the whole topic, for readers: of the stores of all tasks, or of any compacted
    topic. No task can take such a store over.

    Args:
        store: The store; nobody else writes to it.
        kafka: librdkafka configuration.
        changelog: The changelog's topic.
        partition: The changelog's partition; None for all that the topic has. Each key must then be in one partition alone.
        timeout_s: Limits each `catch_up`, in seconds.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        kafka: Mapping[str, object],
        changelog: str,
        partition: int | None,
        timeout_s: float = 600.0,
    ) -> None:
        self.store = store
        self._kafka = dict(kafka)
        self._topic = changelog
        self._whole = partition is None
        self._changelogs = [Changelog(self._kafka, changelog, partition or 0)]
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
        if self._whole:
            count = self._changelogs[0].count_partitions(Deadline(self._timeout_s), do_not_ask)
            self._changelogs += [
                Changelog(self._kafka, self._topic, partition) for partition in range(len(self._changelogs), count)
            ]
        return roll_forward(
            self.store, *self._changelogs, timeout_s=self._timeout_s, wait_for_end=False, on_progress=on_progress
        )


def roll_forward(
    store: KeyValueStore,
    *changelogs: Changelog,
    timeout_s: float,
    wait_for_end: bool,
    on_progress: OnProgress,
    check: Callable[[], None] = do_not_ask,
) -> int:
    """Discard uncommitted writes, apply what the changelogs have committed since the last commit, and count the records.

    ``changelogs`` are all that the store follows. ``wait_for_end`` waits until no transaction is open in them. ``check`` is
    called between any two steps; it raises to interrupt the call, which leaves the store at the last part committed.
    """
    deadline = Deadline(timeout_s)
    store.recover()
    followed = {changelog.identity(deadline, check): changelog for changelog in changelogs}
    store.follow(*followed)
    began_ms = int(time.time() * 1000)
    logs = {}
    for identity, changelog in followed.items():
        at_least = None if wait_for_end else position_in(store.committed, identity).offset or 0
        logs[identity] = changelog.describe(deadline, at_least, check)
        require_complete(logs[identity])
    try:
        starts = {name: first_to_read(position_in(store.committed, name), log, began_ms) for name, log in logs.items()}
    except StoreTooOld as refused:
        if not store.rebuild_if_too_old:
            raise
        # Raises if the changelog cannot build a store either: then the old one stays.
        starts = {name: first_to_read(Position(), log, began_ms) for name, log in logs.items()}
        logger.warning("%s; the data moves to %s, and is built again", refused, store.path / "too-old")
        store.start_over()
        store.follow(*followed)
    applied = 0
    for identity, changelog in followed.items():
        start, end = starts[identity], logs[identity].end
        # Tombstones may vanish from the log while it is read: the store counts as old as before until the end is reached.
        as_of_ms = position_in(store.committed, identity).at_ms or began_ms
        for changes, reached in changelog.read(start, end, deadline, check):
            store.put_all(changes)
            applied += len(changes)
            store.commit({identity: reached}, as_of_ms=began_ms if reached == end else as_of_ms)
            failpoints.hit("state.restored")
            on_progress(reached, end)
        if start == end:
            store.commit({identity: end}, as_of_ms=began_ms)
    logger.info("%r: %d records applied", store, applied)
    return applied
