"""The first tables: state, incidents, slots, ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from dualwrite.stores.sql.tables import ExactString, ExactText, UtcDateTime, row_made

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    op.create_table(
        "kafka_transaction_state",
        sa.Column("transactional_id", ExactString(255), nullable=False),
        sa.Column("prepared_transaction_state", ExactText()),
        sa.Column("namespace", ExactString(32), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("settled_incarnation", sa.BigInteger(), nullable=False),
        sa.Column("completed", ExactString(16)),
        sa.Column("cluster_id", ExactString(255), nullable=False),
        sa.Column("owner", ExactText(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.PrimaryKeyConstraint("transactional_id", name="kafka_transaction_state_pkey"),
        sa.CheckConstraint("incarnation >= 0", name="kafka_transaction_state_incarnation"),
        sa.CheckConstraint(
            "settled_incarnation >= 0 AND settled_incarnation <= incarnation", name="kafka_transaction_state_settled"
        ),
        sa.CheckConstraint(
            "completed IN ('committed', 'lost', 'unverifiable')", name="kafka_transaction_state_completed"
        ),
        schema=schema,
    )
    op.create_table(
        "dualwrite_incident",
        sa.Column("transactional_id", ExactString(255), nullable=False),
        sa.Column("state_sha256", ExactString(64), nullable=False),
        sa.Column("prepared_transaction_state", ExactText(), nullable=False),
        sa.Column("outcome", ExactString(16), nullable=False),
        sa.Column("detail", ExactText(), nullable=False),
        sa.Column("detected_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.Column("acknowledged_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("transactional_id", "state_sha256", name="dualwrite_incident_pkey"),
        sa.CheckConstraint("outcome IN ('lost', 'unverifiable')", name="dualwrite_incident_outcome"),
        schema=schema,
    )
    op.create_table(
        "dualwrite_slot",
        sa.Column("transactional_id", ExactString(255), nullable=False),
        sa.Column("pool", ExactString(255), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("lease_owner", ExactText()),
        sa.Column("lease_until", UtcDateTime()),
        sa.PrimaryKeyConstraint("transactional_id", name="dualwrite_slot_pkey"),
        sa.UniqueConstraint("pool", "number", name="dualwrite_slot_number"),
        sa.CheckConstraint("number >= 1", name="dualwrite_slot_number_positive"),
        sa.CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name="dualwrite_slot_lease"),
        schema=schema,
    )
    op.create_table(
        "dualwrite_ledger",
        sa.Column("sink", ExactString(255), nullable=False),
        sa.Column("batch_id", ExactString(255), nullable=False),
        sa.Column("partition_id", sa.Integer(), nullable=False),
        sa.Column("row_count", sa.BigInteger(), nullable=False),
        sa.Column("message_count", sa.BigInteger(), nullable=False),
        sa.Column("partition_count", sa.Integer(), nullable=False),
        sa.Column("written_at", UtcDateTime(), nullable=False, server_default=row_made()),
        sa.PrimaryKeyConstraint("sink", "batch_id", "partition_id", name="dualwrite_ledger_pkey"),
        sa.CheckConstraint(
            "row_count >= 0 AND message_count >= 0 AND partition_count >= 1", name="dualwrite_ledger_counts"
        ),
        schema=schema,
    )


def downgrade(op: Operations, schema: str | None) -> None:
    for name in ("dualwrite_ledger", "dualwrite_slot", "dualwrite_incident", "kafka_transaction_state"):
        op.drop_table(name, schema=schema)
