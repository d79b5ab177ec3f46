"""Measures the whole system at full speed: ``python -m bench.e2e [VARIANT...] [--shape SHAPE] [--smoke]``.

All services run through ``slipstream run``, with the trainer on one GPU and a vLLM replica on
another; the same training is run synchronously and with several staleness bounds. Each run is
compared with its timeline and the min time of a step: ``max(T_train, tokens / R)``, with the
trainer's work per step, and with the rate of the engine alone or of its best step in the run,
whichever is larger. Results go to ``bench/results/e2e-SHAPE.json`` after each variant; a repeated
measurement replaces its numbers there. With ``--within``, a variant ends after that many seconds with
the steps so far.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.e2e.shapes import SHAPES, smoke
from bench.e2e.spans import Collector, collecting
from bench.e2e.timeline import FIRST_STEP, facts, least_step_s, time_line
from bench.report import read_json, write_json
from bench.whole_run import REPOSITORY, WholeRun, run_folder, run_for

VARIANTS = {
    "synchronous": ("algorithm.max_staleness=0",),
    "periodic": ("algorithm.max_staleness=0", "trainer.accumulate_early=true"),
    "lag 1": ("algorithm.max_staleness=1",),
    "lag 4": ("algorithm.max_staleness=4",),
    "lag 4, mask": ("algorithm.max_staleness=4", "algorithm.on_stale=mask"),
}
ENGINE = "engine alone"
_MANY = 10_000
_MIN_MEASURED = 4
"""Min measured steps of a variant that ``--within`` ends."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"some of: {'; '.join([ENGINE, *VARIANTS])}")
    parser.add_argument("--shape", choices=SHAPES, default="geometric")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--steps", type=int, default=FIRST_STEP + 11)
    parser.add_argument("--within", type=float, help="max seconds of a variant; default: no limit")
    parser.add_argument("--set", action="append", default=[], help="further settings of the runs")
    parser.add_argument("--folder", type=Path, help="where runs and logs stay; default: nowhere")
    parser.add_argument("--out", type=Path, help="default: bench/results/e2e-SHAPE.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants) - {ENGINE, *VARIANTS}:
        parser.error(f"no variant is called {', '.join(sorted(unknown))}")
    with run_folder(arguments.folder) as folder, collecting() as (collector, endpoint):
        # Traces steps and weight sessions only; traces of sample groups would be too many.
        os.environ |= {"SLIPSTREAM_TRACE_ENDPOINT": endpoint, "SLIPSTREAM_TRACE_RATIO": "0"}  # noqa: TID251
        _measure(arguments, folder, collector)


def _measure(arguments: argparse.Namespace, folder: Path, collector: Collector) -> None:
    is_smoke = arguments.smoke
    shape = smoke(SHAPES[arguments.shape]) if is_smoke else SHAPES[arguments.shape]
    results = None
    if not is_smoke:
        results = arguments.out or REPOSITORY / "bench" / "results" / f"e2e-{arguments.shape}.json"
    report: dict[str, Any] = {"shape": arguments.shape, "device": _device(), "variants": {}}
    report |= read_json(results)
    model = folder / f"model-{arguments.shape}"
    if not (model / "config.json").exists():
        shape.save_model(model)
    spec = folder / "spec.json"
    steps = FIRST_STEP + 1 if is_smoke else arguments.steps
    spec.write_text(json.dumps(shape.spec(model, steps=_MANY)))
    for variant in arguments.variants or [ENGINE, *VARIANTS]:
        if variant == ENGINE:
            report["engine"] = _engine_alone(arguments.shape, is_smoke=is_smoke)
            print(json.dumps(report["engine"]), flush=True)
        else:
            settings = (*VARIANTS[variant], *arguments.set)
            name = variant.replace(",", "").replace(" ", "")
            run = run_for(
                steps,
                folder / name,
                settings,
                spec=spec,
                timeout_s=arguments.within,
                min_steps=FIRST_STEP + _MIN_MEASURED - 1,
            )
            entry = _results(run, settings, report)
            if len(run.steps) < steps:
                entry["ended"] = f"after {len(run.steps)} of {steps} steps: --within"
            print("\n".join(collector.durations()), flush=True)
            collector.write(folder / f"{name}.trace.json")
            collector.spans.clear()
            report["variants"][variant] = {"settings": list(settings), **entry}
        if results is not None:
            write_json(results, report)
    _compare(report)


def _results(run: WholeRun, settings: tuple[str, ...], earlier: dict[str, Any]) -> dict[str, Any]:
    entry = facts(run, first=FIRST_STEP)
    # The engine alone sends each token by itself, so that a run's batches of tokens can be faster.
    entry["engine_best_step_tokens_per_s"] = max(
        round(step["generated_tokens_per_s"], 1) for step in run.steps
    )
    rate = max(
        entry["engine_best_step_tokens_per_s"], earlier.get("engine", {}).get("tokens_per_s", 0.0)
    )
    entry["least_step_s"] = round(
        least_step_s(
            trainer_s=entry["trainer_works_s"],
            response_tokens=entry["response_tokens_per_step"],
            engine_rate=rate,
        ),
        4,
    )
    entry["share_of_limit"] = round(entry["least_step_s"] / entry["step_s"], 3)
    print(f"\n{' '.join(settings)}")
    print("\n".join(time_line(run, max_rate=rate)))
    print(json.dumps(entry), flush=True)
    return entry


def _engine_alone(shape: str, *, is_smoke: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.e2e.engine", shape, *(["--smoke"] if is_smoke else [])]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    # vLLM may print after the results.
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(results[-1]))


def _compare(results: dict[str, Any]) -> None:
    """Prints a table of current and earlier measurements."""
    synchronous = results["variants"].get("synchronous", {}).get("samples_per_s")
    print(
        f"\n{'':12} samples/s  x sync  step s  least  share  sync p50  waits for weights  first step s"
    )
    for variant, entry in results["variants"].items():
        times = f"{entry['samples_per_s'] / synchronous:6.2f}" if synchronous else "     -"
        print(
            f"{variant:12} {entry['samples_per_s']:9.1f}  {times}  {entry['step_s']:6.2f}"
            f"  {entry['least_step_s']:5.2f}  {entry['share_of_limit']:5.2f}"
            f"  {entry['sync_ms']['p50'] or 0:8.1f}  {entry['waits_for_weights_share']:17.3f}"
            f"  {entry['first_step_s']:12.1f}"
        )


def _device() -> str:
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}" if count else "CPU"


if __name__ == "__main__":
    main()
