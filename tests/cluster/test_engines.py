"""Runs whose rollouts use vLLM and SGLang: CPU builds in the images of the Dockerfiles."""

import json
import os
import time
from collections.abc import Iterator

import pytest

from tests.cluster.node import Cluster
from tests.cluster.release import Installed, installed_release
from tests.cluster.test_run import assert_ledger_closes
from tests.helpers.chart import ROOT
from tests.helpers.tools import CACHE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

_RESULTS = ROOT / "bench" / "results" / "cluster-engines.json"
_VALUES = (
    "rollout.resources.limits.memory=8Gi",
    "rollout.env.VLLM_CPU_KVCACHE_SPACE=1",  # GiB; by default a share of the machine's memory
    "workers.sharedMemory=1Gi",
)
# The images have no C++ compiler, which vLLM needs to compile kernels for a CPU.
_ARGUMENTS = {"vllm": {"enforce_eager": True}, "sglang": {}}


@pytest.fixture(scope="module")
def installed(machine: Cluster) -> Iterator[Installed]:
    with installed_release(machine) as release:
        yield release


def engines() -> list[object]:
    """Returns pytest parameters for the engines; those without a built image are skipped."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not (CACHE / "images" / f"rollout-{name}.tar").exists(),
                reason=f"tests/cluster/images.sh was not asked for {name}",
            ),
        )
        for name in _ARGUMENTS
    ]


@pytest.mark.parametrize("engine", engines())
def test_sort4_trains_with(installed: Installed, engine: str) -> None:
    installed.upgrade(f"rollout.image.repository=slipstream/rollout-{engine}", *_VALUES)
    installed.ready()
    begin = time.monotonic()
    rollout = {"engine": engine, "replicas": 1, "engine_arguments": _ARGUMENTS[engine]}
    run_id = installed.submit(rollout=rollout, limits={"start_timeout_s": 1200})
    installed.wait(run_id, lambda run: run["step"] >= 1, timeout_s=1200)
    first_step_s = time.monotonic() - begin
    run = installed.wait(run_id, lambda run: run["state"] == "SUCCEEDED", timeout_s=1000)
    assert run["step"] == 50
    assert_ledger_closes(run)
    results = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    results[engine] = {
        "first_step_s": round(first_step_s, 1),
        "succeeded_s": round(time.monotonic() - begin, 1),
        "load_1m": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    _RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
