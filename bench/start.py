"""Measures the parts of a run's start: ``python -m bench.start [--smoke] [--placement turns]``.

Runs of a random model train one step each. The first one finds empty caches of compiled code and kernels, the
others those that it has filled. Every run reports these parts in its output and in ``start.json``. Results
go to ``bench/results/start.json``, one entry for each shape and placement. Bar: 30 s more than the engine
itself needs (the phase ``starting the engine`` of the first rollout).

The shape ``sort4`` is the example without its warm start. Entries have the processor seconds of each process
until the first step, which other work on the machine disturbs less than the time.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.e2e.shapes import DUEL, Shape, smoke
from bench.report import device_name, read_json, write_json
from bench.whole_run import REPOSITORY, output_of, running

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
_SORT4 = "sort4"
_SORT4_SETTINGS = (
    "model.warm_start=null",
    "trainer.steps=10000",
    "validation.every=0",
    "validation.before_train=false",
)
_SAMPLE_S = 0.1
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
    parser.add_argument("--shape", choices=[*_SHAPES, _SORT4], default="duel")
    parser.add_argument("--placement", choices=_PLACEMENTS, default="shared")
    parser.add_argument("--runs", type=int, default=2, help="the first one with empty caches")
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    parser.add_argument("--label", default="", help="added to the name of the entry")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spec, settings, caches = folder / "spec.json", [*arguments.set], folder / "caches"
        if arguments.shape == _SORT4:
            spec = REPOSITORY / "examples" / "sort4.yaml"
            settings += _SORT4_SETTINGS
        else:
            shape: Shape = _SHAPES[arguments.shape]
            _write_spec(smoke(shape) if arguments.smoke else shape, spec, arguments.placement)
        for variable, name in _CACHES.items():
            (caches / name).mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(caches / name)  # noqa: TID251 -- the run inherits it
        starts = []
        for number in range(arguments.runs):
            state = folder / f"run-{number}"
            starts.append(_start(spec, state, settings))
            _print(starts[-1], "empty caches" if number == 0 else "filled caches")
    report = {
        "device": device_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "settings": settings,
        "first_step_s": [round(sum(start["seconds"].values()), 1) for start in starts],
        "engine_s": [_engine_s(start) for start in starts],
        "processor_s": [round(sum(start["processor_s"].values()), 1) for start in starts],
        "starts": starts,
    }
    if not arguments.smoke:
        name = " ".join(filter(None, (arguments.shape, arguments.placement, arguments.label)))
        write_json(RESULTS, read_json(RESULTS) | {name: report})


def _write_spec(shape: Shape, spec: Path, placement: str) -> None:
    model = spec.with_name("model")
    shape.save_model(model)
    document = shape.spec(model, steps=10_000)
    document["topology"] = _PLACEMENTS[placement]
    spec.write_text(json.dumps(document))


def _start(spec: Path, state: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Trains one step; returns the parts of the start and the processor seconds of each process."""
    processor_s: dict[psutil.Process, tuple[str, float]] = {}
    with running(state, settings, spec=spec) as command:
        root = psutil.Process(command.pid)
        while command.poll() is None and not any(state.glob("run_*/start.json")):
            _sample(root, processor_s)
            time.sleep(_SAMPLE_S)
        if command.poll() is not None:
            raise SystemExit(f"{spec} ended too early:\n{output_of(state)}")
    (report,) = state.glob("run_*/start.json")
    start: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    by_service: dict[str, float] = defaultdict(float)
    for name, seconds in processor_s.values():
        by_service[name] += seconds
    start["processor_s"] = {name: round(by_service[name], 2) for name in sorted(by_service)}
    return start


def _sample(root: psutil.Process, processor_s: dict[psutil.Process, tuple[str, float]]) -> None:
    """Updates the service and the processor seconds of each process of a run."""
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            services = [word for word in process.cmdline() if word.startswith("services.")]
            times = process.cpu_times()
            name = services[0].removeprefix("services.") if services else "others"
            processor_s[process] = (name, times.user + times.system)


def _engine_s(start: Mapping[str, Any]) -> float:
    """Returns the seconds that the engine of the first rollout took for its own start."""
    return float(start["workers"]["rollout-0"].get(_ENGINE, 0.0))


def _print(start: Mapping[str, Any], caches: str) -> None:
    total, engine_s = sum(start["seconds"].values()), _engine_s(start)
    print(f"{caches}: first step after {total:.1f} s, {total - engine_s:.1f} s besides the engine")
    parts = {"the command": start["seconds"], **start["workers"]}
    for name, seconds in {**parts, "processor seconds": start["processor_s"]}.items():
        print(f"  {name}")
        for label, spent in seconds.items():
            print(f"    {spent:7.2f}  {label}")


if __name__ == "__main__":
    main()
