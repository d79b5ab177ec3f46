"""Prometheus metrics of the rollout service."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import RPC, SPANS, TOKENS, USER_CODE

GROUPS = Counter(
    "slipstream_rollout_groups_total",
    "Groups by how they ended: published, or why not",
    ["outcome"],
)
SAMPLES = Counter(
    "slipstream_rollout_samples_total", "Samples by how their response ended", ["finish_reason"]
)
REWARD_FAILURES = Counter(
    "slipstream_rollout_reward_failures_total", "Rewards that could not be computed", ["kind"]
)
WORKFLOW_FAILURES = Counter(
    "slipstream_rollout_workflow_failures_total",
    "Episodes that the user's agent or tool server could not finish",
    ["kind"],
)
LATE_GROUPS = Counter(
    "slipstream_rollout_late_groups_total", "Finished groups that the transferqueue had already"
)
CACHE_FAILURES = Counter(
    "slipstream_rollout_cache_failures_total", "Times that progress could not be cached"
)
UNKEPT_GROUPS = Counter(
    "slipstream_rollout_unkept_groups_total", "Groups that could not be kept to be read"
)
UNUSED_AGENT_TOKENS = Counter(
    "slipstream_rollout_unused_agent_tokens_total",
    "Tokens that agents had sampled outside the conversations that train",
)
RESPONSE_TOKENS = Histogram(
    "slipstream_rollout_response_tokens", "Length of finished responses", buckets=TOKENS
)
SEGMENTS = Histogram(
    "slipstream_rollout_segments", "Weight versions in one response", buckets=SPANS
)
REWARD_SECONDS = Histogram(
    "slipstream_rollout_reward_seconds", "Time of one reward, waiting included", buckets=USER_CODE
)
ENVIRONMENT_SECONDS = Histogram(
    "slipstream_rollout_environment_seconds",
    "Time of one answer of an environment, waiting included: begin, step or close",
    ["call"],
    buckets=USER_CODE,
)
PUBLISH_SECONDS = Histogram(
    "slipstream_rollout_publish_seconds", "Time to store a group, waiting included", buckets=RPC
)
ADOPT_STALL_SECONDS = Histogram(
    "slipstream_rollout_adopt_stall_seconds", "Time without tokens per weight update", buckets=RPC
)
FIRST_TOKEN_SECONDS = Histogram(
    "slipstream_rollout_first_token_seconds",
    "Time from a weight update to the next tokens of an engine of another project",
    buckets=RPC,
)
ADOPT_PHASE_SECONDS = Histogram(
    "slipstream_rollout_adopt_phase_seconds",
    "Time of each phase of a weight update in an engine of another project: share, gate, freeze, copy, thaw",
    ["phase"],
    buckets=RPC,
)
ADOPT_SECONDS = Histogram(
    "slipstream_rollout_adopt_seconds",
    "Time to put received weights into service, waiting for running responses included",
    buckets=USER_CODE,
)
RUNNING = Gauge("slipstream_rollout_running_samples", "Samples that are being decoded")
WAITING = Gauge("slipstream_rollout_waiting_samples", "Samples that wait for the engine")
KV_USED = Gauge("slipstream_rollout_kv_used_ratio", "Part of the KV cache in use")
TOKENS_TOTAL = Gauge("slipstream_rollout_tokens", "Tokens sampled since the start")
PROMPT_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_prompt_tokens", "Tokens of contexts given to the engine since the start"
)
CACHED_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_cached_prompt_tokens",
    "Those of them that a prefix cache held, or another request of the same pass",
)
RECOMPUTED_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_recomputed_tokens",
    "Tokens of responses computed once more since the start: under new weights, or to go on with a response",
)
WEIGHT_VERSION = Gauge("slipstream_rollout_weight_version", "Version of the live weights")
ADMISSION_LIMIT = Gauge(
    "slipstream_rollout_admission_limit", "Most groups in work; falls under pressure"
)
