"""Golden files of messages, which ``pytest --update-golden`` rewrites."""

import pytest


def check_can_update(config: pytest.Config) -> None:
    """Refuses to rewrite golden files from several processes, each of which would write only its cases."""
    if config.getoption("--update-golden") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-golden needs one process: remove -n, or add -n 0")
