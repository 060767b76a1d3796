"""Start times of partitions, completion times of batches, and the view that shows the ledger batch by batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.migrations import create_batch_view, drop_batch_view
from dualwrite.stores.sql.tables import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    for name in ("started_at", "completed_at"):
        op.add_column("dualwrite_ledger", sa.Column(name, UtcDateTime()), schema=schema)
    create_batch_view(op, schema, failed=False)


def downgrade(op: Operations, schema: str | None) -> None:
    drop_batch_view(op, schema)
    for name in ("completed_at", "started_at"):
        op.drop_column("dualwrite_ledger", name, schema=schema)
