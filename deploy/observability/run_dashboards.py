"""Dashboards on the learning of runs and on the samples that they train."""

from deploy.observability.panels import Dashboard, Panel, Row
from deploy.observability.queries import (
    RATE,
    RUN,
    buckets,
    each,
    mean,
    mean_seconds,
    newest,
    quantiles,
    rate,
    share,
    total,
)

OVERVIEW = Dashboard(
    uid="slipstream-run",
    title="Slipstream / Run overview",
    content=[
        Row("Now"),
        Panel(
            "State",
            "State of each run.",
            [(f"max by (run, state) (slipstream_run_state{{{RUN}}} == 1)", "{{run}} {{state}}")],
            kind="stat",
            width=8,
        ),
        Panel(
            "Progress",
            "Fraction of the steps that are finished.",
            share("slipstream_run_step", "slipstream_run_target_steps"),
            unit="percentunit",
            kind="gauge",
            width=8,
        ),
        Panel(
            "Time since the last step",
            "A healthy run keeps it near its step time.",
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
        Row("Learning"),
        Panel(
            "Reward",
            "Mean task reward of trained samples, and its standard deviation inside a batch.",
            each(mean="slipstream_train_reward_mean", deviation="slipstream_train_reward_std"),
        ),
        Panel(
            "Held-out score",
            "Newest evaluation on held-out prompts.",
            newest("slipstream_run_heldout_score", "decoding"),
        ),
        Panel(
            "Divergence between policies",
            "Trainer against rollout: grows with staleness and with different kernels. Trainer against "
            "reference: distance that the policy has moved.",
            newest("slipstream_train_kl_divergence_nats", "pair"),
        ),
        Panel(
            "Entropy",
            "Mean entropy of the policy in nats; a collapse ends exploration.",
            newest("slipstream_train_entropy_nats"),
        ),
        Row("Optimization"),
        Panel(
            "Off-policy correction",
            "Effective sample size, and fractions of tokens whose ratio or importance weight is capped.",
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
            "Loss scale",
            "Factor of the loss in float16 training. An overflow halves it and skips the update.",
            newest("slipstream_trainer_loss_scale", "model"),
        ),
        Row("Speed"),
        Panel(
            "Trained tokens",
            "Tokens per second that enter a step, by kind.",
            rate("slipstream_trainer_tokens_total", "kind"),
            unit="cps",
            is_stacked=True,
        ),
        Panel(
            "Shared tokens",
            "Fraction of tokens that a step computes once for several samples, such as prompts of a group.",
            each(shared="slipstream_train_shared_token_ratio"),
            unit="percentunit",
        ),
        Panel(
            "Tokens by rank",
            "Tokens that a trainer rank computes in a step: if they differ, the other ranks wait for the one "
            "with the most.",
            newest("slipstream_train_rank_tokens", "stat"),
        ),
        Panel(
            "Balance over ranks",
            "Tokens of the most loaded rank relative to the mean, 1 if all are equal, and tokens of a "
            "micro-batch relative to `trainer.tokens_per_micro_batch`.",
            each(
                most_to_mean="slipstream_train_rank_tokens_ratio",
                fill_of_packs="slipstream_train_pack_fill_ratio",
            ),
        ),
        Panel(
            "Step time by phase",
            "Time of each phase of a step.",
            mean_seconds("slipstream_trainer_step_duration_seconds"),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "Trainer idle time",
            "Fraction of time without work, by reason. Mostly `no_data`: the rollouts are the bottleneck. "
            "Mostly none: the trainer is. On a GPU also the model FLOPs utilization.",
            rate("slipstream_trainer_idle_seconds_total", "reason")
            + each(FLOPs_utilization="slipstream_trainer_mfu_ratio"),
            unit="percentunit",
        ),
        Row("Memory and checkpoints"),
        Panel(
            "Memory",
            "Resident memory of each process, and peak memory of the trainer's GPU.",
            [
                (f"max by (pod) (process_resident_memory_bytes{{{RUN}}})", "{{pod}}"),
                *each(GPU_peak="slipstream_trainer_gpu_memory_bytes"),
            ],
            unit="bytes",
        ),
        Panel(
            "Checkpoints",
            "Saved and failed checkpoints, and the steps that a loss of the trainer would cost now.",
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
            "Uploads of checkpoints and samples",
            "Bytes of the checkpoint in upload to an object store, and the time since uploads fail.",
            [
                (
                    f"sum by (run, part) (slipstream_checkpoint_upload_bytes{{{RUN}}})",
                    "{{run}} {{part}}",
                ),
                *each(
                    failing_s="slipstream_checkpoint_upload_failing_seconds",
                    samples_failing_s="slipstream_sample_upload_failing_seconds",
                ),
            ],
        ),
        Panel(
            "Space for checkpoints",
            "Free space of the volume after the newest checkpoint, and the size of one checkpoint.",
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
    content=[
        Row("Staleness"),
        Panel(
            "Staleness of trained samples",
            "Weight versions between sampling and training, against the bound.",
            newest("slipstream_run_staleness_versions", "stat")
            + each(bound="slipstream_staleness_limit_versions"),
        ),
        Panel(
            "Staleness of samples",
            "Trained samples over time by staleness; a second band is a group that waited.",
            buckets("slipstream_sample_staleness_versions"),
            kind="heatmap",
        ),
        Panel(
            "Bound violations",
            "Steps that trained tokens over the bound. Any value but 0 is a defect.",
            total("slipstream_staleness_violations_total", "run"),
            kind="stat",
        ),
        Row("Groups"),
        Panel(
            "Groups by state",
            "State of every issued prompt in the ledger.",
            total("slipstream_prompts", "state"),
            is_stacked=True,
        ),
        Panel(
            "Finished groups, in batches",
            "Batches that wait for the trainer. 0: it is starved. More than the bound: groups get stale.",
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
            "Groups per second that rollouts published or dropped, by outcome.",
            rate("slipstream_rollout_groups_total", "outcome"),
            unit="cps",
        ),
        Row("Responses"),
        Panel(
            "Weight versions in one response",
            "Mean number of versions that a response was sampled under; above 1 with partial rollouts.",
            mean("slipstream_rollout_segments", "versions"),
        ),
        Panel(
            "Recomputed tokens",
            "Recomputed response tokens per sampled token. Rollouts recompute them after a weight update, "
            "unless `rollout.kv_policy` is `keep`, and when they resume a response.",
            [
                (
                    f"sum by (run) (rate(slipstream_rollout_recomputed_tokens{{{RUN}}}[{RATE}])) / "
                    f"sum by (run) (rate(slipstream_rollout_tokens{{{RUN}}}[{RATE}]))",
                    "{{run}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Response length",
            "Tokens of finished responses. Growing length slows the run and raises staleness.",
            quantiles("slipstream_rollout_response_tokens", (0.5, 0.95, 0.99)),
        ),
        Panel(
            "Response lengths",
            "Responses over time by length; a dark band at the top is truncated.",
            buckets("slipstream_rollout_response_tokens"),
            kind="heatmap",
        ),
        Panel(
            "Responses by finish reason",
            "A growing fraction of `length` means truncated responses.",
            rate("slipstream_rollout_samples_total", "finish_reason"),
            unit="cps",
            is_stacked=True,
        ),
    ],
)
