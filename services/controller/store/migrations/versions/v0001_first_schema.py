"""Creates the first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Applies the migration."""
    op.create_table(
        "api_tokens",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("create_time", sa.Float(precision=53), nullable=False),
        sa.Column("expire_time", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_tokens_prefix")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(length=256), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("create_time", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("scope", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expire_time", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "quotas",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("max_active_runs", sa.Integer(), nullable=False),
        sa.Column("max_queued_runs", sa.Integer(), nullable=False),
        sa.Column("max_gpus", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_transferqueue_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("max_checkpoint_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("max_requests_per_second", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_event_streams", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_quotas")),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("spec_digest", sa.String(length=64), nullable=False),
        sa.Column("target_steps", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("state_reason", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("labels_json", sa.Text(), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=False),
        sa.Column("summary_json", sa.Text(), nullable=False),
        sa.Column("num_attempts", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.Float(precision=53), nullable=False),
        sa.Column("update_time", sa.Float(precision=53), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("conditions_json", sa.Text(), server_default="[]", nullable=False),
        sa.Column("queue_deadline", sa.Float(precision=53), nullable=True),
        sa.Column("start_time", sa.Float(precision=53), nullable=True),
        sa.Column("finish_time", sa.Float(precision=53), nullable=True),
        sa.Column("gpus", sa.Integer(), server_default="0", nullable=False),
        sa.Column("transferqueue_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_project", "runs", ["project", "run_id"], unique=False)
    op.create_index("ix_runs_state", "runs", ["state"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("checkpoint_id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("create_time", sa.Float(precision=53), nullable=False),
        sa.Column("snapshot_id", sa.String(length=40), server_default="", nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_checkpoints_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name=op.f("pk_checkpoints")),
    )
    op.create_index("ix_checkpoints_run_id", "checkpoints", ["run_id", "step"], unique=False)
    op.create_table(
        "dead_letters",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("row", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_dead_letters_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("pk_dead_letters")),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data_json", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_events_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_events")),
    )
    op.create_index("ix_events_time", "events", ["time"], unique=False)
    op.create_index("ix_events_type", "events", ["run_id", "type", "seq"], unique=False)
    op.create_table(
        "ledgers",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("num_issued", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("version_offset", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ended_json", sa.Text(), nullable=False),
        sa.Column("reasons_json", sa.Text(), nullable=False),
        sa.Column("returned_json", sa.Text(), server_default="{}", nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_ledgers_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_ledgers")),
    )
    op.create_table(
        "prompts",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("row", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(length=63), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=False),
        sa.Column("num_unfinished", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_prompts_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("pk_prompts")),
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("is_committed", sa.Boolean(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=False),
        sa.Column("groups_json", sa.Text(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name=op.f("fk_steps_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_steps")),
    )
    op.create_table(
        "requests",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.Column("options_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name="fk_requests_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "kind", name="pk_requests"),
    )
