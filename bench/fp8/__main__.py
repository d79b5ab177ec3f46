"""Rollouts in FP8 against rollouts in bfloat16: ``python -m bench.fp8 engine|run|learning [--smoke]``.

``engine``: tokens per second of an engine with Qwen2.5-7B's shape and random weights, with 256 and
1,024 running requests, and the pause of an adoption. Bar: ``fp8`` >= 1.25x in both. Results go to
``bench/results/fp8-engine.json``.

``run``: a whole run at lag 4 on one GPU that trainer and vLLM share: samples per second and the time
of a sync. ``--shape 7b`` has Qwen2.5-7B's shape and trains adapters, ``1.3b`` all weights. Bars: >=
1.15x samples/s, a sync that takes no longer. Results go to ``bench/results/fp8-run.json``.

``learning``: SmolLM2-135M-Instruct on three-digit addition, in bfloat16, in FP8 with the correction,
and in FP8 with a policy gradient that takes the trainer's probabilities for those that sampled. Bar:
the corrected held-out score at most .03 below bfloat16's, both of the trained weights in bfloat16.
Results go to ``bench/results/fp8-learning.json``.

Each part writes its results as they arrive; ``--only`` measures some variants and keeps the others.
"""

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from bench.e2e.shapes import QWEN_7B, SHAPES, Shape, smoke
from bench.e2e.timeline import facts
from bench.real_model import setting as real_model
from bench.real_model.__main__ import train
from bench.real_model.smollm2 import make_folder
from bench.report import device_name, read_json, write_json
from bench.rollout.driven import make_config, opened, random_weights, requests
from bench.whole_run import REPOSITORY, exported, run_folder, run_for, steps_in
from services.rollout.engines.base import Engine

RESULTS = REPOSITORY / "bench" / "results"
_UNCORRECTED = Path(__file__).with_name("uncorrected.py")
_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8_block": {"quantization": "fp8_block"},
    "fp8, cache too": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
_FP8 = ("rollout.quantization=fp8", "rollout.max_mismatch=null")
_LEARNING = {
    "bf16": (),
    "fp8": _FP8,
    "fp8, 4 layers exact": (*_FP8, "rollout.unquantized_layers=4"),
    "fp8, 15 layers exact": (*_FP8, "rollout.unquantized_layers=15"),
    "fp8, uncorrected": (
        *_FP8,
        "algorithm.correction=bypass",
        f"algorithm.loss={_UNCORRECTED}:loss",
    ),
}
_CACHE_BYTES = 24 << 30
"""KV cache of 1,024 requests with 320 tokens, so that no precision decodes more of them at once."""
_ARGUMENTS = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": _CACHE_BYTES,
    # Share of the GPU's memory that must be free at the start; it does not limit the cache.
    "gpu_memory_utilization": 0.6,
}
_SHARED_CACHE = 6 << 30
"""KV cache of each engine if several runs share a GPU."""
_FREED_S = 60.0
_FIRST = 4
_MISMATCH = ("kl_rollout", "ess", "is_clipped_fraction", "rollout_logprob_abs_diff")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--smoke", action="store_true", help="tiny models on a CPU")
    common.add_argument("--only", nargs="*", help="names of the variants to measure")
    common.add_argument("--set", action="append", default=[], help="further settings of a run")
    common.add_argument("--folder", type=Path, help="where models, runs and logs stay")
    common.add_argument("--out", type=Path)
    engine = parts.add_parser("engine", parents=[common])
    engine.add_argument("--running", type=int, nargs="*", default=[256, 1024])
    engine.add_argument("--arguments", default="{}", help="further engine arguments, as JSON")
    engine.add_argument("--label", default="", help="added to the names of the results")
    run = parts.add_parser("run", parents=[common])
    run.add_argument("--shape", choices=("1.3b", "7b"), default="1.3b")
    run.add_argument("--steps", type=int, default=14)
    learning = parts.add_parser("learning", parents=[common])
    learning.add_argument("--seeds", type=int, nargs="*", default=[0])
    learning.add_argument("--steps", type=int)
    learning.add_argument("--lag", type=int, default=1)
    learning.add_argument("--together", action="store_true", help="all at once: curves, no times")
    learning.add_argument("--wheel", type=Path, help="the package with the model, or its parts")
    arguments = parser.parse_args()
    report = Report(
        None if arguments.smoke else arguments.out or RESULTS / f"fp8-{arguments.part}.json"
    )
    with run_folder(arguments.folder) as arguments.folder:
        {"engine": _engines, "run": _runs, "learning": _learn}[arguments.part](arguments, report)


class Report:
    """Results by variant, which are printed and written as they arrive.

    Args:
        out: The file, which keeps its other variants; None only prints.
    """

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self.results: dict[str, Any] = read_json(out)

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        """Adds a variant's entry."""
        device = device_name()
        self.results[name] = {"device": device, **entry}
        print(json.dumps({name: self.results[name]}), flush=True)
        self._write()

    def compare(self, bars: Mapping[str, Any]) -> None:
        """Adds the comparison with the bars."""
        self.results["bars"] = bars
        print(json.dumps({"bars": bars}, indent=1), flush=True)
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            write_json(self._out, self.results)


def _chosen(names: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    unknown = sorted({*(arguments.only or ())} - {*names})
    if unknown:
        raise SystemExit(f"--only has {unknown}; the variants are {', '.join(names)}")
    return [name for name in names if not arguments.only or name in arguments.only]


def _engines(arguments: argparse.Namespace, report: Report) -> None:
    shape = smoke(QWEN_7B) if arguments.smoke else QWEN_7B
    running = [4, 8] if arguments.smoke else arguments.running
    names = [
        name
        for name, precision in _PRECISIONS.items()
        if not (arguments.smoke and "kv_cache_dtype" in precision)
    ]
    for name in _chosen(names, arguments):
        entry = asyncio.run(
            _measure_engine(shape, _PRECISIONS[name], running, json.loads(arguments.arguments))
        )
        report.add(name + arguments.label, entry)
        _wait_for_memory()
    results = report.results
    if "bf16" not in results:
        return
    bars: dict[str, Any] = {}
    for name in results:
        if name not in {"bf16", "bars"}:
            ratios = {
                count: round(rate / results["bf16"]["tokens_per_s"][count], 3)
                for count, rate in results[name]["tokens_per_s"].items()
                if count in results["bf16"]["tokens_per_s"]
            }
            pairs = zip(results[name]["logprobs"], results["bf16"]["logprobs"], strict=True)
            bars[name] = {
                "of bf16's tokens/s": ratios,
                "at least 1.25": all(ratio >= 1.25 for ratio in ratios.values()),
                "logprob_abs_diff to bf16": round(mean(abs(a - b) for a, b in pairs), 4),
                "pause of an adoption, of bf16's": round(
                    median(results[name]["adopt_ms"]) / median(results["bf16"]["adopt_ms"]), 2
                ),
            }
    report.compare(bars)


def _wait_for_memory() -> None:
    """Waits until the ended engine's process has released its GPU memory."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    deadline = time.monotonic() + _FREED_S
    while time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info()
        if free > 0.9 * total:
            return
        time.sleep(0.5)


async def _measure_engine(
    shape: Shape, precision: Mapping[str, str], running: Sequence[int], further: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures an engine with all slots occupied by responses of equal length.

    Args:
        further: Further arguments of the engine.
    """
    num_tokens, repeats, is_vllm = (8, 1, False) if shape.engine == "torch" else (256, 2, True)
    engine_config = make_config(
        shape.config(),
        dtype=getattr(torch, shape.dtype),
        max_running=max(running),
        arguments={**_ARGUMENTS, **further} if is_vllm else {},
        **precision,
    )
    begin = time.perf_counter()
    async with opened(shape.engine, engine_config) as engine:
        start_s = time.perf_counter() - begin
        weights = random_weights(engine, engine_config)
        adopt_ms = [1e3 * await engine.adopt_weights(version, weights) for version in range(6)]
        text = tuple((91 * index + 7) % shape.vocabulary for index in range(200))
        logprobs = await engine.score(text)
        del weights
        if engine_config.device.type == "cuda":
            torch.cuda.empty_cache()
        rates: dict[str, float] = {}
        for count in running:
            await _rate(engine, f"warm{count}", count, num_tokens)
            rates_per_round = [
                await _rate(engine, f"{count}.{index}", count, num_tokens)
                for index in range(repeats)
            ]
            rates[str(count)] = round(max(rates_per_round), 1)
        entry = {
            "tokens_per_s": rates,
            "response_tokens": num_tokens,
            "adopt_ms": [round(value, 1) for value in adopt_ms[1:]],
            "start_s": round(start_s, 1),
            "logprobs": [round(value, 5) for value in logprobs],
        }
        if engine_config.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(engine_config.device)
            entry["used_gb"] = round((total - free) / 1e9, 2)
    return entry


async def _rate(engine: Engine, label: str, count: int, num_tokens: int) -> float:
    """Returns the tokens per second of requests that all run at once."""
    todo = requests(label, count, num_tokens, 250)
    began = time.perf_counter()
    await asyncio.gather(*[engine.generate(request) for request in todo])
    return count * num_tokens / (time.perf_counter() - began)


def _runs(arguments: argparse.Namespace, report: Report) -> None:
    shape = SHAPES["geometric"]
    if arguments.shape == "7b":
        adapters = {"lora": {"rank": 32}}
        shape = Shape(**{**_fields(QWEN_7B), "trainer": {**QWEN_7B.trainer, **adapters}})
    if arguments.smoke:
        shape = smoke(SHAPES["geometric"])
    model, spec = arguments.folder / f"model-{arguments.shape}", arguments.folder / "spec.json"
    if not model.exists():
        shape.save_model(model)
    spec.write_text(json.dumps(shape.spec(model, steps=10_000)))
    names = ["bf16", "fp8"]
    steps = 5 if arguments.smoke else arguments.steps
    for name in _chosen(names, arguments):
        precision = [f"rollout.{key}={value}" for key, value in _PRECISIONS[name].items()]
        settings = ["algorithm.max_staleness=4", *precision, *arguments.set]
        folder = arguments.folder / f"{arguments.shape}-{name}"
        run = run_for(steps, folder, settings, spec=spec)
        figures = facts(run, first=_FIRST)
        report.add(
            f"{arguments.shape}, {name}",
            {
                "settings": settings,
                **{key: figures[key] for key in ("steps", "step_s", "samples_per_s", "sync_ms")},
                **{
                    key: figures[key]
                    for key in ("engine_tokens_per_s", "trainer_works_share", "first_step_s")
                },
                **_mismatch(run.steps[_FIRST - 1 :]),
            },
        )
    first, second = (report.results.get(f"{arguments.shape}, {name}") for name in names)
    if first is not None and second is not None:
        share = second["samples_per_s"] / first["samples_per_s"]
        sync = second["sync_ms"]["p50"] / first["sync_ms"]["p50"]
        bars = {
            "of bf16's samples/s": round(share, 3),
            "at least 1.15": share >= 1.15,
            "of bf16's sync": round(sync, 2),
            "no longer": sync <= 1.0,
        }
        report.compare({**report.results.get("bars", {}), arguments.shape: bars})


def _fields(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def _mismatch(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(mean(step[name] for step in steps), 5) for name in _MISMATCH}


def _learn(arguments: argparse.Namespace, report: Report) -> None:
    spec, settings = _task(arguments)
    settings += [f"algorithm.max_staleness={arguments.lag}", *arguments.set]
    if arguments.steps:
        settings.append(f"trainer.steps={arguments.steps}")
    if arguments.together and not arguments.smoke:
        settings.append(f"rollout.engine_arguments.kv_cache_memory_bytes={_SHARED_CACHE}")
    jobs = [(name, seed) for name in _chosen([*_LEARNING], arguments) for seed in arguments.seeds]

    def measured(job: tuple[str, int]) -> None:
        name, seed = job
        folder = arguments.folder / f"{name}-{seed}".replace(" ", "").replace(",", "-")
        entry = train(folder, [*settings, *_LEARNING[name], f"seed={seed}"], spec)
        steps = steps_in(folder)
        report.add(
            f"{name}, seed {seed}",
            {
                "lag": arguments.lag,
                "steps": len(steps),
                "curve": entry["curve"],
                "exact_greedy": _exact_score(folder, settings, spec)
                if _LEARNING[name]
                else entry["curve"][-1]["greedy"],
                "reward_mean_last_10": round(mean(s["reward_mean"] for s in steps[-10:]), 4),
                **_mismatch(steps),
                "kl_rollout_last": round(steps[-1]["kl_rollout"], 5),
            },
        )

    with ThreadPoolExecutor(len(jobs) if arguments.together else 1) as pool:
        list(pool.map(measured, jobs))
    entries = {
        name: runs
        for name in _LEARNING
        if (
            runs := [
                entry
                for key, entry in report.results.items()
                if key.rpartition(", seed ")[0] == name and "exact_greedy" in entry
            ]
        )
    }
    scores = {name: mean(run["exact_greedy"] for run in runs) for name, runs in entries.items()}
    served_scores = {
        name: mean(run["curve"][-1]["greedy"] for run in runs) for name, runs in entries.items()
    }
    bars: dict[str, Any] = {
        "greedy at the end": {k: round(v, 4) for k, v in scores.items()},
        "by the engine of the run": {k: round(v, 4) for k, v in served_scores.items()},
    }
    if {"bf16", "fp8"} <= scores.keys():
        bars["at most .03 lower"] = scores["bf16"] - scores["fp8"] <= 0.03
    report.compare(bars)


def _exact_score(folder: Path, settings: Sequence[str], spec: Path) -> float:
    """Returns the held-out score of a run's last weights in the trainer's dtype.

    The run's own scores are those of the weights that its engine rounds.
    """
    model = exported(folder, spec)
    exact = [
        *(f"model.path={model}", "model.warm_start=null"),
        *("trainer.steps=1", "validation.every=1"),
    ]
    common = [
        setting
        for setting in settings
        if not setting.startswith(("trainer.steps", "validation.", "model."))
    ]
    entry = train(folder / "exact", [*common, *exact], spec)
    return float(entry["curve"][0]["greedy"])


def _task(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """Returns the specification that learns, and settings."""
    if arguments.smoke:
        settings = ["trainer.steps=3", "validation.every=3", "model.warm_start.steps=20"]
        return REPOSITORY / "examples" / "sort4.yaml", settings
    model = arguments.folder / "model"
    make_folder(model, arguments.wheel)
    spec = arguments.folder / "spec.json"
    spec.write_text(json.dumps(real_model.Setting().spec(model)))
    return spec, []


if __name__ == "__main__":
    main()
