"""The four dashboards."""

from deploy.observability.panels import Dashboard, Panel
from deploy.observability.queries import (
    RATE,
    RUN,
    each,
    mean,
    mean_seconds,
    newest,
    quantiles,
    rate,
    share,
    total,
)

_SYNC = "slipstream_weight_sync_duration_seconds"
_TOTAL = f'{RUN},phase="total"'

OVERVIEW = Dashboard(
    uid="slipstream-run",
    title="Slipstream / Run overview",
    panels=[
        Panel(
            "State",
            "The state that each run is in.",
            [(f"max by (run, state) (slipstream_run_state{{{RUN}}} == 1)", "{{run}} {{state}}")],
            kind="stat",
            width=8,
        ),
        Panel(
            "Progress",
            "Finished part of the steps.",
            share("slipstream_run_step", "slipstream_run_target_steps"),
            unit="percentunit",
            kind="gauge",
            width=8,
        ),
        Panel(
            "Since the last step",
            "Time since a step was finished; a run that works keeps it near its step time.",
            [
                (
                    f"time() - max by (run) (slipstream_run_last_progress_timestamp_seconds{{{RUN}}})",
                    "{{run}}",
                )
            ],
            unit="s",
            kind="stat",
            width=8,
        ),
        Panel(
            "Reward",
            "Mean task reward of trained samples, and its spread inside a batch.",
            each(mean="slipstream_train_reward_mean", deviation="slipstream_train_reward_std"),
        ),
        Panel(
            "Held-out score",
            "Newest evaluation on held-out prompts.",
            newest("slipstream_run_heldout_score", "decoding"),
        ),
        Panel(
            "Divergence between policies",
            "Trainer against rollout: grows with staleness and with differing kernels. Against the "
            "reference: how far the policy moved.",
            newest("slipstream_train_kl_divergence_nats", "pair"),
        ),
        Panel(
            "Entropy",
            "Mean entropy of the policy in nats; a collapse ends exploration.",
            newest("slipstream_train_entropy_nats"),
        ),
        Panel(
            "Off-policy correction",
            "Effective sample size, and the part of tokens whose ratio or importance weight hit its cap.",
            each(
                effective_samples="slipstream_train_ess_ratio",
                ratio_clipped="slipstream_train_clip_ratio",
                weight_capped="slipstream_train_is_clipped_ratio",
            ),
            unit="percentunit",
        ),
        Panel(
            "Gradient norm",
            "Global norm before clipping.",
            newest("slipstream_train_grad_norm"),
        ),
        Panel(
            "Trained tokens",
            "Tokens per second that enter a step, by kind.",
            rate("slipstream_trainer_tokens_total", "kind"),
            unit="cps",
            is_stacked=True,
        ),
        Panel(
            "Step time by phase",
            "Where the trainer's time goes.",
            mean_seconds("slipstream_trainer_step_duration_seconds"),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "What the trainer waits for",
            "Part of its time without work. Mostly `no_data`: the rollouts are the bottleneck. Mostly none: "
            "the trainer is. On a GPU also its model FLOPs utilization.",
            rate("slipstream_trainer_idle_seconds_total", "reason")
            + each(FLOPs_utilization="slipstream_trainer_mfu_ratio"),
            unit="percentunit",
        ),
        Panel(
            "Memory",
            "Of each process, and the peak of the trainer's GPU.",
            [
                (f"max by (pod) (process_resident_memory_bytes{{{RUN}}})", "{{pod}}"),
                *each(GPU_peak="slipstream_trainer_gpu_memory_bytes"),
            ],
            unit="bytes",
        ),
        Panel(
            "Checkpoints",
            "Saved and failed ones, and the steps that a loss of the trainer would cost now.",
            [
                *total("slipstream_checkpoints_total", "run, outcome"),
                (
                    f"max by (run) (slipstream_run_step{{{RUN}}}) - "
                    f"max by (run) (slipstream_checkpoint_last_success_step{{{RUN}}})",
                    "{{run}} steps at risk",
                ),
            ],
        ),
        Panel(
            "Checkpoint time by phase",
            "Training waits for the snapshot only.",
            mean_seconds("slipstream_checkpoint_duration_seconds"),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "Room for checkpoints",
            "What the volume takes yet, as it was behind the newest checkpoint, and what one takes.",
            each(
                free="slipstream_checkpoint_volume_free_bytes",
                checkpoint="slipstream_checkpoint_size_bytes",
            ),
            unit="bytes",
        ),
    ],
)

STALENESS = Dashboard(
    uid="slipstream-staleness",
    title="Slipstream / Staleness and data flow",
    panels=[
        Panel(
            "Staleness of trained samples",
            "Weight versions between sampling and training, against the bound.",
            newest("slipstream_run_staleness_versions", "stat")
            + each(bound="slipstream_staleness_limit_versions"),
        ),
        Panel(
            "Bound violations",
            "Samples trained beyond the bound. Anything but 0 is a defect.",
            total("slipstream_staleness_violations_total", "run"),
            kind="stat",
        ),
        Panel(
            "Groups by state",
            "Where every issued prompt is; the ledger accounts for all of them.",
            total("slipstream_prompts", "state"),
            is_stacked=True,
        ),
        Panel(
            "Finished groups, in batches",
            "Batches that wait for the trainer: 0 starves it, more than the bound goes stale.",
            [
                (
                    f'sum by (run) (slipstream_prompts{{{RUN},state="ready"}}) / '
                    f"max by (run) (slipstream_run_batch_prompts{{{RUN}}})",
                    "{{run}}",
                )
            ],
        ),
        Panel(
            "Groups by outcome",
            "Groups per second that rollouts published, or why not.",
            rate("slipstream_rollout_groups_total", "outcome"),
            unit="cps",
        ),
        Panel(
            "Weight versions in one response",
            "Mean number of versions that a response was sampled under; above 1 with partial rollouts.",
            mean("slipstream_rollout_segments", "versions"),
        ),
        Panel(
            "Response length",
            "Tokens of finished responses. Growing length slows everything and raises staleness.",
            quantiles("slipstream_rollout_response_tokens", (0.5, 0.95, 0.99)),
        ),
        Panel(
            "How responses end",
            "A growing part that ends by length is truncated.",
            rate("slipstream_rollout_samples_total", "finish_reason"),
            unit="cps",
            is_stacked=True,
        ),
    ],
)

WEIGHT_SYNC = Dashboard(
    uid="slipstream-weight-sync",
    title="Slipstream / Weight sync",
    panels=[
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
            "Part of all syncs.",
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
            "The trainer's version, and what each rollout serves.",
            [
                *each(trainer="slipstream_trainer_weight_version"),
                (f"max by (run, pod) (slipstream_rollout_weight_version{{{RUN}}})", "{{pod}}"),
            ],
        ),
        Panel(
            "Pause of generation",
            "Time without tokens per weight update, and the whole time to adopt one.",
            quantiles("slipstream_rollout_adopt_stall_seconds", (0.95,), legend="pause")
            + quantiles("slipstream_rollout_adopt_seconds", (0.95,), legend="adoption"),
            unit="s",
        ),
        Panel(
            "Tries",
            "Published versions, and tries that failed, by reason; one that goes on failing stops the run.",
            total("slipstream_weight_syncs_total", "run, outcome"),
        ),
        Panel(
            "Members",
            "Trainer ranks and rollouts that take part; it falls when one is lost.",
            newest("slipstream_weight_sync_group_size"),
        ),
    ],
)

FLEET = Dashboard(
    uid="slipstream-fleet",
    title="Slipstream / Fleet and data plane",
    panels=[
        Panel(
            "Runs by state",
            "All runs that are active or ended lately.",
            [("sum by (state) (slipstream_runs)", "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            "Workers",
            "Registered workers by role and state.",
            total("slipstream_run_workers", "role, state"),
            is_stacked=True,
        ),
        Panel(
            "Samples in the engines",
            "Decoded now, and waiting for room.",
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
            "Time of one reward, waiting included.",
            quantiles("slipstream_rollout_reward_seconds", (0.95,)),
            unit="s",
        ),
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
            "Shards that the index hears of. When one is lost, its samples are generated again.",
            [("max(slipstream_tq_shards)", "shards")],
        ),
        Panel(
            "Transferqueue fill",
            "Part of each shard's memory in use. Full makes producers wait.",
            [("slipstream_tq_stored_bytes / slipstream_tq_capacity_bytes", "{{pod}}")],
            unit="percentunit",
        ),
        Panel(
            "Hand-out",
            "From the moment a group may start to its rollout having taken it.",
            quantiles("slipstream_dispatch_duration_seconds", (0.5, 0.99)),
            unit="s",
        ),
        Panel(
            "API answers",
            "Answers of the REST API per second, by code; 5xx are its faults or those of what it asks.",
            rate("slipstream_http_request_duration_seconds_count", "code", matcher=""),
            unit="reqps",
        ),
        Panel(
            "API latency",
            "95th percentile by route of the time until an answer begins.",
            quantiles("slipstream_http_request_duration_seconds", (0.95,), by="route", matcher=""),
            unit="s",
        ),
        Panel(
            "Control messages",
            "95th percentile of the size of gRPC messages by method; tensors travel elsewhere.",
            quantiles("slipstream_grpc_message_bytes", (0.95,), by="method", matcher=""),
            unit="bytes",
        ),
    ],
)

ALL = (OVERVIEW, STALENESS, WEIGHT_SYNC, FLEET)
