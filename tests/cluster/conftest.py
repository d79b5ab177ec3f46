"""Fixtures of the cluster that a test session uses."""

import fcntl
import os
from collections.abc import Iterator

import pytest

from tests.cluster.node import Cluster, control_plane, fresh_folder, node
from tests.helpers.tools import CACHE, skip_unless_asked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that start a cluster unless ``-m cluster`` asks for them."""
    skip_unless_asked(config, items, marker="cluster", does="starts a cluster on this machine")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Runs API server, scheduler and controllers; this process is inside the cluster's network.

    A machine runs at most one cluster with a node and one without a node at the same time.
    """
    if os.geteuid() != 0:
        pytest.skip("a cluster on this machine needs root")
    has_node = any("machine" in item.fixturenames for item in request.session.items)
    name = "session" if has_node else "control-plane"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with control_plane(fresh_folder(name)) as started:
            yield started


@pytest.fixture(scope="session")
def machine(cluster: Cluster) -> Iterator[Cluster]:
    """Adds a node that runs containers to the cluster."""
    with node(cluster):
        yield cluster
