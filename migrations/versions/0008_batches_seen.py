"""How many bytes each part of a batch has written, and what the batch was made of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.migrations import create_batch_view, drop_batch_view
from dualwrite.stores.sql.tables import ExactText

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.add_column("dualwrite_ledger", sa.Column("byte_count", sa.BigInteger), schema=schema)
    op.add_column("dualwrite_ledger", sa.Column("sources", ExactText()), schema=schema)
    create_batch_view(op, schema, failed=True, seen=True, replace=True)


def downgrade(op: Operations, schema: str | None) -> None:
    drop_batch_view(op, schema)
    for name in ("sources", "byte_count"):
        op.drop_column("dualwrite_ledger", name, schema=schema)
    create_batch_view(op, schema, failed=True)
