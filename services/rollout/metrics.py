"""Prometheus metrics of the rollout service."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import RPC, SPANS, TOKENS, USER_CODE

GROUPS = Counter(
    "slipstream_rollout_groups_total",
    "Groups by outcome: published, or the reason of the failure",
    ["outcome"],
)
SAMPLES = Counter("slipstream_rollout_samples_total", "Samples by finish reason", ["finish_reason"])
REWARD_FAILURES = Counter(
    "slipstream_rollout_reward_failures_total",
    "Rewards that could not be computed, by kind of failure",
    ["kind"],
)
WORKFLOW_FAILURES = Counter(
    "slipstream_rollout_workflow_failures_total",
    "Episodes that the user's agent or tool server did not finish",
    ["kind"],
)
UNTAUGHT_SAMPLES = Counter(
    "slipstream_rollout_untaught_samples_total",
    "Samples that do not train because their teacher has no prompt, by reason",
    ["reason"],
)
LATE_GROUPS = Counter(
    "slipstream_rollout_late_groups_total", "Finished groups that the transferqueue had already"
)
CACHE_FAILURES = Counter(
    "slipstream_rollout_cache_failures_total", "Times that progress could not be cached"
)
SAMPLE_RECORD_FAILURES = Counter(
    "slipstream_rollout_sample_record_failures_total",
    "Groups whose sample records could not be stored",
)
UNUSED_AGENT_TOKENS = Counter(
    "slipstream_rollout_unused_agent_tokens_total",
    "Tokens that agents sampled outside of trained conversations",
)
RESPONSE_TOKENS = Histogram(
    "slipstream_rollout_response_tokens", "Length of finished responses", buckets=TOKENS
)
SEGMENTS = Histogram(
    "slipstream_rollout_segments", "Weight versions in one response", buckets=SPANS
)
REWARD_SECONDS = Histogram(
    "slipstream_rollout_reward_seconds", "Time of one reward, including waits", buckets=USER_CODE
)
ENVIRONMENT_SECONDS = Histogram(
    "slipstream_rollout_environment_seconds",
    "Time of one request to an environment, including waits: begin, step or close",
    ["call"],
    buckets=USER_CODE,
)
SANDBOXES = Gauge(
    "slipstream_rollout_sandboxes", "Sandboxes of episodes: running, or waited for", ["state"]
)
SANDBOX_SECONDS = Histogram(
    "slipstream_rollout_sandbox_seconds",
    "Time of an operation of an episode's sandbox: wait, start, command, end",
    ["operation"],
    buckets=USER_CODE,
)
SANDBOX_FAILURES = Counter(
    "slipstream_rollout_sandbox_failures_total",
    "Sandboxes that did not start, died, or did not end, so that they may be left over",
    ["operation"],
)
SANDBOX_LIMITS = Counter(
    "slipstream_rollout_sandbox_limits_total",
    "Commands in sandboxes that were killed by a limit: time, memory, processes",
    ["limit"],
)
PUBLISH_SECONDS = Histogram(
    "slipstream_rollout_publish_seconds", "Time to store a group, including waits", buckets=RPC
)
ADOPT_STALL_SECONDS = Histogram(
    "slipstream_rollout_adopt_stall_seconds", "Time without tokens per weight update", buckets=RPC
)
FIRST_TOKEN_SECONDS = Histogram(
    "slipstream_rollout_first_token_seconds",
    "Time from a weight update to the next tokens of an external engine",
    buckets=RPC,
)
ADOPT_PHASE_SECONDS = Histogram(
    "slipstream_rollout_adopt_phase_seconds",
    "Time of each phase of a weight update in an external engine: share, gate, freeze, copy, thaw",
    ["phase"],
    buckets=RPC,
)
ADOPT_SECONDS = Histogram(
    "slipstream_rollout_adopt_seconds",
    "Time to put received weights into service, including the wait for running responses",
    buckets=USER_CODE,
)
RUNNING = Gauge("slipstream_rollout_running_samples", "Samples that are being decoded")
WAITING = Gauge("slipstream_rollout_waiting_samples", "Samples that wait for the engine")
KV_USED = Gauge("slipstream_rollout_kv_used_ratio", "Part of the KV cache in use")
TOKENS_TOTAL = Gauge("slipstream_rollout_tokens", "Tokens sampled since the start")
PROMPT_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_prompt_tokens", "Prompt tokens of requests to the engine since the start"
)
CACHED_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_cached_prompt_tokens",
    "Prompt tokens that came from the prefix cache or from another request of the same pass",
)
RECOMPUTED_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_recomputed_tokens",
    "Response tokens recomputed since the start, under new weights or to resume a response",
)
DRAFTS_TOTAL = Gauge(
    "slipstream_rollout_drafts",
    "Times since the start that tokens were proposed for a request (speculative decoding)",
)
DRAFT_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_draft_tokens", "Tokens proposed since the start (speculative decoding)"
)
ACCEPTED_DRAFT_TOKENS_TOTAL = Gauge(
    "slipstream_rollout_accepted_draft_tokens",
    "Proposed tokens since the start that became part of a response (speculative decoding)",
)
ACCEPTANCE_LENGTH = Gauge(
    "slipstream_rollout_acceptance_length",
    "Mean tokens of a pass with proposals since the start, for each request (speculative decoding)",
)
WEIGHT_VERSION = Gauge("slipstream_rollout_weight_version", "Version of the live weights")
ADMISSION_LIMIT = Gauge(
    "slipstream_rollout_admission_limit", "Max simultaneous groups; falls under pressure"
)
