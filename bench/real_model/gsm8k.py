"""Trains a known model on GSM8K: ``python -m bench.real_model.gsm8k [ARM...] [--smoke]``.

``examples/gsm8k-1.5b.yaml``, Qwen2.5-Coder-1.5B-Instruct, trains through ``slipstream run`` on one GPU that
trainer and vLLM share, at several staleness bounds. 512 held-out questions are answered greedily every
20 steps. Weights are those of a GGUF file of 4 and 6 bits (``bench.real_model.qwen``), and ``--data`` is a
folder with GSM8K's ``train.jsonl`` and ``test.jsonl``; with ``--hub`` both come from the hub, as the
example names them.

Results go to ``bench/results/gsm8k-1.5b.json``, one entry for each arm and seed.

Bars: a gain of .08 over the start within an hour; after as many samples, every arm's final score within
.02 of the synchronous one; lag 4 in at most .45 of the synchronous arm's seconds.
"""

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from bench.gpu_memory import planned_gb, watched_memory
from bench.real_model.__main__ import keep, train
from bench.real_model.qwen import make_folder
from bench.report import read_json
from bench.whole_run import REPOSITORY, run_folder, steps_in
from services.common.runspec.loader import load_spec

EXAMPLE = REPOSITORY / "examples" / "gsm8k-1.5b.yaml"
RESULTS = REPOSITORY / "bench" / "results" / "gsm8k-1.5b.json"
SYNCHRONOUS = "synchronous"
ARMS = {
    SYNCHRONOUS: ("algorithm.max_staleness=0",),
    "lag 1": ("algorithm.max_staleness=1",),
    "lag 1, whole responses": ("algorithm.max_staleness=1", "rollout.partial_rollout=false"),
    "lag 4": ("algorithm.max_staleness=4",),
    "synchronous, in turns": ("algorithm.max_staleness=0", "topology.placement=colocated"),
}
SMALL_DATA = REPOSITORY / "examples" / "data" / "gsm8k"
_ON_CPU = (
    *("model.path=tiny:qwen2-0.4m", "data.chat_template=false", "data.max_prompt_tokens=1024"),
    *("rollout.engine=torch", "rollout.group_size=2", "rollout.max_response_tokens=8"),
    *("trainer.dtype=float32", "trainer.compile=false", "trainer.prompts_per_step=2"),
    *("data.heldout.gsm8k.limit=4", "validation.every=1"),
)
_MIN_GAIN, _MAX_SECONDS = 0.08, 3600.0
_MAX_DIFFERENCE = 0.02
_MAX_SHARE = 0.45


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", help=f"some of: {'; '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--together", action="store_true", help="all at once: curves, no times")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model on a CPU")
    parser.add_argument("--hub", action="store_true", help="model and data of the hub")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheels", type=Path, help="folder with the packages of the model")
    parser.add_argument("--data", type=Path, default=SMALL_DATA, help="folder with GSM8K")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--folder", type=Path, help="where runs and logs stay")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    steps = 2 if arguments.smoke else arguments.steps
    common = ["trainer.steps=1000000", "trainer.checkpoint.every_s=0"]
    with run_folder(arguments.folder) as folder:
        if not arguments.hub:
            common += _local_data(arguments.data.resolve())
        if arguments.smoke:
            common += _ON_CPU
        elif not arguments.hub:
            model = (arguments.model or folder / "model").resolve()
            make_folder(model, arguments.wheels)
            common.append(f"model.path={model}")
        jobs = [(arm, seed) for arm in arguments.arms or ARMS for seed in arguments.seeds]
        is_shared = arguments.together and len(jobs) > 1

        def measured(job: tuple[str, int]) -> dict[str, Any]:
            arm, seed = job
            state = folder / f"{arm}-{seed}".replace(" ", "").replace(",", "-")
            settings = [*ARMS[arm], f"seed={seed}", *arguments.set]
            entry = {"settings": settings, **_train(state, [*settings, *common], steps)}
            if is_shared:
                entry["times"] = "not of use: runs shared the GPU"
            print(json.dumps({"variant": arm, "seed": seed, **entry}), flush=True)
            if not arguments.smoke:
                keep([{"variant": arm, "seed": seed, **entry}], arguments.out)
            return {f"{arm}, seed {seed}": entry}

        with ThreadPoolExecutor(len(jobs) if is_shared else 1) as pool:
            entries = {
                name: run for job_runs in pool.map(measured, jobs) for name, run in job_runs.items()
            }
    runs = entries if arguments.smoke else read_json(arguments.out)["runs"]
    print("\n".join(table(runs)))
    print(json.dumps(bars(runs), indent=1))


def table(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each run: scores, and seconds from the first step to the last."""
    lines = ["run                            samples  before  after   gain  seconds  s/step  start"]
    for name, run in runs.items():
        curve = run["curve"]
        before, after = curve[0]["greedy"], curve[-1]["greedy"]
        lines.append(
            f"{name:30} {curve[-1]['samples']:7}  {before:6.3f} {after:6.3f} {after - before:6.3f}  "
            f"{_seconds(run):7.1f}  {_seconds(run) / max(run['steps'] - 1, 1):6.2f}  "
            f"{run['seconds_to_first_step']:5.0f}"
        )
    return lines


def bars(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the results of the bars, from means over the seeds of each arm."""
    of_arm = {
        arm: arm_runs
        for arm in ARMS
        if (arm_runs := [run for name, run in runs.items() if name.rpartition(", seed ")[0] == arm])
    }
    gains = {arm: mean(map(_gain, arm_runs)) for arm, arm_runs in of_arm.items()}
    scores = {arm: mean(_score(run) for run in arm_runs) for arm, arm_runs in of_arm.items()}
    seconds = {
        arm: mean(map(_seconds, timed))
        for arm, arm_runs in of_arm.items()
        if (timed := [run for run in arm_runs if "times" not in run])
    }
    hour = all(run["curve"][-1]["seconds"] <= _MAX_SECONDS for run in runs.values())
    result: dict[str, Any] = {
        "gain": {arm: round(gain, 4) for arm, gain in gains.items()},
        f"gain of {_MIN_GAIN} within an hour": {
            arm: hour and gain >= _MIN_GAIN for arm, gain in gains.items()
        },
    }
    if SYNCHRONOUS in of_arm:
        losses = {arm: scores[SYNCHRONOUS] - score for arm, score in scores.items()}
        result["score below synchronous"] = {arm: round(loss, 4) for arm, loss in losses.items()}
        result[f"every arm within {_MAX_DIFFERENCE}"] = max(losses.values()) <= _MAX_DIFFERENCE
    if {SYNCHRONOUS, "lag 4"} <= seconds.keys():
        share = seconds["lag 4"] / seconds[SYNCHRONOUS]
        result["lag 4: share of the synchronous seconds"] = round(share, 3)
        result[f"share of at most {_MAX_SHARE}"] = share <= _MAX_SHARE
    return result


def _train(state: Path, settings: list[str], steps: int) -> dict[str, Any]:
    with watched_memory() as peaks:
        entry = train(state, settings, EXAMPLE, until=steps)
    spec = load_spec(EXAMPLE, settings)
    records = steps_in(state)[: entry["steps"]]
    (start,) = state.glob("run_*/start.json")
    return entry | {
        "step_seconds": [round(record["seconds"], 2) for record in records],
        "response_tokens": [
            round(record["response_tokens"] / record["samples"]) for record in records
        ],
        "start": json.loads(start.read_text(encoding="utf-8")),
        "peak_gb": dict(peaks),
        "planned_gb": planned_gb(spec, Path(spec.model.path)) if peaks else {},
        "allocated_gb": round(
            max(record.get("gpu_memory_peak_bytes", 0.0) for record in records) / 1e9, 2
        ),
    }


def _local_data(folder: Path) -> list[str]:
    return [
        setting
        for name, file in (("data.train", "train.jsonl"), ("data.heldout.gsm8k", "test.jsonl"))
        for setting in (f"{name}.source=jsonl", f"{name}.path={folder / file}")
    ]


def _score(run: Mapping[str, Any]) -> float:
    return float(run["curve"][-1]["greedy"])


def _gain(run: Mapping[str, Any]) -> float:
    return _score(run) - float(run["curve"][0]["greedy"])


def _seconds(run: Mapping[str, Any]) -> float:
    """Returns the seconds from the first step to the last."""
    return float(run["curve"][-1]["seconds"] - run["seconds_to_first_step"])


if __name__ == "__main__":
    main()
