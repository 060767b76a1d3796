"""Whether a store may be rolled forward from its changelog. Pure.

A compacted log keeps the newest value of each key forever, but a deletion only for a while: after ``delete.retention.ms`` the
broker may remove the tombstone. A store that read the key before and comes back later would keep it forever. A store that has
only been quiet loses nothing: what follows its commit was all written a moment ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualwrite.errors import ChangelogDiffers, ConfigurationError, StoreTooOld
from dualwrite.state.entries__state_committed import Committed

_REBUILD = "move the store's directory away: the next start builds the store from the whole changelog"


@dataclass(frozen=True)
class Log:
    """A changelog's partition, as the brokers describe it.

    Attributes:
        name: The topic with the partition, for errors.
        start: The first offset that is still there.
        end: The offset after the last one; no transaction is open below it.
        policy: The topic's ``cleanup.policy``.
        retention_ms: The time after which records are deleted; -1 for never.
        retention_bytes: The size above which records are deleted; -1 for none.
        delete_retention_ms: The time for which a tombstone is kept at least.
        recent: The first offset that was written within that time; the end if none was.
    """

    name: str
    start: int
    end: int
    policy: frozenset[str]
    retention_ms: int
    retention_bytes: int
    delete_retention_ms: int
    recent: int


def require_complete(log: Log) -> None:
    """Check that the brokers keep the newest value of every key.

    Raises:
        ConfigurationError: They delete records by age or size.
    """
    if "delete" in log.policy and (log.retention_ms, log.retention_bytes) != (-1, -1):
        raise ConfigurationError(
            f"the changelog {log.name} loses records: its cleanup.policy is {','.join(sorted(log.policy))}",
            next_step="set the topic's cleanup.policy to compact",
        )


def first_to_read(committed: Committed, log: Log, now_ms: int) -> int:
    """The offset from which the changelog must be applied to the store.

    Args:
        committed: The store's last commit.
        log: The changelog.
        now_ms: The present time: ms since 1970.

    Raises:
        ChangelogDiffers: The changelog ends before the store does, or its beginning was deleted.
        StoreTooOld: Deletions that the store has not seen may be gone from the changelog.
    """
    offset = committed.offset or 0
    if offset > log.end:
        raise ChangelogDiffers(
            f"the changelog {log.name} ends at {log.end}, before the store's offset {offset}: it was truncated, or has"
            " lost records",
            next_step="find out which of the two is right; " + _REBUILD,
        )
    if offset < log.start:
        raise ChangelogDiffers(
            f"the changelog {log.name} begins at {log.start}: records from {offset} on, which the store needs, were deleted",
            next_step="restore a newer copy of the store" if offset else "nothing can build this store: restore a copy",
        )
    # A commit's own marker stands at its offset: nothing else can have been written and removed below that.
    follows = log.end > offset + 1
    # If the first recent record stands there too, nothing older follows, and no tombstone can be gone yet.
    may_miss = follows and log.recent > offset + 1
    if may_miss and committed.at_ms and "compact" in log.policy and now_ms - committed.at_ms > log.delete_retention_ms:
        hours = (now_ms - committed.at_ms) / 3_600_000
        raise StoreTooOld(
            f"the store is {hours:.1f} hours old, and the changelog {log.name} keeps deletions for"
            f" {log.delete_retention_ms / 3_600_000:.1f}: it may have lost some that the store has not seen",
            next_step=_REBUILD,
        )
    return offset
