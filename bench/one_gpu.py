"""A whole run on one GPU, which trainer and engine share: ``python -m bench.one_gpu [--smoke]``.

A model of 1.5 billion parameters trains through all services with vLLM, without any memory setting.
Each process's peak memory, as the driver counts it, is compared with the plan before the start; the
trainer's allocator reserves more than is in use, so that amount is reported too. Results go to
``bench/results/one-gpu.json``. Bar: ten steps, and peaks within 5 % of the plan.

With ``--set topology.placement=colocated`` they take turns, and the time of a switch is reported by
part in ``bench/results/one-gpu-colocated.json``. Bar: a switch of 1.3 billion parameters within 1.0
s.

With ``--lora 32`` the model has Qwen2.5-7B's shape with adapters of that rank on all linear
modules, in ``bench/results/one-gpu-lora.json``; with ``--lora 32 --base nf4``, Qwen2.5-14B's shape with
a base in 4 bits, in ``bench/results/one-gpu-lora-nf4.json``.

With ``--hybrid`` three of four layers are recurrent (``flash-linear-attention`` computes them if it is
installed), with ``--dense`` all attend, in as many weights; both go to ``bench/results/hybrid-gpu.json``.
Bar: an MFU within 10 % of the dense model's. ``bench.trainer.hybrids`` names the kernels that take the time.

With ``--duel`` the lengths are geometric with a mean of 600, as ``bench.one_gpu_peer`` trains them with TRL;
each setting's entry goes to ``bench/results/one-gpu-duel.json``. With ``--tail`` their mean is 460 and the
longest has 3,072 tokens (``one-gpu-tail.json``). Bar at lag 4 on an H200: 53.8 samples/s.

With ``--whole-8b`` all 8.2 billion weights of Qwen3-8B's shape are trained, with moments in host memory and
weights that arrive in place; each setting's entry goes to ``bench/results/one-gpu-8b.json``.

With ``--mixture-16b`` the trainer has one GPU and the engine another: a mixture in layers of Qwen3-30B-A3B's
shape with 15.6 billion weights, of which a token uses 2.9 billion. Moments in 8 bits and the copy for the
transfer are in host memory; each setting's entry goes to ``bench/results/one-gpu-16b.json``. ``--layers`` is
for less memory. Bars: ten steps, weight sync p50 within 1.5 s, an MFU of .25, peaks within 5 % of the plan.

With ``--mps`` the processes use their own Multi-Process Service, which ends with the run.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.e2e.shapes import (
    DENSE,
    DUEL,
    HYBRID,
    QWEN3_8B,
    QWEN3_MOE_16B,
    QWEN_7B,
    QWEN_14B,
    SHAPES,
    TAIL,
    Shape,
    smoke,
)
from bench.e2e.timeline import facts, time_line
from bench.gpu_memory import planned_gb, watched_memory
from bench.mps import serving_mps
from bench.report import device_name, read_json, write_json
from bench.switches import switches
from bench.whole_run import REPOSITORY, run_folder, run_for, whole_run
from services.common.runspec.loader import load_spec

RESULTS = REPOSITORY / "bench" / "results"
HYBRIDS = RESULTS / "hybrid-gpu.json"
_TASKS = REPOSITORY / "bench" / "e2e" / "tasks.py"
_FIRST = 3
_UNSAVED = ("trainer.checkpoint.every_s=0", "trainer.checkpoint.at_end=false")
_IN_PLACE = ("weight_sync.mode=inplace",)
_OFFLOADED = ("weight_sync.mode=offloaded",)
# A vocabulary of real size: lengths are given, because a random model would not end its responses.
_SHAPE = replace(
    SHAPES["geometric"],
    vocabulary=151_936,
    workflow=f"{_TASKS}:Lognormal",
    workflow_arguments={"least": 16, "most": 1024, "median": 220.0, "sigma": 0.7},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without a GPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    parser.add_argument("--lora", type=int, help="rank of adapters, of a model of 7B")
    parser.add_argument(
        "--base", choices=("int8", "nf4"), help="dtype of a base of 14B, with --lora"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hybrid", action="store_true", help="a model with recurrent layers")
    kinds.add_argument("--dense", action="store_true", help="a model of the hybrid's size without")
    kinds.add_argument("--duel", action="store_true", help="the lengths of bench.one_gpu_peer")
    kinds.add_argument("--tail", action="store_true", help="a mean of 460 tokens, at most 3,072")
    kinds.add_argument("--whole-8b", action="store_true", help="all weights of a model of 8B")
    kinds.add_argument("--mixture-16b", action="store_true", help="a mixture of 16B on two GPUs")
    parser.add_argument("--layers", type=int, help="layers of the mixture, instead of 24")
    parser.add_argument("--mps", action="store_true", help="the GPU serves both at the same time")
    parser.add_argument("--folder", type=Path, help="where run and logs stay; default: nowhere")
    parser.add_argument(
        "--out", type=Path, help="file of this result alone, instead of the usual one"
    )
    arguments = parser.parse_args()
    shape = _shape(arguments)
    if arguments.lora is not None:
        lora = {"rank": arguments.lora, "base_dtype": arguments.base}
        shape = replace(shape, trainer={**shape.trainer, "lora": lora})
    is_colocated = "topology.placement=colocated" in arguments.set
    names = (
        *("one-gpu", "lora" if arguments.lora else "", arguments.base or ""),
        "colocated" if is_colocated else "",
    )
    if is_colocated:  # ``switches`` reads log lines of this level
        os.environ["SLIPSTREAM_ROLLOUT_LOG_LEVEL"] = "DEBUG"  # noqa: TID251 -- the run inherits it
    name = f"{'-'.join(filter(None, names))}.json"
    settings = [*arguments.set]
    if arguments.whole_8b or arguments.mixture_16b:
        settings = [*(_IN_PLACE if arguments.whole_8b else _OFFLOADED), *settings]
    with (
        run_folder(arguments.folder) as folder,
        _mps() if arguments.mps else nullcontext(),
        watched_memory() as peaks,
    ):
        entry = _measured(
            shape,
            folder,
            settings,
            steps=arguments.steps,
            is_colocated=is_colocated,
            # Their states have 98 and 94 GB.
            saves=not (arguments.whole_8b or arguments.mixture_16b),
            peaks=peaks,
        )
    print(json.dumps(entry, indent=1))
    if arguments.out is not None:
        write_json(arguments.out, entry)
    elif not arguments.smoke:
        _keep(arguments, name, entry)


def _measured(
    shape: Shape,
    folder: Path,
    settings: Sequence[str],
    *,
    steps: int,
    is_colocated: bool,
    saves: bool,
    peaks: Mapping[str, float],
) -> dict[str, Any]:
    """Trains some steps; returns rates, times by part and memory.

    Args:
        saves: True if the run is ended after the steps, which saves its state; otherwise it ends by itself.
    """
    model, spec = folder / "model", folder / "spec.json"
    if not model.exists():
        shape.save_model(model)
    document = shape.spec(model, steps=10_000)
    if is_colocated:
        document["topology"] = {"placement": "colocated"}
    spec.write_text(json.dumps(document))
    if saves:
        run = run_for(steps, folder, settings, spec=spec)
    else:
        run = whole_run(folder, [*settings, *_UNSAVED, f"trainer.steps={steps}"], spec=spec)
    print("\n".join(time_line(run, max_rate=20_000.0)))
    return {
        "device": device_name(),
        "settings": [*settings],
        **facts(run, first=_FIRST),
        **({"switch": switches(run.steps[_FIRST - 1 :], folder)} if is_colocated else {}),
        "mfu": _median_of(run.steps, "mfu"),
        "logprob_difference": median(step["rollout_logprob_abs_diff"] for step in run.steps),
        **{
            f"trainer_{kind}_gb": _largest_gb(run.steps, f"gpu_memory_{name}_bytes")
            for kind, name in (("allocated", "peak"), ("reserved", "reserved"))
        },
        "steps_s": [round(step["seconds"], 3) for step in run.steps],
        "peak_gb": {**peaks},
        "planned_gb": planned_gb(load_spec(spec, settings), model) if peaks else {},
    }


def _keep(arguments: argparse.Namespace, name: str, entry: dict[str, Any]) -> None:
    """Writes a result to its usual file."""
    setting = " ".join([*arguments.set, *(["MPS"] if arguments.mps else [])])
    if arguments.duel:
        keep_in(RESULTS / "one-gpu-duel.json", setting or "algorithm.max_staleness=1", entry)
    elif arguments.tail:
        keep_in(RESULTS / "one-gpu-tail.json", setting or "algorithm.max_staleness=1", entry)
    elif arguments.hybrid or arguments.dense:
        keep_in(HYBRIDS, "hybrid" if arguments.hybrid else "dense", entry)
    elif arguments.whole_8b:
        keep_in(RESULTS / "one-gpu-8b.json", setting or "shared", entry)
    elif arguments.mixture_16b:
        keep_in(RESULTS / "one-gpu-16b.json", setting or "algorithm.max_staleness=1", entry)
    else:
        write_json(RESULTS / name, entry)


@contextmanager
def _mps() -> Iterator[None]:
    """Makes the processes that start in the block use a Multi-Process Service."""
    with serving_mps() as environment:
        os.environ.update(environment)  # noqa: TID251 -- the run inherits it
        try:
            yield
        finally:
            for name in environment:
                del os.environ[name]  # noqa: TID251


def _shape(arguments: argparse.Namespace) -> Shape:
    shape = _SHAPE
    if arguments.lora is not None:
        shape = QWEN_14B if arguments.base else QWEN_7B
    elif arguments.hybrid or arguments.dense:
        shape = HYBRID if arguments.hybrid else DENSE
    elif arguments.duel:
        shape = DUEL
    elif arguments.tail:
        shape = TAIL
    elif arguments.whole_8b:
        shape = QWEN3_8B
    elif arguments.mixture_16b:
        shape = _mixture(arguments.layers or QWEN3_MOE_16B.layers)
    return smoke(shape) if arguments.smoke else shape


def _mixture(layers: int) -> Shape:
    trainer = {
        **QWEN3_MOE_16B.trainer,
        "tokens_per_micro_batch": 16_384,
        "optimizer": {"learning_rate": QWEN3_MOE_16B.learning_rate, "kind": "adamw_8bit"},
    }
    return replace(QWEN3_MOE_16B, layers=layers, trainer=trainer)


def keep_in(results: Path, name: str, entry: dict[str, Any]) -> None:
    """Adds one entry to a file of results."""
    write_json(results, read_json(results) | {name: entry})


def _largest_gb(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return max(step.get(name, 0.0) for step in steps) / 1e9


def _median_of(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Returns the median of a metric over the steady steps; None if no step has it."""
    values = [step[name] for step in steps[_FIRST - 1 :] if name in step]
    return median(values) if values else None


if __name__ == "__main__":
    main()
