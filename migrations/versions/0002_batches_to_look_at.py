"""When a partition was begun and a batch completed, and the view that shows the ledger batch by batch."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# The ledger's row -1 stands for all of a batch that is decided as one, -2 for the beginning of one that is not.
_VIEW: Final = """
CREATE VIEW {view} AS
SELECT sink, batch_id,
  CASE WHEN completed_at IS NOT NULL THEN 'completed'
       WHEN decided_at IS NOT NULL THEN 'decided'
       ELSE 'writing' END AS phase,
  partition_count, written_partitions, row_count, message_count, started_at, decided_at, completed_at,
  {decided_after_s} AS decided_after_s,
  {completed_after_s} AS completed_after_s
FROM (
  SELECT sink, batch_id, partition_count, written_partitions, row_count, message_count, started_at, completed_at,
    CASE WHEN written_partitions >= partition_count THEN last_written_at END AS decided_at
  FROM (
    SELECT sink, batch_id,
      MAX(partition_count) AS partition_count,
      CAST(SUM(CASE WHEN partition_id = -1 THEN partition_count WHEN partition_id >= 0 THEN 1 ELSE 0 END) AS INTEGER)
        AS written_partitions,
      CAST(SUM(row_count) AS BIGINT) AS row_count,
      CAST(SUM(message_count) AS BIGINT) AS message_count,
      MIN(CASE WHEN partition_id = -2 THEN written_at ELSE started_at END) AS started_at,
      MAX(CASE WHEN partition_id >= -1 THEN written_at END) AS last_written_at,
      MAX(completed_at) AS completed_at
    FROM {ledger} GROUP BY sink, batch_id
  ) AS summed
) AS judged
"""


def upgrade(op: Operations, schema: str | None) -> None:
    for name in ("started_at", "completed_at"):
        op.add_column("dualwrite_ledger", sa.Column(name, sa.DateTime(timezone=True)), schema=schema)
    prefix = _prefix(op, schema)
    if op.get_context().dialect.name == "postgresql":
        ledger, seconds = (
            f"{prefix}dualwrite_ledger",
            "CAST(EXTRACT(EPOCH FROM {later} - started_at) AS DOUBLE PRECISION)",
        )
    else:
        # Unqualified: SQLite binds it to the view's own database, which may be attached under another name next time.
        ledger, seconds = "dualwrite_ledger", "(julianday({later}) - julianday(started_at)) * 86400.0"
    op.execute(
        _VIEW.format(
            view=f"{prefix}dualwrite_batch",
            ledger=ledger,
            decided_after_s=seconds.format(later="decided_at"),
            completed_after_s=seconds.format(later="completed_at"),
        )
    )


def downgrade(op: Operations, schema: str | None) -> None:
    op.execute(f"DROP VIEW {_prefix(op, schema)}dualwrite_batch")
    for name in ("completed_at", "started_at"):
        op.drop_column("dualwrite_ledger", name, schema=schema)


def _prefix(op: Operations, schema: str | None) -> str:
    if schema is None:
        return ""
    return f"{op.get_context().dialect.identifier_preparer.quote_schema(schema)}."
