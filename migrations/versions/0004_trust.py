"""The run that may still write a batch, its destination, a digest of its rows, and when its last run failed.

Also the index for searches by prefix, the time when a loss was reported, the epoch from which on only settlers act, and the
offsets of consumer groups that keep them as rows.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.migrations import create_batch_view, drop_batch_view
from dualwrite.stores.sql.tables import ExactString, ExactText, UtcDateTime, row_made

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.create_table(
        "dualwrite_run",
        sa.Column("sink", ExactString(255), nullable=False),
        sa.Column("name", ExactString(255), nullable=False),
        sa.Column("token", ExactString(32), nullable=False),
        sa.Column("begun_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("sink", "name", name="dualwrite_run_pkey"),
        schema=schema,
    )
    op.add_column("dualwrite_ledger", sa.Column("destination", ExactText()), schema=schema)
    op.add_column("dualwrite_ledger", sa.Column("rows_digest", sa.BigInteger), schema=schema)
    op.add_column("dualwrite_ledger", sa.Column("failed_at", UtcDateTime()), schema=schema)
    create_batch_view(op, schema, failed=True, replace=True)
    op.create_index(
        "kafka_transaction_state_names",
        "kafka_transaction_state",
        ["transactional_id"],
        schema=schema,
        postgresql_ops={"transactional_id": "varchar_pattern_ops"},
    )
    op.add_column("dualwrite_incident", sa.Column("reported_at", UtcDateTime()), schema=schema)
    op.add_column("kafka_transaction_state", sa.Column("settle_fence", sa.Integer), schema=schema)
    op.create_table(
        "dualwrite_consumed",
        sa.Column("group_id", ExactString(255), nullable=False),
        sa.Column("topic", ExactString(255), nullable=False),
        sa.Column("partition_id", sa.Integer, nullable=False),
        sa.Column("topic_id", ExactString(32)),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("owner", ExactString(255), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.PrimaryKeyConstraint("group_id", "topic", "partition_id", name="dualwrite_consumed_pkey"),
        sa.CheckConstraint("next_offset >= -1 AND epoch >= 0", name="dualwrite_consumed_numbers"),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_table("dualwrite_consumed", schema=schema)
    op.drop_column("kafka_transaction_state", "settle_fence", schema=schema)
    op.drop_column("dualwrite_incident", "reported_at", schema=schema)
    op.drop_index("kafka_transaction_state_names", "kafka_transaction_state", schema=schema)
    drop_batch_view(op, schema)
    for name in ("failed_at", "rows_digest", "destination"):
        op.drop_column("dualwrite_ledger", name, schema=schema)
    create_batch_view(op, schema, failed=False)
    op.drop_table("dualwrite_run", schema=schema)
