"""The four dashboards."""
# ruff: noqa: E501  expressions stay on one line, as people paste them

from deploy.observability.panels import Dashboard, Panel

_RUN = '{run=~"$run"}'
_RATE = "$__rate_interval"


def _phase_seconds(metric: str, phases: str) -> str:
    """Mean seconds per phase."""
    matcher = f'{{run=~"$run",{phases}}}'
    return (
        f"sum by (phase) (rate({metric}_sum{matcher}[{_RATE}])) / "
        f"sum by (phase) (rate({metric}_count{matcher}[{_RATE}]))"
    )


def _quantile(quantile: float, metric: str, matcher: str = _RUN, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket{matcher}[{_RATE}])))"


RUN = Dashboard(
    uid="slipstream-run",
    title="Slipstream / Run overview",
    panels=[
        Panel(
            title="State",
            meaning="The state that each run is in.",
            queries=[(f"max by (run, state) (slipstream_run_state{_RUN} == 1)", "{{run}} {{state}}")],
            kind="stat", width=8,
        ),
        Panel(
            title="Progress",
            meaning="Finished part of the steps.",
            queries=[(f"max by (run) (slipstream_run_step{_RUN}) / max by (run) (slipstream_run_target_steps{_RUN})",
                      "{{run}}")],
            unit="percentunit", kind="gauge", width=8,
        ),
        Panel(
            title="Since the last step",
            meaning="Time since a step was finished; a run that works keeps it near its step time.",
            queries=[(f"time() - max by (run) (slipstream_run_last_progress_timestamp_seconds{_RUN})", "{{run}}")],
            unit="s", kind="stat", width=8,
        ),
        Panel(
            title="Reward",
            meaning="Mean task reward of trained samples, and its spread inside a batch.",
            queries=[
                (f"max by (run) (slipstream_train_reward_mean{_RUN})", "{{run}} mean"),
                (f"max by (run) (slipstream_train_reward_std{_RUN})", "{{run}} deviation"),
            ],
        ),
        Panel(
            title="Held-out score",
            meaning="Newest evaluation on held-out prompts.",
            queries=[(f"max by (run, decoding) (slipstream_run_heldout_score{_RUN})", "{{run}} {{decoding}}")],
        ),
        Panel(
            title="Divergence between policies",
            meaning="Trainer against rollout: grows with staleness and with differing kernels. Against the reference: "
            "how far the policy moved.",
            queries=[(f"max by (run, pair) (slipstream_train_kl_divergence_nats{_RUN})", "{{run}} {{pair}}")],
        ),
        Panel(
            title="Entropy",
            meaning="Mean entropy of the policy in nats; a collapse ends exploration.",
            queries=[(f"max by (run) (slipstream_train_entropy_nats{_RUN})", "{{run}}")],
        ),
        Panel(
            title="Off-policy correction",
            meaning="Effective sample size, and the part of tokens whose ratio or importance weight hit its cap.",
            queries=[
                (f"max by (run) (slipstream_train_ess_ratio{_RUN})", "{{run}} effective samples"),
                (f"max by (run) (slipstream_train_clip_ratio{_RUN})", "{{run}} ratio clipped"),
                (f"max by (run) (slipstream_train_is_clipped_ratio{_RUN})", "{{run}} weight capped"),
            ],
            unit="percentunit",
        ),
        Panel(
            title="Gradient norm",
            meaning="Global norm before clipping.",
            queries=[(f"max by (run) (slipstream_train_grad_norm{_RUN})", "{{run}}")],
        ),
        Panel(
            title="Trained tokens",
            meaning="Tokens per second that enter a step, by kind.",
            queries=[(f"sum by (run, kind) (rate(slipstream_trainer_tokens_total{_RUN}[{_RATE}]))", "{{run}} {{kind}}")],
            unit="cps", is_stacked=True,
        ),
        Panel(
            title="Step time by phase",
            meaning="Where the trainer's time goes.",
            queries=[(_phase_seconds("slipstream_trainer_step_duration_seconds", 'phase!="total"'), "{{phase}}")],
            unit="s", is_stacked=True,
        ),
    ],
)  # fmt: skip

STALENESS = Dashboard(
    uid="slipstream-staleness",
    title="Slipstream / Staleness and data flow",
    panels=[
        Panel(
            title="Staleness of trained samples",
            meaning="Weight versions between sampling and training, against the bound.",
            queries=[
                (f"max by (run, stat) (slipstream_run_staleness_versions{_RUN})", "{{run}} {{stat}}"),
                (f"max by (run) (slipstream_staleness_limit_versions{_RUN})", "{{run}} bound"),
            ],
        ),
        Panel(
            title="Bound violations",
            meaning="Samples trained beyond the bound. Anything but 0 is a defect.",
            queries=[(f"sum by (run) (slipstream_staleness_violations_total{_RUN})", "{{run}}")],
            kind="stat",
        ),
        Panel(
            title="Groups by state",
            meaning="Where every issued prompt is; the ledger accounts for all of them.",
            queries=[(f"sum by (state) (slipstream_prompts{_RUN})", "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Finished groups, in batches",
            meaning="Batches that wait for the trainer: 0 starves it, more than the bound goes stale.",
            queries=[(f'sum by (run) (slipstream_prompts{{run=~"$run",state="ready"}}) / '
                      f"max by (run) (slipstream_run_batch_prompts{_RUN})", "{{run}}")],
        ),
        Panel(
            title="Groups by outcome",
            meaning="Groups per second that rollouts published, or why not.",
            queries=[(f"sum by (outcome) (rate(slipstream_rollout_groups_total{_RUN}[{_RATE}]))", "{{outcome}}")],
            unit="cps",
        ),
        Panel(
            title="Weight versions in one response",
            meaning="Mean number of versions that a response was sampled under; above 1 with partial rollouts.",
            queries=[(f"sum(rate(slipstream_rollout_segments_sum{_RUN}[{_RATE}])) / "
                      f"sum(rate(slipstream_rollout_segments_count{_RUN}[{_RATE}]))", "versions")],
        ),
        Panel(
            title="Response length",
            meaning="Tokens of finished responses. Growing length slows everything and raises staleness.",
            queries=[(_quantile(q, "slipstream_rollout_response_tokens"), f"p{100 * q:.0f}") for q in (0.5, 0.95, 0.99)],
        ),
        Panel(
            title="How responses end",
            meaning="A growing part that ends by length is truncated.",
            queries=[(f"sum by (finish_reason) (rate(slipstream_rollout_samples_total{_RUN}[{_RATE}]))",
                      "{{finish_reason}}")],
            unit="cps", is_stacked=True,
        ),
    ],
)  # fmt: skip

WEIGHT_SYNC = Dashboard(
    uid="slipstream-weight-sync",
    title="Slipstream / Weight sync",
    panels=[
        Panel(
            title="Sync latency",
            meaning="Time from a finished step until every rollout serves its weights.",
            queries=[(_quantile(q, "slipstream_weight_sync_duration_seconds", '{run=~"$run",phase="total"}', "run"),
                      f"{{{{run}}}} p{100 * q:.0f}") for q in (0.5, 0.95)],
            unit="s",
        ),
        Panel(
            title="Sync latency by phase",
            meaning="Mean time of each phase.",
            queries=[(_phase_seconds("slipstream_weight_sync_duration_seconds", 'phase!="total"'), "{{phase}}")],
            unit="s", is_stacked=True,
        ),
        Panel(
            title="Syncs under 300 ms",
            meaning="Part of all syncs.",
            queries=[('sum by (run) (slipstream_weight_sync_duration_seconds_bucket{run=~"$run",phase="total",le="0.3"})'
                      ' / sum by (run) (slipstream_weight_sync_duration_seconds_count{run=~"$run",phase="total"})',
                      "{{run}}")],
            unit="percentunit", kind="stat",
        ),
        Panel(
            title="Bandwidth",
            meaning="Bytes of weights per second of transfer, as one receiver sees it.",
            queries=[(f"sum by (run) (rate(slipstream_weight_sync_bytes_total{_RUN}[{_RATE}])) / "
                      f'sum by (run) (rate(slipstream_weight_sync_duration_seconds_sum{{run=~"$run",phase="transfer"}}'
                      f"[{_RATE}]))", "{{run}}")],
            unit="Bps",
        ),
        Panel(
            title="Versions",
            meaning="The trainer's version, and what each rollout serves.",
            queries=[
                (f"max by (run) (slipstream_trainer_weight_version{_RUN})", "{{run}} trainer"),
                (f"max by (run, pod) (slipstream_rollout_weight_version{_RUN})", "{{pod}}"),
            ],
        ),
        Panel(
            title="Pause of generation",
            meaning="Time without tokens per weight update, and the whole time to adopt one.",
            queries=[
                (_quantile(0.95, "slipstream_rollout_adopt_stall_seconds"), "pause p95"),
                (_quantile(0.95, "slipstream_rollout_adopt_seconds"), "adoption p95"),
            ],
            unit="s",
        ),
    ],
)  # fmt: skip

FLEET = Dashboard(
    uid="slipstream-fleet",
    title="Slipstream / Fleet and data plane",
    panels=[
        Panel(
            title="Runs by state",
            meaning="All runs that are active or ended lately.",
            queries=[("sum by (state) (slipstream_runs)", "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Workers",
            meaning="Registered workers by role and state.",
            queries=[(f"sum by (role, state) (slipstream_run_workers{_RUN})", "{{role}} {{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Samples in the engines",
            meaning="Decoded now, and waiting for room.",
            queries=[
                (f"sum(slipstream_rollout_running_samples{_RUN})", "running"),
                (f"sum(slipstream_rollout_waiting_samples{_RUN})", "waiting"),
            ],
        ),
        Panel(
            title="KV cache in use",
            meaning="Fullest engine of each run.",
            queries=[(f"max by (run) (slipstream_rollout_kv_used_ratio{_RUN})", "{{run}}")],
            unit="percentunit",
        ),
        Panel(
            title="Reward time",
            meaning="Time of one reward, waiting included.",
            queries=[(_quantile(0.95, "slipstream_rollout_reward_seconds"), "p95")],
            unit="s",
        ),
        Panel(
            title="Transferqueue traffic",
            meaning="Bytes of samples in and out.",
            queries=[(f"sum by (direction) (rate(slipstream_tq_bytes_total[{_RATE}]))", "{{direction}}")],
            unit="Bps",
        ),
        Panel(
            title="Transferqueue latency",
            meaning="99th percentile by operation.",
            queries=[(_quantile(0.99, "slipstream_tq_op_duration_seconds", "", "op"), "{{op}}")],
            unit="s",
        ),
        Panel(
            title="Transferqueue fill",
            meaning="Part of each shard's memory in use. Full makes producers wait.",
            queries=[("slipstream_tq_stored_bytes / slipstream_tq_capacity_bytes", "{{pod}}")],
            unit="percentunit",
        ),
        Panel(
            title="Control messages",
            meaning="95th percentile of the size of gRPC messages by method: control stays small, tensors go elsewhere.",
            queries=[(_quantile(0.95, "slipstream_grpc_message_bytes", "", "method"), "{{method}}")],
            unit="bytes", width=24,
        ),
    ],
)  # fmt: skip

ALL = (RUN, STALENESS, WEIGHT_SYNC, FLEET)
