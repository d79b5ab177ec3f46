"""Dashboards on what runs share: weight transfer, workers, queue and API."""

from deploy.observability.panels import Dashboard, Panel, Row
from deploy.observability.queries import (
    RATE,
    RUN,
    each,
    mean_seconds,
    newest,
    quantiles,
    rate,
    total,
)

_SYNC = "slipstream_weight_sync_duration_seconds"
_TOTAL = f'{RUN},phase="total"'
_FLEET_TOKENS = f"rate(slipstream_fleet_run_tokens_total[{RATE}])"
_FLEET_SHARE = "slipstream_fleet_run_share"

WEIGHT_SYNC = Dashboard(
    uid="slipstream-weight-sync",
    title="Slipstream / Weight sync",
    content=[
        Row("Latency"),
        Panel(
            "Sync latency",
            "Time from a finished step until every rollout serves its weights.",
            quantiles(_SYNC, (0.5, 0.95), by="run", matcher=_TOTAL),
            unit="s",
        ),
        Panel(
            "Sync latency by phase",
            "Mean time of each phase.",
            mean_seconds(_SYNC),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "Syncs under 300 ms",
            "Fraction of all syncs.",
            [
                (
                    f'sum by (run) ({_SYNC}_bucket{{{_TOTAL},le="0.3"}}) / '
                    f"sum by (run) ({_SYNC}_count{{{_TOTAL}}})",
                    "{{run}}",
                )
            ],
            unit="percentunit",
            kind="stat",
        ),
        Row("Transfer"),
        Panel(
            "Bandwidth",
            "Bytes of weights per second of transfer, as one receiver sees it.",
            [
                (
                    f"sum by (run) (rate(slipstream_weight_sync_bytes_total{{{RUN}}}[{RATE}])) / "
                    f'sum by (run) (rate({_SYNC}_sum{{{RUN},phase="transfer"}}[{RATE}]))',
                    "{{run}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            "Versions",
            "Weight versions of the trainer and of each rollout.",
            [
                *each(trainer="slipstream_trainer_weight_version"),
                (f"max by (run, pod) (slipstream_rollout_weight_version{{{RUN}}})", "{{pod}}"),
            ],
        ),
        Row("Rollouts and members"),
        Panel(
            "Generation pause",
            "Time without tokens per weight update, and total time to adopt one.",
            quantiles("slipstream_rollout_adopt_stall_seconds", (0.95,), legend="pause")
            + quantiles("slipstream_rollout_adopt_seconds", (0.95,), legend="adoption"),
            unit="s",
        ),
        Panel(
            "Attempts",
            "Published versions, and failed attempts by reason; a version that keeps failing stops the run.",
            total("slipstream_weight_syncs_total", "run, outcome"),
        ),
        Panel(
            "Members",
            "Trainer ranks and rollouts in the weight group; a lost member lowers the number.",
            newest("slipstream_weight_sync_group_size"),
        ),
    ],
)

FLEET = Dashboard(
    uid="slipstream-fleet",
    title="Slipstream / Fleet and data plane",
    content=[
        Row("Runs and workers"),
        Panel(
            "Runs by state",
            "All active and recently ended runs.",
            [("sum by (state) (slipstream_runs)", "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Workers",
            "Registered workers by role and state.",
            total("slipstream_run_workers", "role, state"),
            is_stacked=True,
        ),
        Row("Rollouts"),
        Panel(
            "Samples in the engines",
            "Samples that engines decode, and samples that wait for a slot.",
            [
                (f"sum(slipstream_rollout_running_samples{{{RUN}}})", "running"),
                (f"sum(slipstream_rollout_waiting_samples{{{RUN}}})", "waiting"),
            ],
        ),
        Panel(
            "KV cache in use",
            "Fullest engine of each run.",
            newest("slipstream_rollout_kv_used_ratio"),
            unit="percentunit",
        ),
        Panel(
            "Reward time",
            "Time of one reward, including waits.",
            quantiles("slipstream_rollout_reward_seconds", (0.95,)),
            unit="s",
        ),
        Row("Transferqueue"),
        Panel(
            "Transferqueue traffic",
            "Bytes of samples in and out.",
            rate("slipstream_tq_bytes_total", "direction", matcher=""),
            unit="Bps",
        ),
        Panel(
            "Transferqueue latency",
            "99th percentile by operation.",
            quantiles("slipstream_tq_op_duration_seconds", (0.99,), by="op", matcher=""),
            unit="s",
        ),
        Panel(
            "Transferqueue shards",
            "Shards that report to the index. The samples of a lost shard are generated again.",
            [("max(slipstream_tq_shards)", "shards")],
        ),
        Panel(
            "Transferqueue usage",
            "Fraction of each shard's memory in use. Producers wait for a full shard.",
            [("slipstream_tq_stored_bytes / slipstream_tq_capacity_bytes", "{{pod}}")],
            unit="percentunit",
        ),
        Row("Shared servers"),
        Panel(
            "Tokens by run",
            "Tokens per second of each run on the vLLM servers that runs with adapters share.",
            rate("slipstream_fleet_run_tokens_total", "run", matcher=""),
        ),
        Panel(
            "Requests by run",
            "Requests of each run that its servers decode, or keep waiting for a slot.",
            [("sum by (run, state) (slipstream_fleet_run_requests)", "{{run}} {{state}}")],
        ),
        Panel(
            "Tokens against shares",
            "Part of each run in the tokens of these servers, and its part by the weights of the runs.",
            [
                (
                    f"sum by (run) ({_FLEET_TOKENS}) / scalar(sum({_FLEET_TOKENS}))",
                    "{{run}}",
                ),
                (
                    f"avg by (run) ({_FLEET_SHARE}) / scalar(sum(avg by (run) ({_FLEET_SHARE})))",
                    "{{run}} by weight",
                ),
            ],
            unit="percentunit",
        ),
        Row("Controller"),
        Panel(
            "Dispatch latency",
            "Time from the eligibility of a group until a rollout accepts it.",
            quantiles("slipstream_dispatch_duration_seconds", (0.5, 0.99)),
            unit="s",
        ),
        Panel(
            "API responses",
            "REST responses per second by code; 5xx are faults of the controller or its dependencies.",
            rate("slipstream_http_request_duration_seconds_count", "code", matcher=""),
            unit="reqps",
        ),
        Panel(
            "API latency",
            "95th percentile of the time to the first byte, by route.",
            quantiles("slipstream_http_request_duration_seconds", (0.95,), by="route", matcher=""),
            unit="s",
        ),
        Panel(
            "Control messages",
            "95th percentile of the size of gRPC messages by method; tensors do not use gRPC.",
            quantiles("slipstream_grpc_message_bytes", (0.95,), by="method", matcher=""),
            unit="bytes",
        ),
    ],
)
