"""Messages that wait in the database, those that were moved aside, and the mode of each writer.

The row of a lane counts the decisions of blocks whose messages wait.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.stores.sql.tables import ExactBytes, ExactString, ExactText, GrowingNumber, UtcDateTime, row_made

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.add_column("kafka_transaction_state", sa.Column("outbox_decisions", sa.BigInteger), schema=schema)
    op.create_table(
        "dualwrite_outbox",
        sa.Column("seq", GrowingNumber, sa.Identity(always=True), nullable=False),
        *_message(),
        sa.PrimaryKeyConstraint("seq", name="dualwrite_outbox_pkey"),
        schema=schema,
        sqlite_autoincrement=True,
    )
    op.create_index("dualwrite_outbox_order", "dualwrite_outbox", ["writer", "seq"], schema=schema)
    op.create_table(
        "dualwrite_outbox_aside",
        sa.Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        *_message(),
        sa.Column("reason", ExactText(), nullable=False),
        sa.Column("moved_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.PrimaryKeyConstraint("seq", name="dualwrite_outbox_aside_pkey"),
        schema=schema,
    )
    op.create_index("dualwrite_outbox_aside_order", "dualwrite_outbox_aside", ["writer", "seq"], schema=schema)
    op.create_table(
        "dualwrite_outbox_mode",
        sa.Column("writer", ExactString(255), nullable=False),
        sa.Column("mode", ExactString(16), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.PrimaryKeyConstraint("writer", name="dualwrite_outbox_mode_pkey"),
        sa.CheckConstraint("mode IN ('direct', 'later')", name="dualwrite_outbox_mode_known"),
        schema=schema,
    )


def _message() -> list[sa.Column[Any]]:
    return [
        sa.Column("writer", ExactString(255), nullable=False),
        sa.Column("transactional_id", ExactString(255), nullable=False),
        sa.Column("topic", ExactString(255), nullable=False),
        sa.Column("topic_partition", sa.Integer),
        sa.Column("key", ExactBytes()),
        sa.Column("value", ExactBytes()),
        sa.Column("headers", ExactBytes()),
        sa.Column("timestamp_ms", sa.BigInteger),
        sa.Column("put_at", UtcDateTime(), nullable=False, server_default=row_made()),
    ]


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_table("dualwrite_outbox_mode", schema=schema)
    op.drop_table("dualwrite_outbox_aside", schema=schema)
    op.drop_table("dualwrite_outbox", schema=schema)
    op.drop_column("kafka_transaction_state", "outbox_decisions", schema=schema)
