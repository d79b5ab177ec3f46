"""A run over three nodes whose links are intact, slow, flapping or cut.

Rank 0 of the trainer is on ``trainer0``, rank 1 on ``trainer1``, a rollout on ``rollout``, a second one
on ``rollout1``.
"""

import time
from dataclasses import dataclass

import pytest

from tests.nodes.network import Node
from tests.nodes.runs import Run, Runs, until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1800)]

# A weight version is 1.7 MB, whose transfer takes 30 ms over a link without a limit.
_SLOW = "4mbit"
_NOTICED_S = 45.0
"""Heartbeat timeout plus the interval of its check."""
_FORMED_S = 90.0
"""Deadline of forming a weight group plus that of the transfer before it."""
_UNREACHABLE_S = 60.0
"""Seconds until a worker reports that it does not reach the transferqueue."""
_BUSY_S = 60.0
"""Additional seconds for a busy machine, beyond a deadline."""
_FLAPS = 6


def test_whole_slow_and_flapping_links_lose_no_worker(
    release: Runs, nodes: dict[str, Node]
) -> None:
    with release.run(steps=80) as run:
        release.figures["transfer_s"] = _median(run.until_synced(4))
        for name in ("rollout", "trainer1"):
            nodes[name].slow(_SLOW)
            run.until_synced(2)
            seconds = run.until_synced(3)
            assert min(seconds) > 1.0
            assert run.lost() == []
            release.figures[f"transfer_s_with_slow_{name}"] = _median(seconds)
            nodes[name].repair()
        for _ in range(_FLAPS):
            for name in ("rollout", "trainer1"):
                nodes[name].cut()
            time.sleep(1.0)
            for name in ("rollout", "trainer1"):
                nodes[name].repair()
            time.sleep(3.0)
        facts = run.finish()
        assert run.lost() == []
        assert facts["losses"] == 0
        assert run.workers.starts == {"trainer-0": 1, "rollout-0": 1}
        syncs = run.syncs()
        assert len({sync["digest"] for sync in syncs}) == len(syncs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Links that are cut, and the expected report."""

    cut: tuple[str, ...] = ()
    """Nodes that reach no other node."""
    isolated: tuple[str, ...] = ()
    """Nodes that do not reach each other; all reach the controller."""
    deadline_s: float = _NOTICED_S
    """Documented seconds until the loss is reported."""
    says: tuple[str, ...]
    """Texts of which the report contains one."""


_CUTS = {
    "transferqueue": _Cut(cut=("transferqueue",), says=("transferqueue",)),
    "rollout": _Cut(cut=("rollout",), says=("rollout-0",)),
    "rank_0": _Cut(cut=("trainer0",), says=("trainer-0",)),
    # The trainer's collectives have no deadline except that of a step.
    "rank_1": _Cut(cut=("trainer1",), says=("rank 1 on", "trainer-0/1")),
    "rank_1_from_rank_0": _Cut(isolated=("trainer0", "trainer1"), says=("rank 1 on",)),
    "rank_1_from_rollout": _Cut(
        isolated=("trainer1", "rollout"), deadline_s=_FORMED_S, says=("trainer-0/1", "rollout-0")
    ),
}


def test_a_cut_link_is_reported_with_its_end_and_the_run_recovers_when_it_is_back(
    release: Runs, nodes: dict[str, Node]
) -> None:
    with release.run(steps=100) as run:
        for name, cut in _CUTS.items():
            run.train(3)
            before = len(run.lost())
            for node in cut.cut:
                nodes[node].cut()
            for node in cut.isolated:
                nodes[node].isolate()
            begin = time.monotonic()
            cause = run.until_lost(before + 1, timeout_s=cut.deadline_s + _BUSY_S)
            release.figures[f"noticed_s_{name}"] = _since(begin)
            assert any(text in cause for text in cut.says), f"{name}: {cause}"
            _repair(nodes)
            begin = time.monotonic()
            run.train(1)
            release.figures[f"recovered_s_{name}"] = _since(begin)
        assert run.finish()["losses"] >= len(_CUTS)


def test_a_rollout_that_reaches_all_but_the_transferqueue_is_reported_and_the_others_go_on(
    release: Runs, nodes: dict[str, Node]
) -> None:
    queue = nodes["transferqueue"]
    with release.run(steps=1000, replicas=2) as run:
        run.train(3)
        for _ in range(_FLAPS):
            queue.isolate()
            nodes["rollout"].isolate()
            time.sleep(5.0)
            _repair(nodes)
            time.sleep(3.0)
        assert run.events("RolloutCutOff") == []

        queue.isolate()
        nodes["rollout"].isolate()
        begin = time.monotonic()
        _until_events(run, "RolloutCutOff", 1, timeout_s=_UNREACHABLE_S + _BUSY_S)
        release.figures["noticed_s_rollout_from_transferqueue"] = _since(begin)
        (event,) = run.events("RolloutCutOff")
        assert "rollout-0" in event["message"]
        assert "transferqueue.train.svc:50051" in event["message"]
        run.train(5)  # with the other rollout

        nodes["rollout1"].isolate()
        _until_events(run, "RolloutCutOff", 2, timeout_s=_UNREACHABLE_S + _BUSY_S)
        _repair(nodes)
        begin = time.monotonic()
        _until_events(run, "RolloutReconnected", 2, timeout_s=_BUSY_S)
        run.train(2)
        release.figures["recovered_s_rollouts_from_transferqueue"] = _since(begin)
        assert run.lost() == []
        assert run.events("GroupFailed") == []
        assert run.workers.starts == {"trainer-0": 1, "rollout-0": 1, "rollout-1": 1}


def test_a_trainer_that_reaches_all_but_the_transferqueue_is_reported_and_goes_on(
    release: Runs, nodes: dict[str, Node]
) -> None:
    with release.run(steps=1000) as run:
        for number, name in enumerate(("trainer0", "trainer1"), 1):
            run.train(3)
            nodes["transferqueue"].isolate()
            nodes[name].isolate()
            begin = time.monotonic()
            cause = run.until_lost(number, timeout_s=_UNREACHABLE_S + _BUSY_S)
            release.figures[f"noticed_s_{name}_from_transferqueue"] = _since(begin)
            assert "transferqueue.train.svc:50051" in cause
            time.sleep(_UNREACHABLE_S)
            assert len(run.lost()) == number, "the run waits"
            _repair(nodes)
            begin = time.monotonic()
            run.train(2)
            release.figures[f"recovered_s_{name}_from_transferqueue"] = _since(begin)
        assert run.workers.starts == {"trainer-0": 1, "rollout-0": 1}


def test_a_link_that_stays_cut_fails_the_run_with_the_missing_worker(
    release: Runs, nodes: dict[str, Node]
) -> None:
    with release.run(steps=1000) as run:
        run.train(3)
        run.limit(start_timeout_s=5.0, max_restarts=1)
        nodes["trainer0"].cut()
        ended = run.until_end()
        assert ended["state"] == "FAILED"
        assert "trainer-0" in ended["message"]


def _until_events(run: Run, type_: str, number: int, *, timeout_s: float) -> None:
    until(lambda: len(run.events(type_)) >= number, lambda: f"{type_}: {run.read()}", timeout_s)


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 1)


def _repair(nodes: dict[str, Node]) -> None:
    for node in nodes.values():
        node.repair()


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)
