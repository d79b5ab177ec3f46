"""Finds programs for deployment tests in the cache that ``provision.sh`` fills, or on ``PATH``."""

import os
import shutil
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "slipstream" / "cluster"
_PROVISION = "tests/cluster/provision.sh"


def find(name: str) -> Path | None:
    """Returns the path of a program, or None.

    ``KUBEBUILDER_ASSETS`` has priority, as in other projects' API server tests.
    """
    for folder in (os.getenv("KUBEBUILDER_ASSETS"), str(CACHE / "bin")):
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    path = shutil.which(name)
    return Path(path) if path else None


def require(*names: str) -> list[Path]:
    """Returns the paths of programs; a missing one skips the test, or fails it if ``CI`` is set."""
    paths = {name: find(name) for name in names}
    missing_names = [name for name, path in paths.items() if path is None]
    if missing_names:
        reason = f"{', '.join(missing_names)} not found; fetch them with {_PROVISION} {CACHE} lint"
        if os.getenv("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return [path for path in paths.values() if path is not None]


def skip_unless_asked(
    config: pytest.Config, items: list[pytest.Item], *, marker: str, does: str
) -> None:
    """Skips the tests with a marker unless ``-m`` names it.

    Args:
        does: Effect of the tests on the machine, for the reason of the skip.
    """
    if marker not in str(config.option.markexpr):
        skip = pytest.mark.skip(reason=f"{does}; ask for it by -m {marker}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)
