"""Fixed slots against a concurrency that follows the decode curve: ``python -m bench.pace.concurrency``.

The planner's simulation, which decides by the rules of real runs, predicts steps of 192 samples with a mean
of 450 tokens. ``fixed`` has the default slots. ``follows`` is a controller that knows the decode time of n
samples, the lengths so far and the trainer's time: it dispatches groups for the smallest n whose predicted
step is within 2 % of the shortest, times a margin. ``bound`` is the formula of
``services/extras/planner/tail.py``. ``stale_waits`` bounds the time that the trainer waits for groups that
are due (``algorithm.stale_wait_timeout_s``; 0 is ``on_stale: mask``) and counts the tokens that it masks
instead. Nothing is measured. Results go to ``bench/results/concurrency.json``.
"""

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import read_json, write_json
from services.controller.rules.placement import SlotUsage
from services.extras.planner.inputs import DecodeTime, Geometric, Lognormal, Rates, Setting
from services.extras.planner.simulation import (
    Prediction,
    SimulatedGroup,
    Simulation,
    min_step_s,
)
from services.extras.planner.tail import tail_bound

RESULTS = Path(__file__).parents[1] / "results" / "concurrency.json"
_LENGTHS = {
    "geometric, mean 460, up to 3,072": Geometric(mean_tokens=461, max_tokens=3072),
    "log-normal, mean 450, sigma .7, up to 3,072": Lognormal(
        median_tokens=352, sigma=0.7, max_tokens=3072
    ),
    "log-normal, mean 60, up to 256": Lognormal(median_tokens=50, sigma=0.5, max_tokens=256),
}
# An H200 with 1.3 B parameters: 15 ms with 1,100 samples, 5 ms with 150; and an engine whose host is slow.
_DECODE = {
    "H200": DecodeTime(fixed_s=0.0035, sample_s=1.05e-5, max_samples=1024),
    "slow host": DecodeTime(fixed_s=0.004, sample_s=6e-5, max_samples=1024),
}
_TRAIN_S = 1.57
_GROUPS, _GROUP_SIZE, _STEPS = 24, 8, 60
_MARGINS = (1.3, 2.0)
_WITHIN = 1.02
_STRIDE = 8
_STALE_WAITS_S = (0.0, 0.4, 0.8, 1.5, 3.0, 180.0)


class FollowingSlots(SlotUsage):
    """Slots that follow the decode curve, the lengths and the staleness bound."""

    def __init__(self, setting: Setting, decode: DecodeTime, train_s: float, margin: float) -> None:
        super().__init__(setting.slots, setting.group_size)
        self._setting, self._decode = setting, decode
        self._train_s, self._margin = train_s, margin
        window = (setting.max_staleness + 1) * setting.samples_per_step
        self._lengths: deque[int] = deque(maxlen=window)
        self._limit: float | None = None

    def finished(self, num_tokens: Sequence[int]) -> None:
        super().finished(num_tokens)
        self._lengths.extend(num_tokens)
        self._limit = None

    def num_groups(self, num_engines: int) -> int:
        return max(num_engines, round(self._slots_now() * num_engines / self.slots_per_group))

    def _slots_now(self) -> float:
        setting, samples = self._setting, self._setting.samples_per_step
        if len(self._lengths) < samples:
            return setting.slots
        if self._limit is None:
            tokens = samples * sum(self._lengths) / len(self._lengths)
            longest = max(self._lengths) / (setting.max_staleness + 1)
            counts = range(_STRIDE, setting.slots + 1, _STRIDE)
            steps = {
                n: max(self._train_s, max(tokens / n, longest) * self._decode(n)) for n in counts
            }
            shortest = min(steps.values())
            smallest = next(n for n in counts if steps[n] <= _WITHIN * shortest)
            self._limit = min(setting.slots, self._margin * smallest)
        return self._limit


class MaskingSimulation(Simulation):
    """Simulation with one engine that counts the tokens a step masks because they are too stale."""

    def __init__(self, rates: Rates, setting: Setting) -> None:
        super().__init__(rates, setting)
        self._adopted_at = {0: 0.0}
        """Tokens that one running sample would have got when a version was adopted, by version."""
        self._started_at: dict[int, list[float]] = {}
        self._stale_tokens = self._trained_tokens = 0.0

    @property
    def stale_token_fraction(self) -> float:
        return self._stale_tokens / self._trained_tokens

    def _on_start(self, group: SimulatedGroup) -> None:
        super()._on_start(group)
        self._started_at.setdefault(group.group.sequence, []).append(self._engines[0]._tokens)  # noqa: SLF001

    def _try_adopt(self, version: int, behind: set[int]) -> None:
        super()._try_adopt(version, behind)
        if not behind:
            self._adopted_at.setdefault(version, self._engines[0]._tokens)  # noqa: SLF001

    def _train(self, groups: list[SimulatedGroup]) -> None:
        oldest = self._trainer.version - self._setting.max_staleness
        boundary = self._adopted_at[max(0, oldest)]
        for group in groups:
            for begin, length in zip(
                self._started_at.pop(group.group.sequence), group.lengths, strict=True
            ):
                self._stale_tokens += min(max(boundary - begin, 0.0), length)
                self._trained_tokens += length
        super()._train(groups)


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one setting."""

    step_s: float
    staleness: float
    running: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few steps, and nothing is kept")
    parser.add_argument(
        "--stale-waits", action="store_true", help="only the time for groups that are due"
    )
    arguments = parser.parse_args()
    steps = 8 if arguments.smoke else _STEPS
    waits = [_waiting(wait_s, steps=2 * steps) for wait_s in _STALE_WAITS_S]
    for row in waits:
        print(json.dumps(row), flush=True)
    if arguments.stale_waits:
        if not arguments.smoke:
            write_json(RESULTS, read_json(RESULTS) | {"stale_waits": waits})
        return
    rows = [
        _compared(host, name, lag, steps)
        for host in _DECODE
        for name in _LENGTHS
        for lag in (0, 1, 2, 4, 8)
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    slower = {
        f"follows, margin {margin}": round(
            max(row["follows"][str(margin)]["step_s"] / row["fixed"]["step_s"] for row in rows), 3
        )
        for margin in _MARGINS
    }
    print(json.dumps({"worst step over fixed": slower}))
    if not arguments.smoke:
        results = {"host": "none: arithmetic only", "worst": slower, "rows": rows}
        write_json(RESULTS, results | {"stale_waits": waits})


def _waiting(wait_s: float, *, steps: int) -> dict[str, Any]:
    """Returns steps at lag 4 with the longest tail, for a bound on the wait for groups that are due."""
    name, host = next(iter(_LENGTHS)), next(iter(_DECODE))
    rates = _rates(host, name)
    setting = replace(_setting(4), stale_wait_s=wait_s)
    simulation = MaskingSimulation(rates, setting)
    prediction = simulation.run(steps)
    masked, samples = simulation.stale_token_fraction, setting.samples_per_step
    return {
        "decode": host,
        "lengths": name,
        "max_staleness": setting.max_staleness,
        "stale_wait_s": wait_s,
        "step_s": round(prediction.step_s, 3),
        "engine_and_trainer_limit_s": round(min_step_s(rates, setting), 3),
        "stale_token_fraction": round(masked, 4),
        "tokens_trained_per_s": round(
            samples * rates.lengths.mean() * (1 - masked) / prediction.step_s
        ),
    }


def _rates(host: str, name: str) -> Rates:
    lengths = _LENGTHS[name]
    train_s = _TRAIN_S * lengths.mean() / 450
    return Rates(
        train_tokens_per_s=_GROUPS * _GROUP_SIZE * lengths.mean() / train_s,
        decode=_DECODE[host],
        lengths=lengths,
    )


def _setting(lag: int) -> Setting:
    return Setting(
        trainer_gpus=1,
        rollouts=1,
        slots=max(64, min(1024, (lag + 1) * _GROUPS * _GROUP_SIZE)),
        max_staleness=lag,
        groups_per_step=_GROUPS,
        group_size=_GROUP_SIZE,
    )


def _compared(host: str, name: str, lag: int, steps: int) -> dict[str, Any]:
    rates, setting = _rates(host, name), _setting(lag)
    train_s = _TRAIN_S * rates.lengths.mean() / 450
    bound = tail_bound(rates, setting)
    follows = {}
    for margin in _MARGINS:
        simulation = Simulation(rates, setting)
        simulation._use = FollowingSlots(setting, rates.decode, train_s, margin)  # noqa: SLF001 -- an experiment
        follows[str(margin)] = asdict(_row(simulation.run(steps), setting))
    return {
        "decode": host,
        "lengths": name,
        "max_staleness": lag,
        "slots": setting.slots,
        "engine_and_trainer_limit_s": round(min_step_s(rates, setting), 3),
        "bound_s": round(bound.step_s, 3),
        "bound_running": round(bound.max_running),
        "fixed": asdict(_row(Simulation(rates, setting).run(steps), setting)),
        "follows": follows,
    }


def _row(prediction: Prediction, setting: Setting) -> Row:
    return Row(
        step_s=round(prediction.step_s, 3),
        staleness=round(prediction.staleness_mean, 2),
        running=round(prediction.slots_used * setting.slots),
    )


if __name__ == "__main__":
    main()
