"""Tables of the controller's database. A new database is created with them; migrations change older ones."""

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)


def _run_id(*, is_key: bool = True) -> sa.Column[str]:
    return sa.Column(
        "run_id",
        sa.String(40),
        sa.ForeignKey("runs.run_id", ondelete="CASCADE"),
        primary_key=is_key,
        nullable=False,
    )


RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("run_id", sa.String(40), primary_key=True),
    sa.Column("project", sa.String(63), nullable=False),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("spec_json", sa.Text, nullable=False),
    sa.Column("spec_digest", sa.String(64), nullable=False),
    sa.Column("release", sa.String(63), nullable=False, server_default=""),
    sa.Column("target_steps", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("state_reason", sa.String(64), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("labels_json", sa.Text, nullable=False),
    sa.Column("created_by", sa.String(128), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("weight_version", sa.BigInteger, nullable=False),
    sa.Column("summary_json", sa.Text, nullable=False),
    sa.Column("num_attempts", sa.BigInteger, nullable=False),
    sa.Column("create_time", sa.Float(53), nullable=False),
    sa.Column("update_time", sa.Float(53), nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, server_default="1"),
    sa.Column("conditions_json", sa.Text, nullable=False, server_default="[]"),
    sa.Column("queue_deadline", sa.Float(53), nullable=True),
    sa.Column("start_time", sa.Float(53), nullable=True),
    sa.Column("finish_time", sa.Float(53), nullable=True),
    sa.Column("gpus", sa.Integer, nullable=False, server_default="0"),
    sa.Column("transferqueue_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_runs_project", "project", "run_id"),
    sa.Index("ix_runs_state", "state"),
)
"""One row per run. ``release`` is the release that wrote the specification; empty if unknown.
``num_attempts`` counts how often the run's loop was entered, which orders the epochs of its weight groups.
``generation`` counts the specifications. At ``queue_deadline`` the run exceeds its queue time-out. ``gpus``
and ``transferqueue_bytes`` are the resources that it takes from its project's quota while it is active."""

EVENTS = sa.Table(
    "events",
    METADATA,
    _run_id(),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("time", sa.Float(53), nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data_json", sa.Text, nullable=False),
    sa.Column("actor", sa.String(128), nullable=False),
    sa.Index("ix_events_time", "time"),
    # For the few evaluations between thousands of steps.
    sa.Index("ix_events_type", "run_id", "type", "seq"),
)
"""Events of a run in order; each is written in the transaction of the change that it reports."""

LEDGERS = sa.Table(
    "ledgers",
    METADATA,
    _run_id(),
    sa.Column("num_issued", sa.BigInteger, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("version_offset", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("first_step", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("ended_json", sa.Text, nullable=False),
    sa.Column("reasons_json", sa.Text, nullable=False),
    sa.Column("refilled_before", sa.BigInteger, nullable=False, server_default="0"),
)
"""Frontier of each run's ledger: the first ``num_issued`` groups were issued, from the first
``position`` rows of the prompt order. Groups in neither ``prompts`` nor ``dead_letters`` were
trained by a row of ``steps``. The weight versions of a rewound run are ``version_offset`` above its
steps. ``first_step`` is the step of the checkpoint from which the run starts
(``trainer.checkpoint.start_from``); the run has no earlier steps. ``refilled_before`` counts the groups
that dynamic sampling had replaced when the newest batch was formed."""

RETURNED_ROWS = sa.Table(
    "returned_rows",
    METADATA,
    _run_id(),
    sa.Column("row", sa.BigInteger, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("is_waiting", sa.Boolean, nullable=False),
)
"""Rows whose samples were dropped in an epoch of the data and that are, or were, issued once more at its
end; ``number`` orders them."""

PROMPTS = sa.Table(
    "prompts",
    METADATA,
    _run_id(),
    sa.Column("sequence", sa.BigInteger, primary_key=True),
    sa.Column("row", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("losses", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(63), nullable=False),
    sa.Column("oldest_version", sa.BigInteger, nullable=False),
    sa.Column("num_unfinished", sa.Integer, nullable=False, server_default="0"),
    sa.Column("num_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("first_attempt", sa.Integer, nullable=False, server_default="1"),
)
"""Groups in flight; a group that ends is deleted."""

DEAD_LETTERS = sa.Table(
    "dead_letters",
    METADATA,
    _run_id(),
    sa.Column("sequence", sa.BigInteger, primary_key=True),
    sa.Column("row", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("reason", sa.String(64), nullable=False),
    sa.Column("time", sa.Float(53), nullable=False),
)
"""Dropped and quarantined groups, with the reason."""

PROMPT_RATES = sa.Table(
    "prompt_rates",
    METADATA,
    _run_id(),
    sa.Column("row", sa.BigInteger, primary_key=True),
    sa.Column("rate", sa.Float(53), nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("until", sa.BigInteger, nullable=False),
)
"""Running success rates of prompts, for runs with a curriculum; a prompt is not issued before step
``until``."""

STEPS = sa.Table(
    "steps",
    METADATA,
    _run_id(),
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("is_committed", sa.Boolean, nullable=False),
    sa.Column("weight_version", sa.BigInteger, nullable=False),
    sa.Column("groups_json", sa.Text, nullable=False),
    sa.Column("metrics_json", sa.Text, nullable=False),
    sa.Column("time", sa.Float(53), nullable=False),
)
"""Steps and the groups that they train: written before the trainer receives the step, committed
after its answer. ``groups_json`` is a list of ``[sequence, row, attempt, oldest_version]``."""

CHECKPOINTS = sa.Table(
    "checkpoints",
    METADATA,
    sa.Column("checkpoint_id", sa.String(40), primary_key=True),
    _run_id(is_key=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("weight_version", sa.BigInteger, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("create_time", sa.Float(53), nullable=False),
    sa.Column("snapshot_id", sa.String(40), nullable=False, server_default=""),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_checkpoints_run_id", "run_id", "step"),
)
"""Checkpoints of runs, including failed ones. ``snapshot_id`` names the transferqueue's snapshot."""

REQUESTS = sa.Table(
    "requests",
    METADATA,
    _run_id(),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("request_id", sa.String(40), nullable=False),
    sa.Column("options_json", sa.Text, nullable=False),
)
"""Pending requests of users to runs; a request is deleted in the transaction of the event that
reports its end."""

DELETED_RUNS = sa.Table(
    "deleted_runs",
    METADATA,
    sa.Column("run_id", sa.String(40), primary_key=True),
    sa.Column("delete_time", sa.Float(53), nullable=False),
)
"""Runs that a user deleted. An unknown run that is not among them was lost with a database."""

IDEMPOTENCY_KEYS = sa.Table(
    "idempotency_keys",
    METADATA,
    sa.Column("scope", sa.String(256), primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("body_digest", sa.String(64), nullable=False),
    sa.Column("run_id", sa.String(40), nullable=False),
    sa.Column("create_time", sa.Float(53), nullable=False),
)
"""Requests that created a run: the same key returns the same run."""

LEASES = sa.Table(
    "leases",
    METADATA,
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expire_time", sa.Float(53), nullable=False),
    sa.Column("address", sa.String(255), nullable=False, server_default=""),
)
"""Lease of the leading controller, with its host and ports if others forward to it. Every write checks the
epoch, so a replaced leader writes no more."""

API_TOKENS = sa.Table(
    "api_tokens",
    METADATA,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("prefix", sa.String(16), nullable=False, unique=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("project", sa.String(63), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("create_time", sa.Float(53), nullable=False),
    sa.Column("expire_time", sa.Float(53), nullable=True),
    sa.Column("parent_digest", sa.String(64), nullable=True),
)
"""API tokens by SHA-256; the tokens themselves are not stored. ``parent_digest`` is the token from
which a token was derived and with which it is revoked."""

QUOTAS = sa.Table(
    "quotas",
    METADATA,
    sa.Column("project", sa.String(63), primary_key=True),
    sa.Column("max_active_runs", sa.Integer, nullable=False),
    sa.Column("max_queued_runs", sa.Integer, nullable=False),
    sa.Column("max_gpus", sa.Integer, nullable=False, server_default="0"),
    sa.Column("max_transferqueue_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("max_checkpoint_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("max_requests_per_second", sa.Integer, nullable=False, server_default="0"),
    sa.Column("max_event_streams", sa.Integer, nullable=False, server_default="0"),
)
"""Limits of projects, 0 means unlimited; a project without a row has the settings' defaults."""
