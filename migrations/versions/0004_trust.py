"""Which run of a batch may still write."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.create_table(
        "dualwrite_run",
        sa.Column("sink", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sink", "name", name="dualwrite_run_pkey"),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_table("dualwrite_run", schema=schema)
