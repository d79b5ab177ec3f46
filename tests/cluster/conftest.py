"""The cluster of a test session."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.node import Cluster, control_plane, fresh_folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """API server, scheduler and controllers; this process is inside the cluster's network."""
    if os.geteuid() != 0:
        pytest.skip("a cluster on this machine needs root")
    with control_plane(fresh_folder("session")) as started:
        yield started
