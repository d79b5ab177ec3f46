"""Prometheus alerts.

``@name@`` is replaced by a value of the chart's ``monitoring.prometheusRule``, and ``@shards@`` by
``transferqueue.shards``.
"""
# ruff: noqa: E501  expressions stay on one line, as people paste them

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert."""

    name: str
    expression: str
    lasts: str
    severity: Literal["page", "ticket"]
    summary: str
    meaning: str
    """The fault and its effect."""
    actions: tuple[str, ...]
    """Diagnostic steps and remedies, in order."""

    def to_json(self) -> dict[str, Any]:
        """Returns the alert as a Prometheus rule."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": f"@runbookBase@/{self.name}.md",
            },
        }


_IS_RUNNING = 'and on (run) max by (run) (slipstream_run_state{state="RUNNING"}) == 1'

ALL = (
    Alert(
        name="SlipstreamRunStalled",
        expression="(time() - max by (run) (slipstream_run_last_progress_timestamp_seconds) > @stallSeconds@) "
        + _IS_RUNNING,
        lasts="1m",
        severity="page",
        summary="Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}",
        meaning="The run is RUNNING, but its trainer has finished no step for longer than `monitoring.prometheusRule.stallSeconds`. The condition does not depend on work in flight, so it also detects a deadlock.",
        actions=(
            "Open the run page: the table of workers shows the work and the waits of each.",
            "If there are no finished groups: check the rollouts (`slipstream_rollout_groups_total` by outcome, reward failures) and the fill of the transferqueue.",
            "If there are finished groups but no step: read the trainer's log. A step that takes longer than the threshold needs a higher threshold.",
            "If a worker hangs, cancel the run: `slipstream cancel RUN`.",
        ),
    ),
    Alert(
        name="SlipstreamRunMakesNoProgress",
        expression='max by (run, reason) (slipstream_run_condition{type="Progressing",status="False"}) == 1 '
        + _IS_RUNNING,
        lasts="2m",
        severity="ticket",
        summary="Run {{ $labels.run }} trains no step: {{ $labels.reason }}",
        meaning="The run is RUNNING and has trained no step for at least a minute and three times its longest recent step. The condition `Progressing` and the events `NoProgress` name the cause.",
        actions=(
            "`slipstream get RUN` or the run page: the condition `Progressing` gives the reason, with the numbers of finished, running, dropped and quarantined groups.",
            "`WaitsForGroups`, `WaitsForOldest`: the rollouts are slow, or nearly all groups are dropped or quarantined; the message counts those by reason.",
            "`NoGroupRuns`: no rollout accepts groups; check their logs and the newest weight sync.",
            "`WaitsForWeights`, `WaitsForCheckpoint`: check the dashboard Weight sync and the volume of checkpoints. `WaitsForGpus`: an evaluation runs, or rollouts finish responses before the trainer gets their GPUs. `StepIsLong`: read the trainer's log.",
        ),
    ),
    Alert(
        name="SlipstreamRunStuckStarting",
        expression='max by (run) (slipstream_run_state{state="STARTING"}) == 1',
        lasts="30m",
        severity="ticket",
        summary="Run {{ $labels.run }} has been starting for half an hour",
        meaning="The run's workers were started, but not all are ready.",
        actions=(
            "Read the run's events of type `WorkerPending`: they contain Kubernetes' message, such as `Insufficient nvidia.com/gpu` or `ImagePullBackOff`.",
            "`kubectl get pods -A -l slipstream.dev/run=RUN`, then `kubectl describe pod` for pods that do not run.",
            "If all pods run, read their logs: a model is downloaded when it is first used.",
        ),
    ),
    Alert(
        name="SlipstreamRunRecovering",
        expression='max by (run) (slipstream_run_state{state="RECOVERING"}) == 1',
        lasts="10m",
        severity="ticket",
        summary="Run {{ $labels.run }} has been recovering for ten minutes",
        meaning="The run lost its trainer or all rollouts and continues after their replacements have loaded, which normally takes minutes.",
        actions=(
            "Read the events `WorkerLost` and `WorkerPending` of the run: they name the lost worker, the cause, and the obstacle to its replacement.",
            "`kubectl get pods -A -l slipstream.dev/run=RUN`: a Pending pod waits for a GPU or an image; `kubectl describe pod` names it. Free GPUs or add a node.",
            "If a worker is lost repeatedly, its last lines are in the event. After OOMKilled raise the memory limit or lower `trainer.tokens_per_micro_batch`.",
        ),
    ),
    Alert(
        name="SlipstreamRunFailed",
        expression='max by (run) (slipstream_run_state{state="FAILED"}) == 1',
        lasts="0m",
        severity="ticket",
        summary="Run {{ $labels.run }} failed",
        meaning="A run ended in FAILED within the last 15 minutes.",
        actions=(
            "Read its `state_reason` and `message`: the message contains the first cause of the failure and names the worker's log.",
            "`WorkerLost` with OOMKilled: raise the memory limit, or lower `trainer.tokens_per_micro_batch` or `rollout.max_running_samples`.",
            "Correct the cause and submit the run again.",
        ),
    ),
    Alert(
        name="SlipstreamStalenessViolated",
        expression="max by (run) (slipstream_staleness_violations_total) > 0",
        lasts="0m",
        severity="page",
        summary="Run {{ $labels.run }} trained tokens over its staleness bound",
        meaning="A step trained tokens older than `algorithm.max_staleness`. Ledger, batches and the loss mask exclude this, so it is a defect of Slipstream: the run fails with `StalenessError`, and its result is not trustworthy.",
        actions=(
            "Keep the run's database and logs, and report the defect.",
            "The run's message names the step; earlier steps and checkpoints are valid.",
        ),
    ),
    Alert(
        name="SlipstreamWeightSyncSlow",
        expression="histogram_quantile(0.95, sum by (le, run) "
        '(rate(slipstream_weight_sync_duration_seconds_bucket{phase="total"}[30m]))) > @weightSyncSeconds@',
        lasts="15m",
        severity="ticket",
        summary="Weight sync of run {{ $labels.run }} takes {{ $value | humanizeDuration }} (p95)",
        meaning="Publishing new weights takes longer than `monitoring.prometheusRule.weightSyncSeconds`, which delays generation under new weights.",
        actions=(
            "Find the phase that grew on the dashboard Weight sync: prepare, transfer or adopt.",
            "Transfer: check that NCCL uses the intended network (`NCCL_DEBUG=INFO` in `workers.env`); the usual cause is sockets instead of RDMA or NVLink.",
            "Adopt: rollouts finish running responses first unless `rollout.partial_rollout` is on.",
        ),
    ),
    Alert(
        name="SlipstreamWeightSyncFailing",
        expression='sum by (run) (increase(slipstream_weight_syncs_total{outcome!="ok"}[15m])) >= 3',
        lasts="0m",
        severity="page",
        summary="Weight sync of run {{ $labels.run }} failed {{ $value }} times in 15 minutes",
        meaning="Versions reach the rollouts only after several attempts, or never. After each failure the controller forms the group again and replaces rollouts that did not answer.",
        actions=(
            "The panel Attempts of the dashboard Weight sync shows the reason: `DEADLINE_EXCEEDED` means a slow or interrupted network, `DATA_LOSS` damaged bytes, `UNAVAILABLE` a lost member.",
            "Read the controller's log for `weight sync failed`: `why` names the member. Check its node: `dmesg` for Xid errors, `ibstat` for the link.",
            "For deadlines on a busy network, raise `weight_sync.transfer_timeout_s` of the next run. If damaged bytes come from one node, drain it.",
        ),
    ),
    Alert(
        name="SlipstreamVersionLag",
        expression="(max by (run) (slipstream_trainer_weight_version) - min by (run) (slipstream_rollout_weight_version)) "
        "> on (run) (1 + max by (run) (slipstream_staleness_limit_versions))",
        lasts="10m",
        severity="ticket",
        summary="A rollout of run {{ $labels.run }} is {{ $value }} versions behind its trainer",
        meaning="A rollout serves weights so old that its samples will be stale when they are finished.",
        actions=(
            "Find the pod on the panel Versions of the dashboard Weight sync.",
            "`kubectl logs POD`: `weight sync failed` or a refused canary gives the reason.",
            "If it does not answer: `kubectl delete pod POD`. The others continue, and the controller starts a replacement.",
        ),
    ),
    Alert(
        name="SlipstreamPolicyMismatch",
        expression='max by (run) (slipstream_train_kl_divergence_nats{pair="policy_rollout"}) > 0.05 '
        + _IS_RUNNING,
        lasts="10m",
        severity="ticket",
        summary="Rollouts of run {{ $labels.run }} sample from another policy: {{ $value | humanize }} nats per token",
        meaning="The policy that samples diverges from the one that trains: rollouts are quantized, samples are stale, or engine and trainer compute differently. Learning suffers above about 0.1 nats per token.",
        actions=(
            "Open the run page, Off-policy: a divergence that grows with the staleness comes from stale samples. Lower `algorithm.max_staleness` or the learning rate.",
            "If the freshest tokens diverge and `rollout.quantization` or `kv_cache_dtype` is set: take `fp8_block`, or none. The run does the latter by itself at `rollout.max_mismatch`, with the event `QuantizationEnded`.",
            "If the freshest tokens of rollouts in the trainer's precision diverge: compare `slipstream_weight_sync_canary_difference_nats` of the rollouts, and set `trainer.dtype: float16`.",
            "With `algorithm.correction: bypass`, try `decoupled`, which weights such tokens.",
        ),
    ),
    Alert(
        name="SlipstreamTrainerStarved",
        expression='max by (run) (rate(slipstream_trainer_idle_seconds_total{reason="no_data"}[15m])) > 0.5',
        lasts="30m",
        severity="ticket",
        summary="The trainer of run {{ $labels.run }} waits for samples {{ $value | humanizePercentage }} of its time",
        meaning="Rollouts produce samples at less than half the rate that the trainer could process, so its GPUs are idle.",
        actions=(
            'Add rollouts during the run: `PATCH /v1/runs/RUN` with `{"rollout_replicas": N}`.',
            "If `slipstream_rollout_reward_seconds` is as long as a response, raise `rollout.reward_concurrency` or scale the reward service.",
            "If `slipstream_rollout_waiting_samples` is 0 and rollouts are idle, the staleness bound limits them: raise `algorithm.max_staleness` with a suitable correction.",
        ),
    ),
    Alert(
        name="SlipstreamCheckpointFailed",
        expression='sum by (run) (increase(slipstream_checkpoints_total{outcome="failed"}[15m])) > 0',
        lasts="0m",
        severity="page",
        summary="A checkpoint of run {{ $labels.run }} could not be saved",
        meaning="Training continues, but after a loss of its trainer the run would return to the previous checkpoint.",
        actions=(
            "Read the trainer's log: `No space left on device` is the usual cause. `kubectl exec` into the trainer and run `df -h /var/lib/slipstream`.",
            "Free space: enlarge the claim of `workers.checkpoints`, delete ended runs with their checkpoints, or lower `trainer.checkpoint.keep`.",
            "Then save a checkpoint: `POST /v1/runs/RUN/checkpoint`.",
        ),
    ),
    Alert(
        name="SlipstreamCheckpointVolumeFull",
        expression="min by (run) (slipstream_checkpoint_volume_free_bytes) "
        "< @checkpointReserve@ * max by (run) (slipstream_checkpoint_size_bytes)",
        lasts="0m",
        severity="page",
        summary="The next checkpoints of run {{ $labels.run }} will not fit: {{ $value | humanize1024 }}B are free",
        meaning="After the newest checkpoint, the volume had space for fewer than `monitoring.prometheusRule.checkpointReserve` further ones. An older checkpoint is deleted only after a new one is complete, so the next one may fail.",
        actions=(
            "Enlarge the claim of `workers.checkpoints`, or delete ended runs with their checkpoints: `DELETE /v1/runs/RUN?delete_checkpoints=true`.",
            "Lower `trainer.checkpoint.keep` of the next run.",
            "If other runs fill the volume, find them: `kubectl exec` into the trainer and run `du -sh /var/lib/slipstream/*`.",
        ),
    ),
    Alert(
        name="SlipstreamCheckpointUploadFailing",
        expression="max by (run) (slipstream_checkpoint_upload_failing_seconds) > 300",
        lasts="0m",
        severity="page",
        summary="Run {{ $labels.run }} cannot upload its checkpoints for {{ $value | humanizeDuration }}",
        meaning="Training continues, and checkpoints stay on the trainer's host; if that host is lost, the run returns to the newest checkpoint in the object store.",
        actions=(
            "Read the cause in the event `CheckpointUploadFailing`: `slipstream events RUN`.",
            "Check the store, its quota, the route to it (`networkPolicy.egress.workersTo`) and the credentials of the workers ([object storage](../object-storage.md#credentials)).",
            "Do not delete the trainer's pod meanwhile, unless a claim holds its folder. Uploads continue by themselves.",
        ),
    ),
    Alert(
        name="SlipstreamSampleUploadFailing",
        expression="max by (run) (slipstream_sample_upload_failing_seconds) > 300",
        lasts="0m",
        severity="ticket",
        summary="Samples of run {{ $labels.run }} cannot be uploaded for {{ $value | humanizeDuration }}",
        meaning="Training continues, and samples stay in their file on the transferqueue's disk; those that the file deletes at `samples.max_bytes`, or loses with that disk, are missing in the object store.",
        actions=(
            "Read the cause in the event `SampleUploadFailing`: `slipstream events RUN`.",
            "Check the store, its quota, the route to it (`networkPolicy.egress.transferqueueTo`) and the credentials of the transferqueue ([object storage](../object-storage.md#credentials)).",
            "Uploads continue by themselves. `slipstream samples RUN --export samples.jsonl` writes a copy meanwhile.",
        ),
    ),
    Alert(
        name="SlipstreamNonFiniteStep",
        expression="sum by (run) (increase(slipstream_trainer_nonfinite_total[10m])) > 0",
        lasts="0m",
        severity="page",
        summary="Run {{ $labels.run }} had non-finite numbers",
        meaning="Losses, gradients or logprobs of the run were NaN or infinite. Such steps leave the weights unchanged. Overflows of float16, which lower the loss scale, do not count.",
        actions=(
            "A single event is harmless. If it repeats, cancel the run.",
            "Lower the learning rate, or train in float32; check the gradient norm and the divergence before the event.",
        ),
    ),
    Alert(
        name="SlipstreamRewardFailures",
        expression="sum by (run, kind) (rate(slipstream_rollout_reward_failures_total[15m])) > 0.1",
        lasts="15m",
        severity="ticket",
        summary="Rewards of run {{ $labels.run }} fail: {{ $labels.kind }}",
        meaning="More than one reward per ten seconds fails. Such samples are generated again or masked, never scored 0.",
        actions=(
            "`timeout`: raise `timeout_s` of the reward or `rollout.reward_concurrency`.",
            "`exception` and `invalid_value`: the reward's code is wrong for some responses; the rollout's log contains the error.",
        ),
    ),
    Alert(
        name="SlipstreamQueueNearFull",
        expression="max by (pod) (slipstream_tq_stored_bytes / slipstream_tq_capacity_bytes) > @queueFillRatio@",
        lasts="5m",
        severity="page",
        summary="Transferqueue shard {{ $labels.pod }} is {{ $value | humanizePercentage }} full",
        meaning="Finished samples wait too long, or the memory is too small. When it is full, rollouts wait.",
        actions=(
            "If finished groups accumulate on the dashboard Staleness and data flow, the trainer is the bottleneck, and the wait is correct.",
            "Otherwise raise `transferqueue.capacityMiB` or `transferqueue.shards`.",
        ),
    ),
    Alert(
        name="SlipstreamQueueShardDown",
        expression="(max(slipstream_tq_shards) or vector(0)) < @shards@",
        lasts="2m",
        severity="page",
        summary="The transferqueue has {{ $value }} of its shards",
        meaning="Samples of a lost shard are generated again, and the other shards have less capacity than planned. The value 0 means that the index is down or not scraped; runs wait for it.",
        actions=(
            "`kubectl get pods -A -l app.kubernetes.io/name=slipstream`: a Pending shard waits for a node with enough memory; for CrashLoopBackOff read `kubectl logs --previous POD`.",
            "OOMKilled: raise `transferqueue.overheadMiB`; very many small samples need more memory in addition to `transferqueue.capacityMiB`.",
            "If all are Ready, the index has no contact with one. Its log names refused shards; the usual cause is a service key or certificate of another installation.",
        ),
    ),
    Alert(
        name="SlipstreamMessagesRefused",
        expression="sum by (channel, reason) (increase(slipstream_rejected_messages_total[10m])) > 0",
        lasts="0m",
        severity="page",
        summary="The data plane refused messages: {{ $labels.reason }}",
        meaning="A message on the data plane was malformed, or came from a process that was not admitted.",
        actions=(
            "`malformed`: processes of different releases communicate; use images of one release.",
            "`unauthenticated`: another process in the cluster connects to the port; check the network policies.",
            "`foreign`: a worker requested samples of another run; check the code of its rewards and data.",
        ),
    ),
    Alert(
        name="SlipstreamCallersRefused",
        expression="sum by (reason) (rate(slipstream_auth_failures_total[5m])) > 0.2",
        lasts="10m",
        severity="ticket",
        summary="Callers are refused repeatedly: {{ $labels.reason }}",
        meaning="For ten minutes, unauthorized calls have reached the API or the services' gRPC ports.",
        actions=(
            "`unauthenticated`: a token has expired or was revoked, a service has another `serviceKey`, or a caller guesses tokens; the metric's pods show where.",
            "`permission_denied`: a worker requests another run's data. That is a defect or an attack by the code of a run: check that run's rewards and data.",
        ),
    ),
    Alert(
        name="SlipstreamApiErrors",
        expression='sum(rate(slipstream_http_request_duration_seconds_count{code=~"5.."}[5m])) '
        "/ sum(rate(slipstream_http_request_duration_seconds_count[5m])) > 0.02",
        lasts="10m",
        severity="page",
        summary="{{ $value | humanizePercentage }} of the API's responses are errors",
        meaning="The REST API has returned 5xx responses for ten minutes.",
        actions=(
            "The panel API responses of the dashboard Fleet and data plane shows route and code.",
            "500: a defect of the controller, whose log contains the traceback. Report it.",
            "503 and 504: a dependency of the controller does not answer: the transferqueue (check its pods and alerts), or PostgreSQL, which is down or full.",
        ),
    ),
    Alert(
        name="SlipstreamControllerDown",
        expression="absent(slipstream_runs)",
        lasts="5m",
        severity="page",
        summary="No controller is scraped",
        meaning="Prometheus has no metrics of a controller: it is down or not scraped. Active runs continue for a while; no new run starts.",
        actions=(
            "`kubectl get pods -A -l app.kubernetes.io/component=controller`. Pending: `kubectl describe pod` names the missing resource, most often the node or zone of its claim.",
            "CrashLoopBackOff: `kubectl logs --previous deploy/RELEASE-controller`. A full database needs a larger claim; a schema of a newer release needs that release's image; otherwise check that PostgreSQL answers.",
            "If it is Ready, Prometheus does not reach it: check `monitoring.podMonitor.labels` against your Prometheus' selector, and `networkPolicy.metricsFrom`.",
        ),
    ),
)


def rules() -> dict[str, Any]:
    """Returns all alerts as one rule group."""
    return {"groups": [{"name": "slipstream", "rules": [alert.to_json() for alert in ALL]}]}
