"""Errors for batches that do not continue as they were begun."""

from __future__ import annotations

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.batches__protocol_batches_entry import Destination, Recorded, mismatch_of


def check_partition_count(sink: str, batch_id: str, recorded: int | None, present: int) -> None:
    """Refuse a batch whose number of partitions changed since it began: rows may have moved between partitions.

    Raises:
        ConfigurationError: The numbers differ.
    """
    if recorded is not None and recorded != present:
        raise ConfigurationError(
            f"batch {batch_id!r} of sink {sink!r} was begun with {recorded} partitions and now has {present}: a partition "
            "that is already written may hold other rows now",
            next_step=f"run it with {recorded} partitions again, made the same way (repartition({recorded}, ...) by a key, "
            "or a checkpointed input); or, to discard what it wrote, undo its rows and use a new batch id",
        )


def other_destination(sink: str, batch_id: str, recorded: Recorded, present: Destination) -> ConfigurationError:
    """The error for a batch whose destination differs from its previous run's."""
    return ConfigurationError(
        f"batch {batch_id!r} of sink {sink!r} {mismatch_of(recorded, present)}: nothing was written now",
        next_step="give each table, topic and way its own sink name, even if one foreachBatch writes to several; or "
        "run the batch again where it was begun",
    )
