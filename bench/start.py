"""Measures the parts of a run's start: ``python -m bench.start [--smoke] [--placement turns]``.

Runs of a random model train one step each. The first one finds empty caches of compiled code and kernels, the
others those that it has filled. Every run reports these parts in its output and in ``start.json``. Results
go to ``bench/results/start.json``, one entry for each shape and placement. Bar: 30 s more than the engine
itself needs (the phase ``starting the engine`` of the first rollout).
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.e2e.shapes import DUEL, Shape, smoke
from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, run_for

RESULTS = REPOSITORY / "bench" / "results" / "start.json"
_ENGINE = "starting the engine"
_SMALL = replace(
    DUEL,
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    vocabulary=49_152,
    prompts_per_step=2,
    group_size=2,
    max_response_tokens=8,
    engine="torch",
    trainer={},
)
"""SmolLM2-135M's size and a short step, for a CPU."""
_SHAPES = {"duel": DUEL, "small": _SMALL}
_PLACEMENTS = {"shared": {}, "turns": {"placement": "colocated"}}
_CACHES = {
    "XDG_CACHE_HOME": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "",
}
"""Folders of compiled code, below that of the measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no results")
    parser.add_argument("--shape", choices=_SHAPES, default="duel")
    parser.add_argument("--placement", choices=_PLACEMENTS, default="shared")
    parser.add_argument("--runs", type=int, default=2, help="the first one with empty caches")
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    parser.add_argument("--label", default="", help="added to the name of the entry")
    arguments = parser.parse_args()
    shape: Shape = _SHAPES[arguments.shape]
    shape = smoke(shape) if arguments.smoke else shape
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, spec, caches = folder / "model", folder / "spec.json", folder / "caches"
        shape.save_model(model)
        document = shape.spec(model, steps=10_000)
        document["topology"] = _PLACEMENTS[arguments.placement]
        spec.write_text(json.dumps(document))
        for variable, name in _CACHES.items():
            (caches / name).mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(caches / name)  # noqa: TID251 -- the run inherits it
        starts = []
        for number in range(arguments.runs):
            state = folder / f"run-{number}"
            run_for(1, state, arguments.set, spec=spec)
            (written,) = state.glob("run_*/start.json")
            starts.append(json.loads(written.read_text(encoding="utf-8")))
            _print(starts[-1], "empty caches" if number == 0 else "filled caches")
    found = {
        "device": device_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "settings": arguments.set,
        "first_step_s": [round(sum(start["seconds"].values()), 1) for start in starts],
        "engine_s": [_engine_s(start) for start in starts],
        "starts": starts,
    }
    if not arguments.smoke:
        name = " ".join(filter(None, (arguments.shape, arguments.placement, arguments.label)))
        write_json(RESULTS, read_json(RESULTS) | {name: found})


def _engine_s(start: Mapping[str, Any]) -> float:
    """Returns the seconds that the engine of the first rollout took for its own start."""
    return float(start["workers"]["rollout-0"].get(_ENGINE, 0.0))


def _print(start: Mapping[str, Any], caches: str) -> None:
    total, engine_s = sum(start["seconds"].values()), _engine_s(start)
    print(f"{caches}: first step after {total:.1f} s, {total - engine_s:.1f} s besides the engine")
    for name, seconds in {"the command": start["seconds"], **start["workers"]}.items():
        print(f"  {name}")
        for part, spent in seconds.items():
            print(f"    {spent:7.2f}  {part}")


if __name__ == "__main__":
    main()
