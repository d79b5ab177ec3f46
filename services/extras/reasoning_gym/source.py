"""Rows of a task of ``reasoning-gym``."""

from collections.abc import Sequence
from typing import Any

from services.common.runspec.data import PromptSourceSpec
from services.rollout.data.sources import CheckedRows, PromptSource, Row


class _GymRows(CheckedRows):
    """Rows of a task of ``reasoning-gym``, with the arguments that its verifier needs besides the row."""

    def __init__(self, rows: Sequence[Any], spec: PromptSourceSpec) -> None:
        super().__init__(rows, spec.path)
        self._task = {"name": spec.path, "arguments": dict(spec.arguments)}

    def __getitem__(self, index: int, /) -> Row:
        return {**super().__getitem__(index), "task": self._task}


def open_reasoning_gym(spec: PromptSourceSpec, key: str) -> PromptSource:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key} needs the package 'reasoning-gym'; pip install reasoning-gym"
        ) from error
    try:
        dataset = reasoning_gym.create_dataset(spec.path, **spec.arguments)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ValueError(
            f"{key}: reasoning-gym cannot create the task {spec.path!r} with {dict(spec.arguments)} "
            f"({error}); check {key}.path and {key}.arguments"
        ) from error
    return _GymRows(dataset, spec)
