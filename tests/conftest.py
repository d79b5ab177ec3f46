"""Hooks and fixtures of all tests."""

import gc
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.golden import check_can_update

# Each core has a worker of pytest, and more threads would wait for each other. This is read when torch is
# imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported modules are never garbage, and looking for it takes a quarter of the time of imports.
gc.disable()

with suppress(ModuleNotFoundError):  # the environments of the real engines have no Hypothesis
    from hypothesis import settings

    # No test is timed: a busy machine is no failure.
    # Examples are the same in each run, so that no commit fails for an older fault; nightly ones vary.
    settings.register_profile("slipstream", deadline=None, max_examples=50, derandomize=True)
    settings.register_profile("nightly", deadline=None, max_examples=5_000)
    settings.load_profile("slipstream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets every worker of pytest-xdist begin with a share of the modules that may take long.

    With ``--dist worksteal`` each worker gets a contiguous part of the items. If one had all long modules, it
    would still run the last of them when the others have ended.
    """
    modules: dict[Path, list[pytest.Item]] = {}
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        modules.setdefault(item.path, []).append(item)
        longest[item.path] = max(longest.get(item.path, 0.0), timeout.args[0] if timeout else 0.0)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    groups: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for path in sorted(modules, key=lambda path: -longest[path]):
        min(groups, key=len).extend(modules[path])
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """Excludes imported modules from collections of garbage, and lets these be rare.

    With the default thresholds, they took 15 % of the CPU time of tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Lets records of all loggers reach the root's handlers.

    Pytest else adds handlers to each of the 57 loggers that do not propagate, most of them torch's, and
    removes them, six times in each test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Lets workers start as forks, so that tests are collected once."""
    if sys.platform == "linux":
        # Imported here, because the environments of the real engines have no pytest-xdist.
        from tests.helpers.forked_workers import fork_workers

        fork_workers(config.invocation_params.args, len(specs))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_getremotemodule() -> ModuleType | None:
    """Lets forked workers run the tests that were collected before the fork."""
    if sys.platform != "linux":
        return None
    from tests.helpers import forked_session

    return forked_session


@pytest.fixture(autouse=True)
def _drawn_as_before(request: pytest.FixtureRequest) -> None:
    """Weights that a test draws are the same in every run of it, and others than the next test's."""
    if torch := sys.modules.get("torch"):
        # torch.manual_seed() formats the whole stack if there is no GPU.
        seed = (
            torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
        )
        seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --update-golden, which rewrites the messages in tests/golden from the current ones."""
    parser.addoption("--update-golden", action="store_true", help="Rewrite tests/golden.")


def pytest_configure(config: pytest.Config) -> None:
    check_can_update(config)


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Iterator[Callable[[str, str, list[str]], None]]:
    """Compares the messages of one case with those in ``tests/golden/<name>.json``."""
    folder = Path(__file__).parent / "golden"
    stored: dict[str, dict[str, list[str]]] = {}
    update = pytestconfig.getoption("--update-golden")

    def check(name: str, case: str, messages: list[str]) -> None:
        file = folder / f"{name}.json"
        if name not in stored:
            stored[name] = {} if update else json.loads(file.read_text(encoding="utf-8"))
        if update:
            stored[name][case] = messages
        else:
            assert messages == stored[name].get(case), "run pytest --update-golden, read the diff"

    yield check
    for name in stored if update else ():
        text = json.dumps(stored[name], indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
