"""Prometheus series that trigger each alert, and the expected annotations."""

from typing import Any

_BASE = "https://github.com/slipstream-rl/slipstream/blob/main/docs/runbooks"


def _case(
    alert: str,
    series: dict[str, str],
    *,
    severity: str,
    summary: str,
    quiet_at: str,
    fires_at: str,
    **labels: str,
) -> dict[str, Any]:
    return {
        "alert": alert,
        "series": series,
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "runbook_url": f"{_BASE}/{alert}.md"},
        "quiet_at": quiet_at,
        "fires_at": fires_at,
    }


_PROGRESSING = 'slipstream_run_condition{run="r",type="Progressing",status="%s",reason="%s"}'
_SYNC = 'slipstream_weight_sync_duration_seconds_bucket{run="r",phase="total",le="%s"}'

CASES = [
    _case(
        "SlipstreamRunStalled",
        {
            'slipstream_run_last_progress_timestamp_seconds{run="r"}': "0+60x10 600x60",
            'slipstream_run_state{run="r",state="RUNNING"}': "1x80",
        },
        severity="page", run="r", quiet_at="20m", fires_at="30m",
        summary="Run r has finished no step for 20m 0s",
    ),
    _case(
        "SlipstreamRunMakesNoProgress",
        {
            _PROGRESSING % ("True", "Training"): "1x10 _x30",
            _PROGRESSING % ("False", "NoGroupRuns"): "_x11 1x30",
            'slipstream_run_state{run="r",state="RUNNING"}': "1x80",
        },
        severity="ticket", run="r", reason="NoGroupRuns", quiet_at="10m", fires_at="20m",
        summary="Run r trains no step: NoGroupRuns",
    ),
    _case(
        "SlipstreamRunStuckStarting",
        {'slipstream_run_state{run="r",state="STARTING"}': "1x60"},
        severity="ticket", run="r", quiet_at="20m", fires_at="40m",
        summary="Run r has been starting for half an hour",
    ),
    _case(
        "SlipstreamRunRecovering",
        {'slipstream_run_state{run="r",state="RECOVERING"}': "0x5 1x30"},
        severity="ticket", run="r", quiet_at="10m", fires_at="20m",
        summary="Run r has been recovering for ten minutes",
    ),
    _case(
        "SlipstreamRunFailed",
        {'slipstream_run_state{run="r",state="FAILED"}': "0x5 1x10"},
        severity="ticket", run="r", quiet_at="3m", fires_at="8m", summary="Run r failed",
    ),
    _case(
        "SlipstreamStalenessViolated",
        {'slipstream_staleness_violations_total{run="r"}': "0x5 2x10"},
        severity="page", run="r", quiet_at="3m", fires_at="8m",
        summary="Run r trained tokens over its staleness bound",
    ),
    _case(
        "SlipstreamWeightSyncSlow",
        {_SYNC % "30": "0x90", _SYNC % "60": "0+1x90", _SYNC % "+Inf": "0+1x90"},
        severity="ticket", run="r", quiet_at="5m", fires_at="40m",
        summary="Weight sync of run r takes 58.5s (p95)",
    ),
    _case(
        "SlipstreamWeightSyncFailing",
        {'slipstream_weight_syncs_total{run="r",outcome="DEADLINE_EXCEEDED"}': "0x10 4x30"},
        severity="page", run="r", quiet_at="9m", fires_at="12m",
        summary="Weight sync of run r failed 4 times in 15 minutes",
    ),
    _case(
        "SlipstreamVersionLag",
        {
            'slipstream_trainer_weight_version{run="r",pod="t"}': "0+1x40",
            'slipstream_rollout_weight_version{run="r",pod="a"}': "0+1x40",
            'slipstream_rollout_weight_version{run="r",pod="b"}': "0x40",
            'slipstream_staleness_limit_versions{run="r"}': "2x40",
        },
        severity="ticket", run="r", quiet_at="5m", fires_at="20m",
        summary="A rollout of run r is 20 versions behind its trainer",
    ),
    _case(
        "SlipstreamPolicyMismatch",
        {
            'slipstream_train_kl_divergence_nats{run="r",pair="policy_rollout"}': "0.01x10 0.125x40",
            'slipstream_train_kl_divergence_nats{run="r",pair="policy_ref"}': "2x60",
            'slipstream_run_state{run="r",state="RUNNING"}': "1x60",
        },
        severity="ticket", run="r", quiet_at="15m", fires_at="25m",
        summary="Rollouts of run r sample from another policy: 125m nats per token",
    ),
    _case(
        "SlipstreamTrainerStarved",
        {'slipstream_trainer_idle_seconds_total{run="r",reason="no_data"}': "0x10 0+45x80"},
        severity="ticket", run="r", quiet_at="30m", fires_at="70m",
        summary="The trainer of run r waits for samples 75% of its time",
    ),
    _case(
        "SlipstreamCheckpointFailed",
        {'slipstream_checkpoints_total{run="r",outcome="failed"}': "0x10 1x20"},
        severity="page", run="r", quiet_at="9m", fires_at="12m",
        summary="A checkpoint of run r could not be saved",
    ),
    _case(
        "SlipstreamCheckpointUploadFailing",
        {'slipstream_checkpoint_upload_failing_seconds{run="r"}': "0x5 60+60x10"},
        severity="page", run="r", quiet_at="9m", fires_at="12m",
        summary="Run r cannot upload its checkpoints for 7m 0s",
    ),
    _case(
        "SlipstreamSampleUploadFailing",
        {'slipstream_sample_upload_failing_seconds{run="r"}': "0x5 60+60x10"},
        severity="ticket", run="r", quiet_at="9m", fires_at="12m",
        summary="Samples of run r cannot be uploaded for 7m 0s",
    ),
    _case(
        "SlipstreamCheckpointVolumeFull",
        {
            'slipstream_checkpoint_volume_free_bytes{run="r"}': "4096x5 2048x10",
            'slipstream_checkpoint_size_bytes{run="r"}': "1100x15",
        },
        severity="page", run="r", quiet_at="3m", fires_at="8m",
        summary="The next checkpoints of run r will not fit: 2kiB are free",
    ),
    _case(
        "SlipstreamNonFiniteStep",
        {'slipstream_trainer_nonfinite_total{run="r",what="loss"}': "0x10 1x20"},
        severity="page", run="r", quiet_at="9m", fires_at="12m",
        summary="Run r had non-finite numbers",
    ),
    _case(
        "SlipstreamRewardFailures",
        {'slipstream_rollout_reward_failures_total{run="r",kind="timeout"}': "0x5 0+60x60"},
        severity="ticket", run="r", kind="timeout", quiet_at="5m", fires_at="50m",
        summary="Rewards of run r fail: timeout",
    ),
    _case(
        "SlipstreamQueueNearFull",
        {
            'slipstream_tq_stored_bytes{pod="q"}': "10x5 95x20",
            'slipstream_tq_capacity_bytes{pod="q"}': "100x30",
        },
        severity="page", pod="q", quiet_at="8m", fires_at="15m",
        summary="Transferqueue shard q is 95% full",
    ),
    _case(
        "SlipstreamQueueShardDown",
        {
            'slipstream_tq_shards{pod="index"}': "1x5 stale",
            'slipstream_tq_shards{pod="shard"}': "0x15",
        },
        severity="page", quiet_at="4m", fires_at="10m",
        summary="The transferqueue has 0 of its shards",
    ),
    _case(
        "SlipstreamMessagesRefused",
        {'slipstream_rejected_messages_total{channel="data",reason="malformed"}': "0x10 3x10"},
        severity="page", channel="data", reason="malformed", quiet_at="9m", fires_at="12m",
        summary="The data plane refused messages: malformed",
    ),
    _case(
        "SlipstreamCallersRefused",
        {'slipstream_auth_failures_total{reason="unauthenticated"}': "0x10 0+60x30"},
        severity="ticket", reason="unauthenticated", quiet_at="9m", fires_at="30m",
        summary="Callers are refused repeatedly: unauthenticated",
    ),
    _case(
        "SlipstreamApiErrors",
        {
            'slipstream_http_request_duration_seconds_count{code="200"}': "0+90x40",
            'slipstream_http_request_duration_seconds_count{code="503"}': "0x10 0+10x30",
        },
        severity="page", quiet_at="15m", fires_at="40m",
        summary="10% of the API's responses are errors",
    ),
    _case(
        "SlipstreamControllerDown",
        {'slipstream_runs{state="RUNNING"}': "1x5 stale"},
        severity="page", quiet_at="5m", fires_at="15m", summary="No controller is scraped",
    ),
]  # fmt: skip
"""Each alert is silent at ``quiet_at`` and fires at ``fires_at``."""
