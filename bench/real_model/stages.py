"""Three stages of a real model: ``python -m bench.real_model.stages [--seeds 0 1 2] [--smoke]``.

``examples/addition``: fine-tuning on answers, reinforcement learning from its export, preference
pairs from the export of that, each through ``slipstream run`` as a user starts it. The held-out
curves (256 questions, greedy) go to ``bench/results/real-model-stages.json``.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.real_model.__main__ import ON_CPU, RESULTS, keep, train
from bench.real_model.smollm2 import make_folder
from bench.whole_run import REPOSITORY, run_folder
from services.common.runspec.loader import load_spec
from services.extras.export.checkpoint import export_checkpoint

EXAMPLES = REPOSITORY / "examples" / "addition"
STAGES = ("sft", "rl", "dpo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--together", action="store_true", help="all at once: curves, no times")
    parser.add_argument("--smoke", action="store_true", help="two steps of each on a CPU")
    parser.add_argument("--model", type=Path, help="where the model is, or is made")
    parser.add_argument("--wheel", type=Path, help="the package with the model, or its parts")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--folder", type=Path, help="where runs and logs stay")
    arguments = parser.parse_args()
    settings = [*arguments.set, *(ON_CPU if arguments.smoke else ())]
    with run_folder(arguments.folder) as folder:
        model = (arguments.model or folder / "model").resolve()
        make_folder(model, arguments.wheel)

        def measured(seed: int) -> list[dict[str, Any]]:
            return chain(model, folder / str(seed), [f"seed={seed}", *settings])

        with ThreadPoolExecutor(len(arguments.seeds) if arguments.together else 1) as pool:
            entries = [
                entry
                for entries_of_seed in pool.map(measured, arguments.seeds)
                for entry in entries_of_seed
            ]
    if not arguments.smoke:
        keep(entries, RESULTS.with_name(f"{RESULTS.stem}-stages.json"))


def chain(model: Path, folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Trains all stages; returns an entry for each."""
    entries = []
    for stage in STAGES:
        stage_folder, spec = folder / stage, EXAMPLES / f"{stage}.yaml"
        # Only reinforcement learning has groups.
        own_settings = [
            setting for setting in settings if stage == "rl" or "group_size" not in setting
        ]
        stage_settings = [*own_settings, f"model.path={model}"]
        entry = {
            "variant": stage,
            "seed": _seed(settings),
            **train(stage_folder, stage_settings, spec),
        }
        print(json.dumps(entry), flush=True)
        entries.append(entry)
        if stage != STAGES[-1]:
            model = folder / f"{stage}-model"
            newest = max(stage_folder.glob("run_*/checkpoints/step-*"))
            export_checkpoint(newest, load_spec(spec, stage_settings), model)
    return entries


def _seed(settings: list[str]) -> int:
    return next(
        int(setting.removeprefix("seed=")) for setting in settings if setting.startswith("seed=")
    )


if __name__ == "__main__":
    main()
