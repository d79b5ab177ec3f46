"""A recorded run of a real model with vLLM on one GPU, replayed: ``python -m bench.replay_gpu [--smoke]``.

SmolLM2-135M-Instruct trains 20 asynchronous steps of three-digit addition: ``lag_1``, ``plain`` (lag 4 with
partial rollouts), and ``batch_invariant`` (the same with ``rollout.reproducible: batch_invariant``). Each run
is recorded, then replayed without rollouts, and replayed with another loss. Rates, logprob differences and
the time of a version's digests go to ``bench/results/replay-gpu.json``. Bars: every version has its recorded
digest; another loss parts at step 1; recording takes at most 2 % of the trainer's time, the GPU's counted in;
with ``batch_invariant``, engine and trainer have equal logprobs at step 1.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.real_model.setting import Setting, smoke
from bench.real_model.smollm2 import make_folder
from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, output_of, run_folder, running, steps_in
from services.extras.replay.recorder import start_digests

RESULTS = REPOSITORY / "bench" / "results" / "replay-gpu.json"
_RECORDED = ("record=full", "validation.every=0")
_ASYNCHRONOUS = (
    *_RECORDED,
    "algorithm.max_staleness=4",
    "rollout.partial_rollout=true",
    "trainer.checkpoint.every=10",
    "trainer.prompts_per_step=16",
)
VARIANTS = {
    "lag_1": (*_RECORDED, "algorithm.max_staleness=1"),
    "plain": _ASYNCHRONOUS,
    "batch_invariant": (*_ASYNCHRONOUS, "rollout.reproducible=batch_invariant"),
}
_MAX_RECORD_FRACTION = 0.02
_FIRST = 3
"""First step whose rates count; before it, kernels are compiled."""
_OTHER_LOSS = ("algorithm.loss=gspo", "algorithm.aggregation=seq-mean-token-mean")
_DEADLINE_S = 3600
_REPEATS = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"some of: {' '.join(VARIANTS)}")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a CPU, with torch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheel", type=Path, help="the package with the model, or its parts")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--folder", type=Path, help="where runs and logs stay")
    arguments = parser.parse_args()
    setting = replace(Setting(), steps=arguments.steps)
    few: tuple[str, ...] = ()
    if arguments.smoke:
        setting, few = replace(smoke(setting), steps=3), ("trainer.prompts_per_step=2",)
    entries = {}
    with run_folder(arguments.folder) as folder:
        model = (arguments.model or folder / "model").resolve()
        make_folder(model, arguments.wheel)
        spec = folder / "spec.json"
        spec.write_text(json.dumps(setting.spec(model)))
        for name in arguments.variants or VARIANTS:
            settings = [*VARIANTS[name], *few, *arguments.set]
            entry = _recorded(folder / name, settings, spec, num_steps=setting.steps)
            entry |= _digest_seconds(model)
            entry |= _replayed(folder / name, num_steps=setting.steps)
            gpu = entry["digests_gpu_s"] / entry["trainer_step_s"]
            entry["bars"]["recording takes at most 2 % of the trainer's time"] = (
                entry["record_fraction"] + gpu <= _MAX_RECORD_FRACTION
            )
            if name == "batch_invariant":
                difference = entry["logprob_abs_diff_first_step"]
                entry["bars"]["engine and trainer have equal logprobs at step 1"] = (
                    difference == 0.0
                )
            entries[name] = entry
            print(json.dumps({name: entry}, indent=1), flush=True)
    if not arguments.smoke:
        results = read_json(RESULTS)
        write_json(RESULTS, results | entries)


def _recorded(folder: Path, settings: list[str], spec: Path, *, num_steps: int) -> dict[str, Any]:
    """Trains a recorded run to its end; returns its rates.

    Raises:
        SystemExit: If the run fails, with its output.
    """
    end = time.monotonic() + _DEADLINE_S
    with running(folder, settings, spec=spec) as process:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
    steps = steps_in(folder)
    if process.returncode != 0 or len(steps) < num_steps:
        raise SystemExit(f"{' '.join(settings)} failed:\n{output_of(folder)}")
    steady = steps[min(_FIRST, num_steps) - 1 :]
    (record,) = folder.glob("run_*/checkpoints/record")
    size = sum(file.stat().st_size for file in record.rglob("*.safetensors"))
    whole = sum(step["seconds_total"] for step in steady)
    return {
        "device": device_name(),
        "settings": settings,
        "steps": len(steps),
        "engine_tokens_per_s": median(step["generated_tokens_per_s"] for step in steady),
        "trainer_step_s": median(step["seconds_total"] for step in steady),
        "record_s": median(step["seconds_record"] for step in steady),
        "record_fraction": sum(step["seconds_record"] for step in steady) / whole,
        "record_bytes_per_step": size / (len(steps) + 1),
        "staleness_mean": mean(step["staleness_mean"] for step in steps),
        "logprob_abs_diff_first_step": steps[0]["rollout_logprob_abs_diff"],
        "logprob_abs_diff_max": max(step["rollout_logprob_abs_diff_max"] for step in steps),
    }


def _digest_seconds(model: Path) -> dict[str, float]:
    """Measures the digests of one version: the time to start them, and the rest until they are done."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    weights = [*loaded.named_parameters()]
    start_times, finish_times = [], []
    for _ in range(_REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        wait = start_digests(weights)
        start_times.append(time.perf_counter() - began)
        wait()
        finish_times.append(time.perf_counter() - began)
    host, whole = median(start_times), median(finish_times)
    return {"digests_host_s": host, "digests_gpu_s": whole - host if device == "cuda" else 0.0}


def _replayed(folder: Path, *, num_steps: int) -> dict[str, Any]:
    """Replays the run as it was, and its first two steps with another loss."""
    began = time.monotonic()
    steps, message = _replay(folder)
    seconds = time.monotonic() - began
    options = [option for setting in _OTHER_LOSS for option in ("--set", setting)]
    changed, changed_message = _replay(folder, *options, "--to", "2")
    equal = sum(not step["tensors"] for step in steps)
    parted = next((step["step"] for step in changed if step["tensors"]), None)
    return {
        "equal_versions": equal,
        "replay_s": seconds,
        "message": message,
        "nondeterministic": sorted({name for step in steps for name in step["nondeterministic"]}),
        "message_with_other_loss": changed_message,
        "bars": {
            "all versions are equal": equal == len(steps) == num_steps,
            "another loss parts at step 1": parted == 1,
        },
    }


def _replay(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Runs ``slipstream replay`` on the only run of a folder.

    Returns:
        The steps without the start, and the last message.

    Raises:
        SystemExit: If nothing can be replayed, with the output.
    """
    module = [sys.executable, "-m", "services.cli.main", "replay", "addition", "--json"]
    command = [*module, "--state-directory", str(folder), *options]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode not in (0, 1) or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in lines[1:]], done.stderr.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
