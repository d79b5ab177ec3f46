"""Fixtures of a network of nodes and of a release on them."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT
from tests.helpers.tools import CACHE, skip_unless_asked
from tests.nodes.network import Node, network
from tests.nodes.runs import Runs, running_release

_RESULTS = ROOT / "bench" / "results" / "nodes.json"
_PROGRAMS = ("ip", "bridge", "tc", "nsenter", "unshare")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that create network namespaces unless ``-m nodes`` asks for them."""
    skip_unless_asked(config, items, marker="nodes", does="makes network namespaces")


@pytest.fixture(scope="session")
def nodes() -> Iterator[dict[str, Node]]:
    """Yields nodes by name; until the session ends, this process is on the controller's node."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces on this machine need root")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not found; on Debian: apt-get install iproute2")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "nodes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the names and addresses can exist only once on a machine
        names = ("controller", "transferqueue", "trainer0", "trainer1", "rollout", "rollout1")
        with network(*names) as nodes_by_name:
            yield nodes_by_name


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, float]]:
    """Yields a dictionary for the tests' measurements, and writes it to the results at the end."""
    measured: dict[str, float] = {}
    yield measured
    if measured:
        earlier = json.loads(_RESULTS.read_text())["figures"] if _RESULTS.exists() else {}
        report = {
            "figures": {**earlier, **measured},  # figures of tests that did not run remain
            "load_1m": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
        _RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@pytest.fixture
def release(nodes: dict[str, Node], figures: dict[str, float]) -> Iterator[Runs]:
    """Runs a release with controller and transferqueue on their nodes; all links are intact."""
    # Pods have their own /tmp, where they would not find this folder.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-nodes-", dir="/var/tmp"))
    try:
        with running_release(folder, nodes, figures) as running:
            yield running
    finally:
        for node in nodes.values():
            node.repair()
        shutil.rmtree(folder)
