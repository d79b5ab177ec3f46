"""A trainer of two ranks on each of two hosts: their link is slow or cut, a host or a rank is lost.

Ranks 0 and 1 are on ``trainer0``, ranks 2 and 3 on ``trainer1``. With pipeline stages, each stage is on
a host.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from tests.nodes.network import Node
from tests.nodes.runs import PATIENCE_S, Run, Runs, until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1800)]

_ENGINES: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {},
    "stages": {"engine": "stages", "pipeline_parallel": 2, "tokens_per_micro_batch": 64},
}
_SLOW = "8mbit"
_SLOWER = "1mbit"
"""A transfer of weights takes about 15 s."""
_SILENT_S = 45.0
"""Documented seconds until a silent host is reported: 30 s, and the interval of the heartbeat."""
_HOST_S = 90.0
"""Documented seconds until a lost host is reported if a publication was interrupted: its members' deadline,
then 60 s in which the ranks may answer when the run enters its loops again."""
_KILLED_S = 15.0
"""Documented seconds until a killed rank is reported: its connections close at once."""
_BUSY_S = 60.0
"""Additional seconds for a busy machine, beyond a deadline."""
_AWAY_S = 20.0
"""Seconds for which a lost host stays away after its loss is reported."""


@pytest.mark.parametrize("engine", _ENGINES)
def test_a_trainer_on_two_hosts_names_what_it_lost_and_continues_from_its_checkpoint(
    release: Runs, nodes: dict[str, Node], engine: str
) -> None:
    host = nodes["trainer1"]
    with release.run(
        steps=60, node_ranks=2, trainer=_ENGINES[engine], has_loopback_names=True
    ) as run:
        run.train(3)
        host.slow(_SLOW)
        run.train(2)
        assert run.lost() == [], "a slow link loses nobody"
        host.repair()

        nodes["trainer0"].isolate()
        host.isolate()
        _assert_lost(release, run, f"{engine}_link", (2, 3), _SILENT_S)
        nodes["trainer0"].isolate(False)
        host.isolate(False)
        _assert_recovered(release, run, f"{engine}_link")

        run.workers.lose(host)
        _assert_lost(release, run, f"{engine}_host", (2, 3), _HOST_S)
        step = run.read()["step"]
        time.sleep(_AWAY_S)
        assert run.read()["step"] == step, "the run waits for the host"
        assert run.read()["state"] == "RECOVERING"
        run.workers.bring_back(host)
        _assert_recovered(release, run, f"{engine}_host")

        _rank(run, 3).kill()
        _assert_lost(release, run, f"{engine}_rank", (3,), _KILLED_S)
        assert "rank 2 on" not in run.lost()[-1]
        _assert_recovered(release, run, f"{engine}_rank")
        facts = run.finish()
        assert facts["losses"] == 3, run.lost()


def test_a_host_that_is_lost_while_its_ranks_send_weights_is_named_and_comes_back(
    release: Runs, nodes: dict[str, Node]
) -> None:
    host, rollout = nodes["trainer1"], nodes["rollout"]
    with release.run(steps=30, node_ranks=2, has_loopback_names=True) as run:
        run.train(3)
        rollout.slow(_SLOWER)
        until(
            lambda: "SYNCING_WEIGHTS" in run.read()["activities"], release.release.logs, PATIENCE_S
        )
        run.workers.lose(host)
        rollout.repair()
        _assert_lost(release, run, "publication_host", (2, 3), _HOST_S)
        time.sleep(_AWAY_S)
        assert run.read()["state"] == "RECOVERING"
        run.workers.bring_back(host)
        _assert_recovered(release, run, "publication_host")
        run.finish()


def _assert_lost(
    release: Runs, run: Run, name: str, ranks: tuple[int, ...], deadline_s: float
) -> None:
    """Waits for the report of a loss, and checks that its cause names each of the ranks.

    A publication of weights that the loss interrupts names them as its members.
    """
    begin, before = time.monotonic(), len(run.lost())
    cause = run.until_lost(before + 1, timeout_s=deadline_s + _BUSY_S)
    release.figures[f"noticed_s_{name}"] = round(time.monotonic() - begin, 1)
    for rank in ranks:
        assert re.search(rf"rank {rank} on|trainer-0/{rank}\b", cause), cause


def _assert_recovered(release: Runs, run: Run, name: str) -> None:
    begin = time.monotonic()
    run.train(2)
    release.figures[f"recovered_s_{name}"] = round(time.monotonic() - begin, 1)


def _rank(run: Run, rank: int) -> psutil.Process:
    """Returns the process of a rank of the trainer."""
    for pod in run.workers.pods["trainer-0"]:
        assert pod.process is not None
        for process in psutil.Process(pod.process.pid).children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"no process of rank {rank}")
