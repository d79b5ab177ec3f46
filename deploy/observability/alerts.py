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
    """The fault, and whom it affects."""
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
        meaning="The run is RUNNING, but its trainer has finished no step for longer than `monitoring.prometheusRule.stallSeconds`. The condition does not depend on work in flight, so a run that waits for ever is seen as well.",
        actions=(
            "Open the run page: the table of workers says what each is doing, and who waits for whom.",
            "No finished groups: look at the rollouts (`slipstream_rollout_groups_total` by outcome, reward failures) and at the fill of the transferqueue.",
            "Finished groups, but no step: read the trainer's log; a step that is longer than the threshold needs a higher threshold.",
            "Cancel the run if its worker hangs: `slipstream cancel RUN`.",
        ),
    ),
    Alert(
        name="SlipstreamRunMakesNoProgress",
        expression='max by (run, reason) (slipstream_run_condition{type="Progressing",status="False"}) == 1 '
        + _IS_RUNNING,
        lasts="2m",
        severity="ticket",
        summary="Run {{ $labels.run }} trains no step: {{ $labels.reason }}",
        meaning="The run is RUNNING and no step was trained for a minute and three times as long as its longest step lately. The condition `Progressing` and the events `NoProgress` say what it waits for.",
        actions=(
            "`slipstream get RUN` or the run page: the condition `Progressing` has the reason in words, with the groups that are finished, running and given up.",
            "`WaitsForGroups`, `WaitsForOldest`: the rollouts are slow, or nearly all groups are given up; the message counts those by reason.",
            "`NoGroupRuns`: no rollout takes work; look at their logs and at the newest weight sync.",
            "`WaitsForWeights`, `WaitsForCheckpoint`: the dashboard Weight sync, the volume of checkpoints. `WaitsForGpus`: an evaluation, or rollouts that finish responses before the trainer gets their GPUs. `StepIsLong`: the trainer's log.",
        ),
    ),
    Alert(
        name="SlipstreamRunStuckStarting",
        expression='max by (run) (slipstream_run_state{state="STARTING"}) == 1',
        lasts="30m",
        severity="ticket",
        summary="Run {{ $labels.run }} has been starting for half an hour",
        meaning="Workers of the run were started, but not all of them are ready.",
        actions=(
            "Read the run's events of type `WorkerPending`: they carry the words of Kubernetes, such as `Insufficient nvidia.com/gpu` or `ImagePullBackOff`.",
            "`kubectl get pods -A -l slipstream.dev/run=RUN`, then `kubectl describe pod` for those that do not run.",
            "All pods run: read their logs; loading a large model for the first time downloads it.",
        ),
    ),
    Alert(
        name="SlipstreamRunRecovering",
        expression='max by (run) (slipstream_run_state{state="RECOVERING"}) == 1',
        lasts="10m",
        severity="ticket",
        summary="Run {{ $labels.run }} has waited ten minutes for what it lost",
        meaning="The run lost its trainer or all rollouts and goes on once their replacements have loaded. That takes minutes, not longer.",
        actions=(
            "Read the events `WorkerLost` and `WorkerPending` of the run: what was lost and why, and what keeps its replacement from starting.",
            "`kubectl get pods -A -l slipstream.dev/run=RUN`: a pod that is Pending waits for a GPU or an image; `kubectl describe pod` says which. Free or add the node.",
            "A worker that is lost again and again: its last lines are in the event. OOMKilled asks for a higher memory limit or fewer `trainer.tokens_per_micro_batch`.",
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
            "Read its `state_reason` and `message`: the message holds the last log lines of the worker that failed.",
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
        meaning="A step trained tokens older than `algorithm.max_staleness`. Ledger, batches and the loss mask exclude this, so it is a defect of Slipstream: the run fails with `StalenessError`, and its result is in doubt.",
        actions=(
            "Keep the run's database and logs, and report the defect.",
            "Read the step in the run's message; the steps and checkpoints before it stand.",
        ),
    ),
    Alert(
        name="SlipstreamWeightSyncSlow",
        expression="histogram_quantile(0.95, sum by (le, run) "
        '(rate(slipstream_weight_sync_duration_seconds_bucket{phase="total"}[30m]))) > @weightSyncSeconds@',
        lasts="15m",
        severity="ticket",
        summary="Weight sync of run {{ $labels.run }} takes {{ $value | humanizeDuration }} (p95)",
        meaning="Bringing new weights into service takes longer than `monitoring.prometheusRule.weightSyncSeconds`. Generation waits meanwhile.",
        actions=(
            "See which phase grew on the dashboard Weight sync: prepare, transfer or adopt.",
            "Transfer: check that NCCL uses the network you mean (`NCCL_DEBUG=INFO` in `workers.env`); sockets instead of RDMA or NVLink is the usual cause.",
            "Adopt: rollouts finish running responses first unless `rollout.partial_rollout` is on.",
        ),
    ),
    Alert(
        name="SlipstreamWeightSyncFailing",
        expression='sum by (run) (increase(slipstream_weight_syncs_total{outcome!="ok"}[15m])) >= 3',
        lasts="0m",
        severity="page",
        summary="Weight sync of run {{ $labels.run }} failed {{ $value }} times in 15 minutes",
        meaning="Versions reach the rollouts only after several tries, or not at all. Each failure forms the group anew, and the rollouts that did not answer are lost and replaced.",
        actions=(
            "The panel Tries of the dashboard Weight sync says why: `DEADLINE_EXCEEDED` is a slow or cut network, `DATA_LOSS` damaged bytes, `UNAVAILABLE` a member that is gone.",
            "Read the controller's log for `weight sync failed`: `why` names the member. Look at its node: `dmesg` for Xid errors, `ibstat` for the link.",
            "Deadlines on a busy network: raise `weight_sync.transfer_timeout_s` of the next run. Damaged bytes from one node: drain it.",
        ),
    ),
    Alert(
        name="SlipstreamVersionLag",
        expression="(max by (run) (slipstream_trainer_weight_version) - min by (run) (slipstream_rollout_weight_version)) "
        "> on (run) (1 + max by (run) (slipstream_staleness_limit_versions))",
        lasts="10m",
        severity="ticket",
        summary="A rollout of run {{ $labels.run }} is {{ $value }} versions behind its trainer",
        meaning="A rollout serves weights so old that what it samples will be stale when it is finished.",
        actions=(
            "Find the pod on the panel Versions of the dashboard Weight sync.",
            "`kubectl logs POD`: `weight sync failed` or a refused canary name the reason.",
            "If it does not answer: `kubectl delete pod POD`. The others go on, and the controller starts another in its place.",
        ),
    ),
    Alert(
        name="SlipstreamTrainerStarved",
        expression='max by (run) (rate(slipstream_trainer_idle_seconds_total{reason="no_data"}[15m])) > 0.5',
        lasts="30m",
        severity="ticket",
        summary="The trainer of run {{ $labels.run }} waits for samples {{ $value | humanizePercentage }} of its time",
        meaning="Rollouts bring samples at less than half the rate that the trainer could take. Its GPUs are paid for and idle.",
        actions=(
            'Add rollouts while the run goes on: `PATCH /v1/runs/RUN` with `{"rollout_replicas": N}`.',
            "`slipstream_rollout_reward_seconds` as long as a response takes: raise `rollout.reward_concurrency`, or give the reward service more room.",
            "`slipstream_rollout_waiting_samples` is 0 and rollouts are idle: the staleness bound holds them; raise `algorithm.max_staleness` with a correction that allows it.",
        ),
    ),
    Alert(
        name="SlipstreamCheckpointFailed",
        expression='sum by (run) (increase(slipstream_checkpoints_total{outcome="failed"}[15m])) > 0',
        lasts="0m",
        severity="page",
        summary="A checkpoint of run {{ $labels.run }} could not be saved",
        meaning="The run trains on, but a loss of its trainer would throw it back to the checkpoint before.",
        actions=(
            "Read the trainer's log: `No space left on device` is the usual reason. `kubectl exec` into the trainer and `df -h /var/lib/slipstream`.",
            "Make room: enlarge the claim of `workers.checkpoints`, delete ended runs with their checkpoints, or lower `trainer.checkpoint.keep`.",
            "Then save one at once: `POST /v1/runs/RUN/checkpoint`.",
        ),
    ),
    Alert(
        name="SlipstreamCheckpointVolumeFull",
        expression="min by (run) (slipstream_checkpoint_volume_free_bytes) "
        "< @checkpointReserve@ * max by (run) (slipstream_checkpoint_size_bytes)",
        lasts="0m",
        severity="page",
        summary="The next checkpoints of run {{ $labels.run }} will not fit: {{ $value | humanize1024 }}B are left",
        meaning="After the newest checkpoint the volume had less room than `monitoring.prometheusRule.checkpointReserve` more of its size. A checkpoint is whole before an older one is deleted, so the next one may fail.",
        actions=(
            "Enlarge the claim of `workers.checkpoints`, or delete ended runs with their checkpoints: `DELETE /v1/runs/RUN?delete_checkpoints=true`.",
            "Keep fewer: `trainer.checkpoint.keep` of the next run.",
            "If other runs fill the volume, the limit is the claim's, not the run's: `kubectl exec` into the trainer, `du -sh /var/lib/slipstream/*`.",
        ),
    ),
    Alert(
        name="SlipstreamNonFiniteStep",
        expression="sum by (run) (increase(slipstream_trainer_nonfinite_total[10m])) > 0",
        lasts="0m",
        severity="page",
        summary="Run {{ $labels.run }} met numbers that are not finite",
        meaning="Losses, gradients or logprobs of the run were NaN or infinite. Such steps leave the weights as they were.",
        actions=(
            "A single event is harmless. If it goes on, cancel the run.",
            "Lower the learning rate, or train in float32; look at the gradient norm and at the divergence before the event.",
        ),
    ),
    Alert(
        name="SlipstreamRewardFailures",
        expression="sum by (run, kind) (rate(slipstream_rollout_reward_failures_total[15m])) > 0.1",
        lasts="15m",
        severity="ticket",
        summary="Rewards of run {{ $labels.run }} fail: {{ $labels.kind }}",
        meaning="More than one reward in ten seconds cannot be computed. Such samples are generated again or masked, never scored 0.",
        actions=(
            "`timeout`: raise `timeout_s` of the reward or `rollout.reward_concurrency`.",
            "`exception` and `invalid_value`: the reward's code is wrong for some responses; the log of the rollout names the error.",
        ),
    ),
    Alert(
        name="SlipstreamQueueNearFull",
        expression="max by (pod) (slipstream_tq_stored_bytes / slipstream_tq_capacity_bytes) > @queueFillRatio@",
        lasts="5m",
        severity="page",
        summary="Transferqueue shard {{ $labels.pod }} is {{ $value | humanizePercentage }} full",
        meaning="Finished samples wait longer than they should, or the memory is too small. When it is full, rollouts wait.",
        actions=(
            "See on the dashboard Staleness and data flow whether finished groups pile up: then the trainer is the bottleneck, and waiting is right.",
            "Otherwise raise `transferqueue.capacityMiB` or `transferqueue.shards`.",
        ),
    ),
    Alert(
        name="SlipstreamQueueShardDown",
        expression="(max(slipstream_tq_shards) or vector(0)) < @shards@",
        lasts="2m",
        severity="page",
        summary="The transferqueue has {{ $value }} of its shards",
        meaning="Samples of a lost shard are generated again, and the others have less room than was planned. With 0, the index itself is down or is not scraped: runs wait until it is back.",
        actions=(
            "`kubectl get pods -A -l app.kubernetes.io/name=slipstream`: a shard that is Pending waits for a node with its memory; CrashLoopBackOff: `kubectl logs --previous POD`.",
            "OOMKilled: raise `transferqueue.overheadMiB`; very many small samples need more beside `transferqueue.capacityMiB`.",
            "All run and are Ready: the index does not hear of one. Its log names refused shards; a service key or certificate of another installation is the usual cause.",
        ),
    ),
    Alert(
        name="SlipstreamMessagesRefused",
        expression="sum by (channel, reason) (increase(slipstream_rejected_messages_total[10m])) > 0",
        lasts="0m",
        severity="page",
        summary="The data plane refused messages: {{ $labels.reason }}",
        meaning="A message on the data plane was malformed, or came from somebody who was not admitted.",
        actions=(
            "`malformed`: processes of different releases talk to each other; make all images the same.",
            "`unauthenticated`: something else in the cluster tries the port; the network policies should keep it out.",
            "`foreign`: a worker asked for samples of another run; look at the code of its rewards and data.",
        ),
    ),
    Alert(
        name="SlipstreamCallersRefused",
        expression="sum by (reason) (rate(slipstream_auth_failures_total[5m])) > 0.2",
        lasts="10m",
        severity="ticket",
        summary="Callers are refused again and again: {{ $labels.reason }}",
        meaning="For ten minutes somebody has called the API or the services' gRPC without being allowed to.",
        actions=(
            "`unauthenticated`: a token has expired or was revoked, a service has another `serviceKey`, or somebody tries tokens; the pods whose metric grows say where.",
            "`permission_denied`: a worker asks for another run's data. That is a fault, or an attack by the code of a run: look at that run's rewards and data.",
        ),
    ),
    Alert(
        name="SlipstreamApiErrors",
        expression='sum(rate(slipstream_http_request_duration_seconds_count{code=~"5.."}[5m])) '
        "/ sum(rate(slipstream_http_request_duration_seconds_count[5m])) > 0.02",
        lasts="10m",
        severity="page",
        summary="{{ $value | humanizePercentage }} of the answers of the API are errors",
        meaning="For ten minutes users have had answers of the kind 5xx from the REST API.",
        actions=(
            "The panel API answers of the dashboard Fleet and data plane says which route and code.",
            "500: a fault of the controller, whose log has the traceback. Report it.",
            "503 and 504: what the controller asks does not answer: the transferqueue (its pods, its alerts), or a PostgreSQL that is away or full.",
        ),
    ),
    Alert(
        name="SlipstreamControllerDown",
        expression="absent(slipstream_runs)",
        lasts="5m",
        severity="page",
        summary="No controller is scraped",
        meaning="Prometheus has no sample from a controller: it is down, or is not scraped. Runs go on without it for a while; nothing new starts.",
        actions=(
            "`kubectl get pods -A -l app.kubernetes.io/component=controller`. Pending: `kubectl describe pod` says what is missing, most often the node or zone of its claim.",
            "CrashLoopBackOff: `kubectl logs --previous deploy/RELEASE-controller`. A database that is full asks for a larger claim; a schema of a newer release for that release's image; a PostgreSQL that does not answer for itself.",
            "It runs and is Ready: Prometheus does not reach it. Check `monitoring.podMonitor.labels` against what your Prometheus selects, and `networkPolicy.metricsFrom`.",
        ),
    ),
)


def rules() -> dict[str, Any]:
    """Returns all alerts as one rule group."""
    return {"groups": [{"name": "slipstream", "rules": [alert.to_json() for alert in ALL]}]}
