"""Training engines that a run can name, and the settings that each supports. Imports no engine.

An engine is a module and an entry point in the group ``slipstream.train_engines`` that names its
``TrainEngineKind`` (docs/adding.md).
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from services.common.doors import Door
from services.common.runspec.base import in_yaml, look_up
from services.common.runspec.topology import TaskGroupError
from services.common.runspec.workers import kinds_with_own_gpus

if TYPE_CHECKING:
    from services.common.runspec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineKind:
    """A training engine."""

    build: str
    """Reference ``module:function`` of a function that takes an ``EngineArgs`` and returns a
    ``TrainEngine`` for each model."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that the engine supports, by key; other keys of a run may have any value."""
    serves_own_gpus: bool = True
    """True if the engine serves workers of the trainer's program that have separate GPUs."""

    def problems(self, spec: "RunSpec") -> Iterator[str]:
        """Yields the settings of a run that the engine does not support."""
        name = spec.trainer.engine
        for key, values in self.supported.items():
            value: Any = spec
            for part in key.split("."):
                value = getattr(value, part)
            if value not in values:
                known = " or ".join(map(in_yaml, values))
                yield (
                    f"trainer.engine {name!r} supports {key} {known} only, but it is {in_yaml(value)}; "
                    f"set {key} to {in_yaml(values[0])}, or trainer.engine to 'fsdp'"
                )
        if self.serves_own_gpus:
            return
        with suppress(TaskGroupError):  # another rule reports impossible groups
            own = [
                role
                for role, kind in kinds_with_own_gpus(spec.topology).items()
                if kind.program == "trainer"
            ]
            if own:
                yield (
                    f"trainer.engine {name!r} computes all models in the trainer, but topology.task_groups "
                    f"gives {', '.join(own)} GPUs of their own; remove these groups, or set trainer.engine "
                    "to 'fsdp'"
                )


ENGINES: Final = Door("train_engines", TrainEngineKind)
"""The engines by the value of ``trainer.engine``."""


def train_engine_kind(name: str) -> TrainEngineKind:
    """Returns the engine with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    return look_up(ENGINES, name, key="trainer.engine")
