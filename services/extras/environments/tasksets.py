"""Prompt source ``verifiers``: tasks of an environment of ``verifiers``."""

from services.common.runspec.data import PromptSourceSpec
from services.rollout.data.sources import CheckedRows, PromptSource


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
