"""Trains in two checkouts and compares every bit: ``python -m bench.bits CHECKOUT [--steps N]``.

``examples/sort4.yaml`` is trained in this checkout and in ``CHECKOUT`` (``git worktree add DIR COMMIT``),
with the interpreter that runs this command: without staleness, so that each step trains what the last weights
sampled, and with batch-invariant rollouts, whose responses do not depend on what else is decoded. Each
checkout has its separate cache, so the warm start is trained twice too. Bar: equal losses, gradient norms and
rewards of all steps, and equal tensors of the last checkpoint, weights and moments. Times do not count, so
other work on the machine does not matter. Writes ``bench/results/bits.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bench.report import report_to
from bench.whole_run import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results" / "bits.json"
METRICS = (
    *("loss", "grad_norm", "reward_mean", "entropy", "ppo_kl", "proximal_ppl"),
    *("response_tokens", "advantage_abs_mean"),
)
_SETTINGS = ("algorithm.max_staleness=0", "rollout.reproducible=batch_invariant")
_TIMEOUT_S = 3600.0


def train(checkout: Path, folder: Path, steps: int) -> Path:
    """Trains with the code of a checkout; returns the folder of the run."""
    code = [checkout, checkout / "proto" / "gen", checkout / "services" / "client"]
    environment = {
        **os.environ,  # noqa: TID251 -- of the programs that it starts
        "PYTHONPATH": os.pathsep.join(map(str, code)),
        "SLIPSTREAM_TRAINER_MODEL_CACHE": str(folder / "models"),
    }
    settings = [f"--set={setting}" for setting in (*_SETTINGS, f"trainer.steps={steps}")]
    spec, state = checkout / "examples" / "sort4.yaml", folder / "runs"
    program = "from services.cli.main import app; app()"
    subprocess.run(
        [sys.executable, "-c", program, "run", spec, *settings, "--state-directory", state],
        cwd=folder,
        env=environment,
        check=True,
        timeout=_TIMEOUT_S,
    )
    (run,) = state.glob("run_*")
    return run


def checkpoint(run: Path) -> dict[str, Tensor]:
    """Returns the tensors of a run's last checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    tensors: dict[str, Tensor] = {}
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 -- no mapping
    return tensors


def compared(before: Path, after: Path) -> dict[str, Any]:
    """Compares two runs.

    Raises:
        SystemExit: If one of them has no checkpoint, or another number of steps.
    """
    steps = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (before, after)
    ]
    tensors = [checkpoint(run) for run in (before, after)]
    if len(steps[0]) != len(steps[1]) or tensors[0].keys() != tensors[1].keys():
        sys.exit(f"{before} and {after} have other steps, or other tensors in their checkpoints")
    other_steps = [
        metrics["step"]
        for metrics, other_metrics in zip(*steps, strict=True)
        if _metrics(metrics) != _metrics(other_metrics)
    ]
    other_tensors = [
        name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])
    ]
    return {
        "steps": len(steps[0]),
        "tensors": len(tensors[0]),
        "values": sum(value.numel() for value in tensors[0].values()),
        "different_steps": other_steps,
        "different_tensors": other_tensors,
        "losses": [step["loss"] for step in steps[1]],
    }


def _metrics(step: Mapping[str, Any]) -> list[Any]:
    return [step[name] for name in METRICS]


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    checkouts = (options.checkout.resolve(), REPOSITORY)
    with tempfile.TemporaryDirectory() as temporary:
        runs = []
        for number, checkout in enumerate(checkouts):
            folder = Path(temporary, str(number))
            folder.mkdir()
            runs.append(train(checkout, folder, options.steps))
        result = compared(*runs)
    report_to(RESULTS, {"commits": [*map(_commit, checkouts)], **result})
    if result["different_steps"] or result["different_tensors"]:
        sys.exit("the checkouts train different bits")


if __name__ == "__main__":
    main()
