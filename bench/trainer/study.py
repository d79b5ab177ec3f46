"""Time of a step by part, and the effect of single choices in it: ``--study``.

Every variant changes one aspect of the current step. The variants alternate, so that a GPU that
slows down as it warms up affects all of them equally.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from services.trainer.algorithm import logprobs
from services.trainer.engines.fsdp import engine as engine_module
from services.trainer.engines.fsdp.parallel import begin_micro_batch

_TURNS = 3
_KINDS = {
    "attention": ("flash", "fmha", "cudnn"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk", "xmma"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy_"),
    "exchange": ("nccl", "allgather", "split_with_sizes", "chunk_cat"),
    "optimizer": ("multi_tensor", "fusedadam", "fused_adam", "lpnorm"),
}
"""Parts of kernels' names by reported kind; the first match counts."""


def compare(work: Callable[[], Any], timed: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """Returns the median seconds of a step with each variant, and its ratio to the unchanged step.

    Args:
        work: Trains one step.
        timed: Returns the seconds of one call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for turn in range(_TURNS + 1):
        for name, variant in _VARIANTS.items():
            with variant():
                spent = timed(work)
            if turn:  # the first one warms up
                seconds[name].append(spent)
    usual = median(seconds["as it is"])
    return {
        name: {"step_s": median(spent), "over_usual": median(spent) / usual}
        for name, spent in seconds.items()
    }


def explain(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Returns the seconds of a step's kernels by kind, of the idle GPU, and of the longest kernels."""
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize(device)
    kernels = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    spent_s: dict[str, float] = {}
    spans = []
    for kernel in kernels:
        span = kernel.time_range
        spans.append((span.start, span.end))
        for name in (_kind(kernel.name), f"kernel {kernel.name[:70]}"):
            spent_s[name] = spent_s.get(name, 0.0) + (span.end - span.start) / 1e6
    busy, end = 0.0, min(start for start, _ in spans)
    first = end
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    spent_s["idle"] = (end - first - busy) / 1e6
    longest = sorted((n for n in spent_s if n.startswith("kernel ")), key=lambda n: -spent_s[n])[
        :25
    ]
    kinds = [name for name in spent_s if not name.startswith("kernel ")]
    return {name: spent_s[name] for name in (*kinds, *longest)}


def _kind(name: str) -> str:
    name = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(p in name for p in parts)), "other")


@contextmanager
def _rounded() -> Iterator[None]:
    """Keeps logits in the output head's dtype."""
    with patch.object(logprobs, "float32_products", functional.linear):
        yield


@contextmanager
def _exchanging() -> Iterator[None]:
    def begin(module: Any, *, is_last: bool, **arguments: Any) -> None:
        begin_micro_batch(module, is_last=True, **arguments)

    with patch.object(engine_module, "begin_micro_batch", begin):
        yield


_VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": nullcontext,
    "gradients reduced in every micro-batch": _exchanging,
    "logits rounded to bfloat16": _rounded,
}
