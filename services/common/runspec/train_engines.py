"""Training engines that a run can name, and the settings that each supports. Imports no engine.

An engine is a module and an entry point in the group ``slipstream.train_engines`` that names its
``TrainEngineKind`` (docs/adding.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.common.doors import Door
from services.common.runspec.base import look_up


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineKind:
    """A training engine."""

    build: str
    """Reference ``module:function`` of a function that takes an ``EngineArgs`` and returns a
    ``TrainEngine`` for each model."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that the engine supports, by key; other keys of a run may have any value."""
    problems: str | None = None
    """Reference of a function that takes a ``RunSpec`` and the model's ``config.json``, imports no torch, and
    yields the reasons why the engine cannot train the model. None if the engine takes every model that the
    trainer supports."""
    serves_own_gpus: bool = True
    """True if the engine serves workers of the trainer's program that have separate GPUs."""


ENGINES: Final = Door("train_engines", TrainEngineKind)
"""The engines by the value of ``trainer.engine``."""


def train_engine_kind(name: str) -> TrainEngineKind:
    """Returns the engine with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    return look_up(ENGINES, name, key="trainer.engine")
