"""Creates and changes the view that shows the ledger batch by batch, for the migrations."""

from __future__ import annotations

from typing import Final

from alembic.operations import Operations

from dualwrite.stores.sql.tables import MYSQL

# In the ledger, row -1 stands for a whole batch decided at once, row -2 for the beginning of a batch.
_VIEW: Final = """
{create} VIEW {view} AS
SELECT sink, batch_id,
  CASE WHEN completed_at IS NOT NULL THEN 'completed'
       WHEN decided_at IS NOT NULL THEN 'decided'{failed_phase}
       ELSE 'writing' END AS phase,
  partition_count, written_partitions, row_count, message_count, started_at, decided_at, completed_at,
  {decided_after_s} AS decided_after_s,
  {completed_after_s} AS completed_after_s{failed_shown}{seen}
FROM (
  SELECT sink, batch_id, partition_count, written_partitions, row_count, message_count, started_at, completed_at,
    CASE WHEN written_partitions >= partition_count THEN last_written_at END AS decided_at{failed_at}{seen}
  FROM (
    SELECT sink, batch_id,
      MAX(partition_count) AS partition_count,
      CAST(SUM(CASE WHEN partition_id = -1 THEN partition_count WHEN partition_id >= 0 THEN 1 ELSE 0 END) AS {integer})
        AS written_partitions,
      CAST(SUM(row_count) AS {bigint}) AS row_count,
      CAST(SUM(message_count) AS {bigint}) AS message_count,
      {started_at} AS started_at,
      MAX(CASE WHEN partition_id >= -1 THEN written_at END) AS last_written_at,
      MAX(completed_at) AS completed_at{failed_max}{seen_max}
    FROM {ledger} GROUP BY sink, batch_id
  ) AS summed
) AS judged
"""
_STARTED: Final = "MIN(CASE WHEN partition_id = -2 THEN written_at ELSE started_at END)"


def create_batch_view(
    op: Operations, schema: str | None, *, failed: bool, seen: bool = False, replace: bool = False
) -> None:
    """Create the view.

    With `failed`, it shows batches whose last run failed, and undecided batches that are decided as a whole; with `seen`, also
    bytes and sources. `replace` says that it already exists, with fewer columns; its grants stay where the database allows it.
    """
    prefix = prefix_of(op, schema)
    view = f"{prefix}dualwrite_batch"
    create, integer, bigint = "CREATE", "INTEGER", "BIGINT"
    if op.get_context().dialect.name in MYSQL:
        create, integer, bigint = "CREATE OR REPLACE", "SIGNED", "SIGNED"
        ledger = f"{prefix}dualwrite_ledger"
        seconds = "CAST(timestampdiff(MICROSECOND, started_at, {later}) / 1e6 AS DOUBLE)"
    elif op.get_context().dialect.name == "postgresql":
        create = "CREATE OR REPLACE" if replace else "CREATE"
        ledger = f"{prefix}dualwrite_ledger"
        seconds = "CAST(EXTRACT(EPOCH FROM {later} - started_at) AS DOUBLE PRECISION)"
    else:
        if replace:
            drop_batch_view(op, schema)
        # Unqualified: SQLite resolves it in the view's own database, which may be attached under another name next time.
        ledger, seconds = "dualwrite_ledger", "(julianday({later}) - julianday(started_at)) * 86400.0"
    op.execute(
        _VIEW.format(
            create=create,
            integer=integer,
            bigint=bigint,
            view=view,
            ledger=ledger,
            decided_after_s=seconds.format(later="decided_at"),
            completed_after_s=seconds.format(later="completed_at"),
            # A batch decided as a whole begins again with each run.
            started_at=f"COALESCE(MAX(CASE WHEN partition_id = -1 THEN started_at END), {_STARTED})"
            if failed
            else _STARTED,
            failed_phase="\n       WHEN failed_at IS NOT NULL THEN 'failed'" if failed else "",
            failed_shown=",\n  CASE WHEN decided_at IS NULL THEN failed_at END AS failed_at" if failed else "",
            failed_at=", failed_at" if failed else "",
            failed_max=",\n      MAX(failed_at) AS failed_at" if failed else "",
            seen=", byte_count, sources" if seen else "",
            # One row of a batch has its sources: -1 if it is decided at once, otherwise -2.
            seen_max=f",\n      CAST(SUM(byte_count) AS {bigint}) AS byte_count, MAX(sources) AS sources"
            if seen
            else "",
        )
    )


def drop_batch_view(op: Operations, schema: str | None) -> None:
    """Drop the view."""
    there = "IF EXISTS " if op.get_context().dialect.name in MYSQL else ""  # an interrupted step is taken again
    op.execute(f"DROP VIEW {there}{prefix_of(op, schema)}dualwrite_batch")


def prefix_of(op: Operations, schema: str | None) -> str:
    """The quoted prefix of names in a schema."""
    if schema is None:
        return ""
    return f"{op.get_context().dialect.identifier_preparer.quote_schema(schema)}."
