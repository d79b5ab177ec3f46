"""A run with vLLM on a GPU, recorded and replayed: ``python -m bench.real_model.replayed [--smoke]``.

SmolLM2-135M-Instruct trains 20 steps of addition, one step off-policy, with ``record: full``; then
``slipstream replay`` trains them again without rollouts. Bars: all versions have the recorded digests, and
recording takes at most 2 % of a step. Results go to ``bench/results/replay-gpu.json``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from bench.real_model.__main__ import ON_CPU, RESULTS
from bench.real_model.setting import Setting, smoke
from bench.real_model.smollm2 import make_folder
from bench.whole_run import REPOSITORY, whole_run

_STEADY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheel", type=Path, help="the package with the model, or its parts")
    parser.add_argument("--folder", type=Path, help="where run and logs stay")
    parser.add_argument("--smoke", action="store_true", help="two steps on a CPU")
    arguments = parser.parse_args()
    setting = smoke(Setting()) if arguments.smoke else Setting()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = (arguments.model or folder / "model").resolve()
        make_folder(model, arguments.wheel)
        spec = folder / "spec.json"
        spec.write_text(json.dumps(setting.spec(model)))
        settings = [
            *("record=full", "algorithm.max_staleness=1", "validation.every=0"),
            *(ON_CPU if arguments.smoke else (f"trainer.steps={arguments.steps}",)),
            *arguments.set,
        ]
        run = whole_run(folder, settings, spec=spec)
        steady = run.steps[_STEADY:] or run.steps
        begin = time.monotonic()
        command = (sys.executable, "-m", "services.cli.main", "replay", "addition", "--json")
        replayed = subprocess.run(
            [*command, "--state-directory", str(folder)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begin
    steps = [json.loads(line) for line in replayed.stdout.splitlines() if line.startswith("{")]
    found = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "settings": settings,
        "steps": len(run.steps),
        "equal_versions": sum(not step["tensors"] for step in steps if step["step"]),
        "staleness_mean": sum(step["staleness_mean"] for step in run.steps) / len(run.steps),
        "step_s": median(step["seconds_total"] for step in steady),
        "record_fraction": sum(step["seconds_record"] for step in steady)
        / sum(step["seconds_total"] for step in steady),
        "replay_s": round(seconds, 1),
        "message": replayed.stderr.strip().splitlines()[-1],
        "nondeterministic": sorted({name for step in steps for name in step["nondeterministic"]}),
    }
    print(json.dumps(found, indent=1), flush=True)
    if not arguments.smoke:
        out = RESULTS.with_name("replay-gpu.json")
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
