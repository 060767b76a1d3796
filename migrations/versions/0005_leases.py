"""The leases of numbered ids: which member of a fleet may try to own which."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.stores.sql.tables import ExactString, ExactText, UtcDateTime

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.create_table(
        "dualwrite_lease",
        sa.Column("transactional_id", ExactString(255), nullable=False),
        sa.Column("fleet", ExactString(255), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("owner", ExactText()),
        sa.Column("lease_until", UtcDateTime()),
        sa.PrimaryKeyConstraint("transactional_id", name="dualwrite_lease_pkey"),
        sa.UniqueConstraint("fleet", "number", name="dualwrite_lease_number"),
        sa.CheckConstraint("number >= 0", name="dualwrite_lease_number_not_negative"),
        sa.CheckConstraint("(owner IS NULL) = (lease_until IS NULL)", name="dualwrite_lease_owned"),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_table("dualwrite_lease", schema=schema)
