"""Tables of the controller's database. The migrations create them; a test holds both together."""

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
"""One row a run. ``release`` wrote its specification; empty if nobody knows. ``num_attempts`` counts the
times that its loop was entered, which orders the epochs of its weight groups. ``generation`` counts its
specifications. At ``queue_deadline`` it has been queued for too long. ``gpus`` and ``transferqueue_bytes``
are what it takes of its project's quota while it is active."""

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
    # A few evaluations between thousands of steps.
    sa.Index("ix_events_type", "run_id", "type", "seq"),
)
"""What happened to a run, in order; written in the transaction of the change that it tells of."""

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
    sa.Column("returned_json", sa.Text, nullable=False, server_default="{}"),
)
"""The frontier of each run's ledger: groups 0 to ``num_issued`` were issued, from ``position`` rows of the
prompt order. Those in neither ``prompts`` nor ``dead_letters`` were trained by a row of ``steps``. The weight
versions of a rewound run are ``version_offset`` above its steps. ``first_step`` is the step of the checkpoint
that the run starts from (``trainer.checkpoint.start_from``): it has no earlier steps of its own."""

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
"""Groups in flight; a group that ended leaves the table."""

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
"""Groups that were dropped or quarantined, and why."""

PROMPT_RATES = sa.Table(
    "prompt_rates",
    METADATA,
    _run_id(),
    sa.Column("row", sa.BigInteger, primary_key=True),
    sa.Column("rate", sa.Float(53), nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("until", sa.BigInteger, nullable=False),
)
"""Running success of prompts of runs with a curriculum; a prompt is set aside before step ``until``."""

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
"""Steps with the groups that they train: written before the trainer is asked, committed when it answered.
``groups_json`` is a list of ``[sequence, row, attempt, oldest_version]``."""

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
"""Checkpoints of runs, the failed ones too. ``snapshot_id`` names the transferqueue's part."""

REQUESTS = sa.Table(
    "requests",
    METADATA,
    _run_id(),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("request_id", sa.String(40), nullable=False),
    sa.Column("options_json", sa.Text, nullable=False),
)
"""What users ask of runs and these have not done yet; a request leaves in the transaction of the event that
tells of its end."""

IDEMPOTENCY_KEYS = sa.Table(
    "idempotency_keys",
    METADATA,
    sa.Column("scope", sa.String(256), primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("body_digest", sa.String(64), nullable=False),
    sa.Column("run_id", sa.String(40), nullable=False),
    sa.Column("create_time", sa.Float(53), nullable=False),
)
"""Requests that made a run: the same key returns the same run."""

LEASES = sa.Table(
    "leases",
    METADATA,
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expire_time", sa.Float(53), nullable=False),
)
"""Who leads. Every write checks the epoch, so a leader that was replaced writes no more."""

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
"""API tokens by SHA-256; the tokens themselves are stored nowhere. With ``parent_digest`` a token was made
for the bearer of that one, and ends with it."""

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
"""What a project may use, 0 for no bound; a project without a row has the settings' default."""
