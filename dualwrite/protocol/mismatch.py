"""Errors for a database and a Kafka cluster that do not belong together, or no longer agree on what has happened."""

from __future__ import annotations

from dualwrite.errors import ConfigurationError, DatabaseWentBack


def other_cluster(row_cluster_id: str, cluster_id: str, transactional_id: str) -> ConfigurationError:
    """The row does not belong to the bootstrap servers' cluster: what is not found there must not be taken for gone."""
    return ConfigurationError(
        f"the row belongs to the Kafka cluster {row_cluster_id!r}, but bootstrap.servers leads to {cluster_id!r}",
        transactional_id=transactional_id,
        next_step="use the address of the right cluster; if the cluster was rebuilt, its messages are gone, and a "
        "person must decide what to do with this row",
    )


def gone_back(
    seen: str, transactional_id: str, forgotten: str | None = None, *, recorded: bool = False
) -> DatabaseWentBack:
    """The database has lost commits, or Kafka has followed a copy of it.

    Args:
        seen: The evidence, in words.
        transactional_id: The row's id.
        forgotten: The text form of a decision that the database has lost.
        recorded: Whether that is already recorded as an incident, so that the next opening of the writer succeeds.
    """
    next_step = (
        "messages newer than the database's state are visible in Kafka: stop what uses a copy, compare both; it is recorded "
        "as an incident, and the next opening of the writer succeeds"
        if recorded
        else "messages newer than the database's state may be visible in Kafka: stop what uses a copy, compare both, "
        "then run `dualwrite recover --after-restore`"
    )
    return DatabaseWentBack(
        f"{seen}: the database has gone back in time (restored from a backup, or failed over to a copy that was behind), "
        "or a copy of it is in use beside it",
        transactional_id=transactional_id,
        next_step=next_step,
        state=forgotten,
    )
