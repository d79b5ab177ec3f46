"""Prompt sources ``environment``, whose server has the tasks, and ``verifiers``, tasks of that package."""

from services.common.runspec.data import PromptSourceSpec
from services.rollout.data.sources import CheckedRows, PromptSource, Row


class _Numbers:
    """Tasks that an environment identifies by index."""

    def __init__(self, split: str, count: int) -> None:
        self._split = split
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> Row:
        return {"split": self._split, "index": index}


def open_environment(spec: PromptSourceSpec, key: str) -> PromptSource:
    assert spec.limit is not None, f"{key} has a limit"
    return _Numbers(spec.path, spec.limit)


def open_taskset(spec: PromptSourceSpec, key: str) -> PromptSource:
    """Opens the taskset whose id is the path of a set. Raises ValueError if verifiers cannot load it."""
    try:
        # Imported here, because it takes seconds and only the extra `verifiers` installs the package.
        from services.extras.environments.verifiers import tasks_of

        rows = tasks_of(spec.path, dict(spec.arguments), limit=spec.limit)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: verifiers cannot load the taskset {spec.path!r} with {dict(spec.arguments)} ({error}); "
            f"check {key}.path and {key}.arguments, and that it is installed"
        ) from error
    return CheckedRows(rows, spec.path)
