"""Fixtures of Slurm clusters."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Runs a cluster of three nodes; skips the test on a user's machine without root or Slurm."""
    reason = ""
    if os.geteuid() != 0:
        reason = "daemons of Slurm, which start processes of users, need root"
    elif missing := missing_programs():
        reason = f"{', '.join(missing)} not found; on Debian: apt-get install slurm-wlm munge"
    if reason:
        if os.getenv("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # The path of a socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with running_cluster(root, ("n1", "n2", "n3")) as running:
            yield running
    finally:
        shutil.rmtree(root, ignore_errors=True)
