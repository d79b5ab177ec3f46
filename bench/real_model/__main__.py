"""Trains a real model: ``python -m bench.real_model [VARIANT...] [--example SPEC] [--smoke]``.

SmolLM2-135M-Instruct trains on three-digit addition through ``slipstream run`` on one GPU that
trainer and vLLM share: synchronously, one step off-policy and four steps off-policy. Each run's
held-out curve (256 questions, greedy, and sampled if the specification asks for it) is recorded over
the trained samples and over the seconds since the command, in ``bench/results/real-model.json``.
``python -m bench.real_model.peer`` adds TRL's colocated trainer on the same task, batch and learning
rate. ``--example examples/calculator/calculator.yaml`` trains that specification instead, and writes
``bench/results/real-model-calculator.json``.
"""

import argparse
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.e2e.timeline import facts
from bench.real_model.processors import watched
from bench.real_model.setting import Setting, smoke
from bench.real_model.smollm2 import make_folder
from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, WholeRun, output_of, run_folder, running, steps_in

RESULTS = REPOSITORY / "bench" / "results" / "real-model.json"
_ATTENTION = "trainer.lora={rank: 32, alpha: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}"
VARIANTS = {
    "lag 0": ("algorithm.max_staleness=0",),
    "lag 1": ("algorithm.max_staleness=1",),
    "lag 1, two engines": ("algorithm.max_staleness=1", "rollout.replicas=2"),
    "lag 1, three engines": ("algorithm.max_staleness=1", "rollout.replicas=3"),
    "lag 4": ("algorithm.max_staleness=4",),
    "lag 4, two engines": ("algorithm.max_staleness=4", "rollout.replicas=2"),
    "lag 1, LoRA": (
        "algorithm.max_staleness=1",
        "trainer.lora={rank: 32, alpha: 32}",
        "trainer.optimizer.learning_rate=1e-3",
    ),
    "lag 1, LoRA on the attention": (
        "algorithm.max_staleness=1",
        _ATTENTION,
        "trainer.optimizer.learning_rate=1e-4",
    ),
    "in turns, lag 0": ("algorithm.max_staleness=0", "topology.placement=colocated"),
    "in turns, lag 1": ("algorithm.max_staleness=1", "topology.placement=colocated"),
}
_STEADY = 5
_POLL_S = 0.2
_SCORES = re.compile(r"held-out, version (\d+): greedy ([.\d]+), sampled (\S+)")
_NOT_SAMPLED = "-"
ON_CPU = (
    *("rollout.engine=torch", "trainer.dtype=float32", "trainer.compile=false"),
    *("trainer.steps=2", "trainer.prompts_per_step=2", "rollout.group_size=2"),
    *("validation.every=0", "rollout.max_response_tokens=48"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"some of: {'; '.join(VARIANTS)}")
    parser.add_argument("--example", type=Path, help="a specification to train instead")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--together", action="store_true", help="all at once: curves, no times")
    parser.add_argument("--smoke", action="store_true", help="two steps on a CPU")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheel", type=Path, help="the package with the model, or its parts")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--folder", type=Path, help="where runs and logs stay")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    example: Path | None = arguments.example and arguments.example.resolve()
    name = f"{RESULTS.stem}-{example.stem}.json" if example else RESULTS.name
    out = arguments.out or RESULTS.with_name(name)
    setting = smoke(Setting()) if arguments.smoke else Setting()
    extra = [*arguments.set, *([f"trainer.steps={arguments.steps}"] if arguments.steps else [])]
    with run_folder(arguments.folder) as folder:
        model = (arguments.model or folder / "model").resolve()
        make_folder(model, arguments.wheel)
        spec = example or folder / "spec.json"
        if example is None:
            spec.write_text(json.dumps(setting.spec(model)))
        else:
            extra = [f"model.path={model}", *extra, *(ON_CPU if arguments.smoke else ())]
        jobs = [
            (name, seed, [*VARIANTS[name], f"seed={seed}", *extra])
            for name in arguments.variants or VARIANTS
            for seed in arguments.seeds
        ]

        def measured(job: tuple[str, int, list[str]]) -> dict[str, Any]:
            name, seed, settings = job
            seed_folder = folder / f"{name}-{seed}".replace(" ", "").replace(",", "-")
            entry = train(seed_folder, settings, spec)
            print(json.dumps({"variant": name, "seed": seed, **entry}), flush=True)
            return {"variant": name, "seed": seed, "settings": settings, **entry}

        with ThreadPoolExecutor(len(jobs) if arguments.together else 1) as pool:
            entries = list(pool.map(measured, jobs))
    for entry in entries:
        if arguments.together and len(jobs) > 1:
            entry["times"] = "not of use: runs shared the GPU"
    if not arguments.smoke:
        keep(entries, out)


def train(
    folder: Path, settings: list[str], spec: Path, *, until: int | None = None
) -> dict[str, Any]:
    """Trains once; returns the held-out curve and the rates of the steady steps.

    Args:
        until: Version from which an evaluation ends a longer run; a run that ends by itself would also save.

    Raises:
        SystemExit: If the run fails, with its output.
    """
    began, is_over, evaluated = time.time(), False, list[int]()
    with watched() as processors, running(folder, settings, spec=spec) as process:
        while process.poll() is None and not is_over:
            time.sleep(_POLL_S)
            evaluated = [int(match[1]) for match in _SCORES.finditer(output_of(folder))]
            is_over = until is not None and evaluated[-1:] >= [until]
    end = time.time()
    steps = steps_in(folder)[: evaluated[-1] if is_over else None]
    if not (steps and (is_over or process.returncode == 0)):
        raise SystemExit(f"{' '.join(settings)} failed:\n{output_of(folder)}{_logs(folder)}")
    run = WholeRun({}, steps, began=began)
    seconds = dict(enumerate(run.committed(), start=1))
    scores = {
        int(version): {"greedy": float(greedy)}
        | ({} if sampled == _NOT_SAMPLED else {"sampled": float(sampled)})
        for version, greedy, sampled in _SCORES.findall(output_of(folder))
        if int(version) <= len(steps)
    }
    is_steady = len(steps) > _STEADY and "generated_tokens_per_s" in steps[-1]
    times = facts(run, first=_STEADY) if is_steady else {}
    return {
        "steps": len(steps),
        "curve": [
            {
                "samples": sum(int(step["samples"]) for step in steps[:version]),
                "seconds": round(seconds.get(version, 0.0), 1),
                **values,
            }
            for version, values in sorted(scores.items())
        ],
        "reward_mean": [round(step["reward_mean"], 4) for step in steps if "reward_mean" in step],
        "seconds_to_first_step": round(seconds[1], 1),
        "seconds_after_last_step": round(end - began - seconds[len(steps)], 1),
        "facts": times,
        "processors": processors.medians(last_s=round(seconds[len(steps)] - seconds[1])),
    }


def keep(entries: list[dict[str, Any]], results: Path) -> None:
    """Writes entries, replacing former ones with the same variant and seed."""
    report: dict[str, Any] = read_json(results)
    device = device_name()
    runs = report.setdefault("runs", {})
    for entry in entries:
        runs[f"{entry.pop('variant')}, seed {entry.pop('seed')}"] = {"device": device, **entry}
    write_json(results, report)


def _logs(folder: Path) -> str:
    """Returns the ends of the workers' logs."""
    ends = []
    for log in sorted(folder.glob("run_*/logs/*.log")):
        text = log.read_text(encoding="utf-8", errors="replace")
        ends.append(f"\n--- {log.name}\n{text[-3000:]}")
    return "".join(ends)


if __name__ == "__main__":
    main()
