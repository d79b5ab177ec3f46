"""What the GPUs of a planned run hold, and what does not fit."""

import math
import re
from functools import cached_property
from typing import Any

from services.cli.preflight import model_config
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec

_UNITS = {"": 1e9, "GB": 1e9, "G": 1e9, "GIB": 2.0**30, "MB": 1e6, "TB": 1e12}
_H200 = 141e9
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def gpu_bytes(text: str) -> int:
    """Bytes of a size such as ``141GB`` or ``80GiB``; a bare number is GB.

    Raises:
        ValueError: If it is none.
    """
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if not 1e9 <= size <= 1e13:
        raise ValueError(
            f"--gpu-memory: expected the memory of a GPU, such as 141GB, but got {text!r}"
        )
    return int(size)


class Memory:
    """Of one specification's model.

    Args:
        spec: The run.
        total: Memory of a GPU in bytes; None if it was not said, and then everything fits.
    """

    def __init__(self, spec: RunSpec, total: int | None) -> None:
        self._spec = spec
        self._total = total

    def like(self, spec: RunSpec) -> "Memory":
        """Of the same GPUs, for another way to run that model."""
        return Memory(spec, self._total)

    @property
    def weights(self) -> float:
        """Parameters of the model."""
        return self._size[0]

    @property
    def active_weights(self) -> float:
        """Those of them that a token passes."""
        return self._size[1]

    @property
    def moved(self) -> float | None:
        """Bytes of the trainer's state that leave a GPU at a handover, and come back; none where they stay.

        None where engines have room beside them too. Without a size of the GPUs, of H200s.
        """
        from services.common.models.training_memory import state_memory
        from services.common.models.turns_memory import resident_memory

        spec = self._spec
        engines = max(1, spec.trainer.world_size // spec.engine_gpus)
        parts = {
            "topology": TopologySpec(placement="colocated"),
            "rollout": spec.rollout.model_copy(update={"replicas": engines}),
        }
        spec, total = spec.model_copy(update=parts), self._total or int(_H200)
        stays = resident_memory(spec, self._config, gpu_bytes=total)
        if stays != "nothing":
            return None if stays == "all" else 0.0
        return float(state_memory(spec, self._config, gpu_bytes=total))

    def refused(self, trainer_gpus: int) -> str:
        """Say why so many GPUs are too few for the trainer, or a GPU for a rollout; empty if they are not."""
        if self._total is None:
            return ""
        try:
            self._run(trainer_gpus).check()
        except ValueError as error:
            return str(error)
        return ""

    def most_places(self, most: int, *, mean_tokens: float) -> int:
        """Samples that a rollout decodes at once, with what its KV cache holds."""
        if self._total is None:
            return most
        try:
            tokens = int(self._run(self._spec.trainer.world_size).rollout.kv_tokens)
        except ValueError:
            return most  # it is refused with its reason
        a_sample = self._spec.data.max_prompt_tokens + mean_tokens
        return max(1, min(most, math.floor(tokens / a_sample)))

    def tables(self, trainer_gpus: int) -> str:
        """What each GPU holds, line by line."""
        if self._total is None:
            return ""
        return str(self._run(trainer_gpus).table())

    def document(self, trainer_gpus: int) -> dict[str, Any]:
        """The same for a program, in bytes."""
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
        }

    def _run(self, trainer_gpus: int) -> Any:
        from services.cli.run_memory import run_memory

        trainer = self._spec.trainer.model_copy(update={"world_size": trainer_gpus})
        spec = self._spec.model_copy(update={"trainer": trainer})
        assert self._total is not None
        return run_memory(spec, self._config, gpu_bytes=self._total)

    @cached_property
    def _config(self) -> Any:
        return model_config(self._spec)

    @cached_property
    def _size(self) -> tuple[float, float]:
        from services.trainer.model.flops import model_weights

        return model_weights(self._config)


def memory_table(spec: RunSpec, *, gpu_bytes: int, gpus: int | None = None) -> str:
    """What each GPU of a run will hold.

    Args:
        spec: The run.
        gpu_bytes: Memory of one GPU.
        gpus: GPUs of the machine: with fewer than the run's workers take, some of them share one. None for
            enough.

    Raises:
        SpecError: If that does not fit, with the smallest change that does.
    """
    # It imports torch, which no other check needs.
    from services.cli.run_memory import run_memory

    config = model_config(spec)
    try:
        memory = run_memory(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
        memory.check()
    except ValueError as error:
        raise SpecError([str(error)]) from error
    return memory.table()
