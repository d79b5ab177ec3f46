"""Memory of the alternatives that ``slipstream plan`` compares."""

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from services.checks.start.hub import model_config
from services.checks.start.layouts import AXES, Layout
from services.checks.start.memory import run_memory
from services.common.memory.trainer import resident_memory, state_memory
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec

_UNITS = {"": 1e9, "GB": 1e9, "G": 1e9, "GIB": 2.0**30, "MB": 1e6, "TB": 1e12}
_H200 = 141e9
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SAVED = 0.95
"""Share of a layout's memory below which another one is worth a line."""


def gpu_bytes(text: str) -> int:
    """Parses a size such as ``141GB`` or ``80GiB`` into bytes; a number without a unit is GB.

    Raises:
        ValueError: If the text is not a size between 1 GB and 10 TB.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0
    if not 1e9 <= size <= 1e13:
        raise ValueError(f"--gpu-memory: expected the memory of a GPU, such as 141GB, got {text!r}")
    return int(size)


class Memory:
    """Memory of the runs of one specification's model.

    Args:
        total: Memory of a GPU in bytes; None if unknown, in which case everything fits.
        gpus: Number of GPUs; if it is lower than the workers need, some share GPUs. None means enough.
    """

    def __init__(self, spec: RunSpec, total: int | None, *, gpus: int | None = None) -> None:
        self._spec = spec
        self._total = total
        self._gpus = gpus

    def like(self, spec: RunSpec, *, gpus: int | None = None) -> "Memory":
        """Returns the memory of another specification of the same model on GPUs of the same size."""
        return Memory(spec, self._total, gpus=gpus)

    @property
    def weights(self) -> float:
        """Number of parameters of the model."""
        return self._size[0]

    @property
    def active_weights(self) -> float:
        """Number of parameters that are active for one token."""
        return self._size[1]

    @property
    def moved(self) -> float | None:
        """Bytes of a colocated trainer's state that leave a GPU and return at a switch; 0 if they stay.

        None if the engines also stay, because both sides fit on the GPU. H200s are assumed if the size of
        the GPUs is unknown.
        """
        spec = self._spec
        engines = max(1, spec.trainer.world_size // spec.engine_gpus)
        sections = {
            "topology": TopologySpec(placement="colocated"),
            "rollout": spec.rollout.model_copy(update={"replicas": engines}),
        }
        spec, total = spec.model_copy(update=sections), self._total or int(_H200)
        contents = resident_memory(spec, self._config, gpu_bytes=total)
        if contents != "nothing":
            return None if contents == "all" else 0.0
        return float(state_memory(spec, self._config, gpu_bytes=total))

    def refused(self, trainer_gpus: int) -> str:
        """Returns the reason why this many trainer GPUs, or one rollout GPU, do not suffice; else empty."""
        if self._total is None:
            return ""
        try:
            self._run(trainer_gpus).check()
        except ValueError as error:
            return str(error)
        return ""

    def max_slots(self, maximum: int, *, mean_tokens: float) -> int:
        """Returns the max samples that a rollout decodes at once within its KV cache."""
        if self._total is None:
            return maximum
        try:
            tokens = int(self._run(self._spec.trainer.world_size).rollout.kv_tokens)
        except ValueError:
            return maximum  # ``refused`` reports the reason
        a_sample = self._spec.data.max_prompt_tokens + mean_tokens
        return max(1, min(maximum, math.floor(tokens / a_sample)))

    def tables(self, trainer_gpus: int) -> str:
        """Returns the memory contents of each GPU as lines of text."""
        if self._total is None:
            return ""
        return str(self._run(trainer_gpus).table())

    def document(self, trainer_gpus: int) -> dict[str, Any]:
        """Returns the memory contents of each GPU in bytes, for programs."""
        if self._total is None:
            return {}
        run = self._run(trainer_gpus)
        return {
            "gpu": self._total,
            "trainer": dict(run.trainer.parts),
            "rollout": {
                "weights": run.rollout.weights,
                "weight_sync": run.rollout.plane,
                "kv_cache": run.rollout.kv_cache,
                "kv_tokens": run.rollout.kv_tokens,
            },
            **{role: dict(worker.parts) for role, worker in run.apart.items()},
        }

    def _run(self, trainer_gpus: int) -> Any:
        trainer = self._spec.trainer.model_copy(update={"world_size": trainer_gpus})
        spec = self._spec.model_copy(update={"trainer": trainer})
        assert self._total is not None
        return run_memory(spec, self._config, gpu_bytes=self._total, gpus=self._gpus)

    @cached_property
    def _config(self) -> Any:
        return model_config(self._spec)

    @cached_property
    def _size(self) -> tuple[float, float]:
        from services.trainer.model.flops import model_weights

        return model_weights(self._config)


def distinct(layouts: Sequence[Layout]) -> list[Layout]:
    """Returns the layouts that fit, without those that divide more than a cheaper one and save no memory."""
    front: list[Layout] = []
    for layout in layouts:
        if layout.fits and not any(_replaces(cheaper, layout) for cheaper in front):
            front.append(layout)
    return front


def _replaces(cheaper: Layout, layout: Layout) -> bool:
    sizes = ((getattr(cheaper, name), getattr(layout, name)) for name in AXES)
    return (
        all(size <= size_of_other for size, size_of_other in sizes)
        and _SAVED * cheaper.memory <= layout.memory
    )
