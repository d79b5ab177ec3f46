"""Rates of a run, measured from the metrics of its steps."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from services.common.runspec.run import RunSpec
from services.controller.planning.lengths import Measured
from services.controller.planning.rates import DecodeTime, Rates, Setting, together

Step = Mapping[str, float | None]
"""Metrics of a step, by name."""
# The first steps compile, and fill the engines.
_FIRST = 3
LEAST_STEPS = 5
"""Min number of steps from which rates are measured."""
DECODE_TIMES = ("decode_fixed_s", "decode_sample_s", "decode_most_samples")
"""Decode times that rollouts report and steps record: see ``services/rollout/monitor.py``."""


class TooFewStepsError(ValueError):
    """A run has too few measurements; the message names what is missing."""


def setting_of(spec: RunSpec) -> Setting:
    """Returns the setting of a run."""
    return Setting(
        trainer_gpus=spec.trainer.world_size,
        rollouts=spec.rollout.replicas,
        places=spec.rollout.max_running_samples,
        max_staleness=spec.algorithm.max_staleness,
        groups_per_step=spec.trainer.prompts_per_step,
        group_size=spec.samples_per_group,
        keeps_responses=spec.rollout.partial_rollout,
        trains_early=spec.trainer.accumulate_early,
        publish_every=spec.weight_sync.publish_every,
        engine_gpus=spec.engine_gpus,
        in_turns=spec.colocated_rollouts,
    )


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps that are representative of a run's speed, from steps in order from the first.

    Raises:
        TooFewStepsError: If there are too few.
    """
    whole = [step for step in steps if _number(step, "step") > _FIRST and step.get("seconds")]
    if len(whole) < LEAST_STEPS:
        raise TooFewStepsError(
            f"{len(whole)} steps behind the first {_FIRST} are trained, but rates need {LEAST_STEPS}: the "
            "first ones compile, and fill the engines"
        )
    return whole


def rates_of(steps: Sequence[Step], lengths: Mapping[int, int], *, setting: Setting) -> Rates:
    """Measures a run's rates from its own steps.

    Args:
        steps: Metrics of the steps, as the API and the events give them.
        lengths: Number of responses by upper bound of their length.
        setting: Setting of the run.

    Raises:
        TooFewStepsError: If a metric is missing.
    """
    found = settled(steps)
    trained = [step for step in found if step.get("seconds_total") and step.get("response_tokens")]
    decoding = [step for step in found if all(step.get(name) is not None for name in DECODE_TIMES)]
    if not (trained and decoding and lengths):
        missing = {
            "seconds_total and response_tokens of the trainer": trained,
            "decode times of the rollouts": decoding,
            "response lengths": lengths,
        }
        raise TooFewStepsError(
            "its steps lack "
            + ", ".join(name for name, there in missing.items() if not there)
            + "; they come with the first steps of a run of this release"
        )
    # Medians, because a step that compiled or waited for a disk is not representative.
    a_gpu = median(_number(s, "response_tokens") / _number(s, "seconds_total") for s in trained)
    synced = [step for step in found if step.get("sync_ms") is not None]
    ms = {
        name: _median_ms(synced, name) for name in ("copy", "prepare", "transfer", "adopt", "stall")
    }
    # Without partial rollout an adoption waits for responses, which the simulation models itself.
    waiting_ms = max(0.0, ms["adopt"] - ms["stall"]) if setting.keeps_responses else 0.0
    handover, prepared_ms = {}, ms["prepare"] - ms["copy"]
    if setting.is_colocated:
        back_s = median(
            _number(s, "trainer_sleep_s") + _number(s, "rollouts_wake_s") for s in found
        )
        handover = {"handover_s": median(_number(step, "handover_s") for step in found)}
        prepared_ms -= 1000 * back_s  # part of the time to prepare
    prepared_ms = max(0.0, prepared_ms)
    fixed_s, sample_s, most = (
        fmean(_number(step, name) for step in decoding) for name in DECODE_TIMES
    )
    return Rates(
        train_tokens_per_s=a_gpu / together(setting.trainer_gpus),
        decode=DecodeTime(fixed_s=fixed_s, sample_s=sample_s, most_samples=max(1.0, most)),
        lengths=Measured.of_run(lengths, mean_tokens=_mean_tokens(trained)),
        step_s=median(_number(step, "idle_seconds_control") for step in found),
        copy_s=ms["copy"] / 1000,
        transfer_s=(prepared_ms + ms["transfer"] + waiting_ms) / 1000,
        stall_s=ms["stall"] / 1000,
        **handover,
    )


def _mean_tokens(trained: Sequence[Step]) -> float:
    """Returns the mean tokens of a response."""
    tokens = sum(_number(step, "response_tokens") for step in trained)
    return tokens / max(1.0, sum(_number(step, "samples") for step in trained))


def measured_step_s(steps: Sequence[Step]) -> float:
    """Returns the mean seconds of a step."""
    return fmean(_number(step, "seconds") for step in settled(steps))


def waited(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which the trainer waited for samples."""
    found = settled(steps)
    seconds = sum(_number(step, "seconds") for step in found)
    return sum(_number(step, "trainer_wait_s") for step in found) / seconds


def idled(steps: Sequence[Step]) -> float:
    """Returns the fraction of the time in which the rollouts had nothing to generate, their mean."""
    found = settled(steps)
    seconds = sum(_number(step, "seconds") for step in found)
    return sum(_number(step, "rollout_idle_s") for step in found) / seconds


def _median_ms(steps: Sequence[Step], name: str) -> float:
    return median(_number(step, f"{name}_ms") for step in steps) if steps else 0.0


def _number(step: Step, name: str) -> float:
    return float(step.get(name) or 0.0)
