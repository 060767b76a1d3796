"""The history of actions: what people, and the service that settles, have done, why, and how it ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.stores.sql.tables import ExactString, ExactText, UtcDateTime, row_made

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.create_table(
        "dualwrite_action",
        sa.Column("action_id", ExactString(32), nullable=False),
        sa.Column("subject", ExactString(255), nullable=False),
        sa.Column("deed", ExactString(16), nullable=False),
        sa.Column("detail", ExactText(), nullable=False),
        sa.Column("reason", ExactText(), nullable=False),
        sa.Column("actor", ExactText(), nullable=False),
        sa.Column("program", ExactText(), nullable=False),
        sa.Column("begun_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.Column("ended_at", UtcDateTime()),
        sa.Column("outcome", ExactString(16)),
        sa.Column("result", ExactText()),
        sa.PrimaryKeyConstraint("action_id", name="dualwrite_action_pkey"),
        sa.CheckConstraint("outcome IN ('done', 'refused', 'failed')", name="dualwrite_action_outcome"),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="dualwrite_action_ended"),
        schema=schema,
    )
    op.create_index("dualwrite_action_order", "dualwrite_action", ["begun_at"], schema=schema)


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_table("dualwrite_action", schema=schema)
