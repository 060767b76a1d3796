"""The time until which a free slot is reserved for the worker that could continue with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.stores.sql.tables import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.add_column("dualwrite_slot", sa.Column("kept_until", UtcDateTime()), schema=schema)


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_column("dualwrite_slot", "kept_until", schema=schema)
