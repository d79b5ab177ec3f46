"""Tests of the placement of workers on the nodes of an allocation."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.runspec.loader import SpecError
from services.common.runspec.worker_kinds import gpu_needs, worker_names
from services.common.runspec.workers import WORKERS
from services.extras.slurm.placement import Node, PlacementError, Placements
from services.extras.slurm.rules import problems
from tests.helpers.specs import spec_with


def node(name: str, *, gpus: int = 0, tasks: int = 1, component: int = 0) -> Node:
    names = tuple(map(str, range(gpus)))
    return Node(
        name=name, component=component, address=f"10.0.0.{name[1:]}", gpus=names, tasks=tasks
    )


def placed(nodes: list[Node], lost: tuple[str, ...] = (), **parts) -> dict[str, list[str]]:
    """Returns the nodes of each worker, with the number of its GPUs on each."""
    placements, _ = Placements(nodes).assign("run", spec_with(**parts), lost_nodes=lost)
    return {
        name: [f"{share.node.name}:{len(share.gpus)}" for share in placement.shares]
        for name, placement in placements.items()
    }


def test_a_trainer_fills_the_fewest_nodes_and_rollouts_get_the_rest():
    nodes = [node(f"n{number}", gpus=4) for number in (1, 2, 3)]
    assert placed(nodes, trainer={"world_size": 8}, rollout={"replicas": 4}) == {
        "trainer-0": ["n1:4", "n2:4"],
        **{f"rollout-{index}": ["n3:1"] for index in range(4)},
    }
    assert placed(nodes, trainer={"world_size": 4}, rollout={"replicas": 8})["trainer-0"] == [
        "n1:4"
    ]


def test_ranks_are_on_equal_shares_of_nodes():
    nodes = [node("n1", gpus=3), node("n2", gpus=2), node("n3", gpus=1)]
    with pytest.raises(PlacementError, match=r"^trainer.world_size: trainer-0 needs 5 GPUs"):
        placed(nodes, trainer={"world_size": 5}, rollout={"replicas": 1})
    shares = placed(nodes, trainer={"world_size": 4}, rollout={"replicas": 2})
    assert shares["trainer-0"] == ["n1:2", "n2:2"]


def test_rollouts_are_on_later_components_than_the_trainer():
    nodes = [node("n1", tasks=1), node("n2", gpus=2, component=1), node("n3", gpus=2, component=2)]
    assert placed(nodes, trainer={"world_size": 2}, rollout={"replicas": 2}) == {
        "trainer-0": ["n2:2"],
        "rollout-0": ["n3:1"],
        "rollout-1": ["n3:1"],
    }


def test_nodes_without_gpus_have_a_rank_per_task_and_share_tasks_when_there_are_few():
    nodes = [node("n1", tasks=2), node("n2", tasks=2)]
    shares = placed(nodes, trainer={"world_size": 2}, rollout={"replicas": 3})
    assert shares["trainer-0"] == ["n1:0"]
    assert Counter(shares[f"rollout-{index}"][0] for index in range(3)) == {"n2:0": 2, "n1:0": 1}


def test_colocated_rollouts_share_the_gpus_of_a_trainer_on_one_node():
    topology = {"placement": "colocated"}
    trainer, rollout = {"world_size": 2}, {"replicas": 2}
    placements = Placements([node("n1", gpus=2)])
    spec = spec_with(topology=topology, trainer=trainer, rollout=rollout)
    slots, _ = placements.assign("run", spec)
    used = [slots[name].shares[0].gpus for name in ("rollout-0", "rollout-1")]
    assert sorted(used) == [("0",), ("1",)]
    assert placements.workers_sharing("run", "rollout-0") == ["trainer-0"]
    with pytest.raises(PlacementError, match=r"^topology.placement: "):
        placed(
            [node("n1", gpus=1), node("n2", gpus=1)],
            topology=topology,
            trainer=trainer,
            rollout=rollout,
        )


def test_a_restarted_worker_keeps_its_gpus_and_moves_when_its_node_is_lost():
    placements = Placements([node("n1", gpus=2), node("n2", gpus=2)])
    spec = spec_with(rollout={"replicas": 1})
    before, _ = placements.assign("run", spec)
    assert placements.assign("run", spec)[0] == before
    after, absent = placements.assign("run", spec, lost_nodes=["n1"])
    assert (before["trainer-0"].nodes, before["rollout-0"].nodes) == (["n1"], ["n1"])
    assert (after["trainer-0"].nodes, after["rollout-0"].nodes) == (["n2"], ["n2"])
    assert not absent


def test_a_worker_that_still_runs_on_a_suspect_node_keeps_its_gpus():
    placements = Placements([node("n1", gpus=2), node("n2", gpus=2)])
    spec = spec_with(rollout={"replicas": 2})
    before, _ = placements.assign("run", spec)
    assert before["rollout-0"].nodes == ["n1"]
    after, absent = placements.assign(
        "run", spec, lost_nodes=["n1"], running={"rollout-0", "rollout-1"}
    )
    assert after["rollout-0"] == before["rollout-0"]
    assert after["rollout-1"] == before["rollout-1"]
    assert after["trainer-0"].nodes == ["n2"]
    assert not absent


def test_rollouts_of_a_lost_node_wait_until_others_have_free_gpus():
    placements = Placements([node("n1", gpus=2), node("n2", gpus=1)])
    spec = spec_with(rollout={"replicas": 2})
    placements.assign("run", spec)
    after, absent = placements.assign("run", spec, lost_nodes=["n2"])
    assert set(after) == {"trainer-0", "rollout-0"}
    assert list(absent) == ["rollout-1"]
    assert "lost nodes: n2" in absent["rollout-1"]


def test_a_run_without_a_node_for_its_trainer_or_any_rollout_cannot_start():
    placements = Placements([node("n1", gpus=1), node("n2", gpus=1)])
    spec = spec_with(rollout={"replicas": 1})
    placements.assign("run", spec)
    for lost in ("n1", "n2"):
        with pytest.raises(PlacementError, match=lost):
            placements.assign("run", spec, lost_nodes=[lost])


def test_runs_do_not_share_gpus_and_free_them_when_they_end():
    placements = Placements([node("n1", gpus=2)])
    spec = spec_with(rollout={"replicas": 1})
    placements.assign("first", spec)
    assert placements.available_gpus("second") == 0
    with pytest.raises(PlacementError, match=r"n1 0"):
        placements.assign("second", spec)
    placements.release("second")
    placements.release("first")
    assert placements.available_gpus("second") == 2
    placements.assign("second", spec)


@given(
    world_size=st.integers(1, 16),
    replicas=st.integers(1, 12),
    gpus=st.lists(st.integers(1, 8), min_size=1, max_size=6),
)
def test_no_gpu_has_two_workers_and_every_worker_has_what_it_needs(world_size, replicas, gpus):
    nodes = [node(f"n{number}", gpus=count) for number, count in enumerate(gpus)]
    spec = spec_with(trainer={"world_size": world_size}, rollout={"replicas": replicas})
    try:
        placements, absent = Placements(nodes).assign("run", spec)
    except PlacementError as error:
        assert str(error).startswith(("trainer.world_size: ", "rollout.replicas: "))
        return
    assert not absent
    assert set(placements) == {name for _, name in worker_names(spec)}
    used = [
        (share.node.name, gpu)
        for placement in placements.values()
        for share in placement.shares
        for gpu in share.gpus
    ]
    assert len(used) == len(set(used)) == sum(gpu_needs(spec).values())
    for role, name in worker_names(spec):
        shares = placements[name].shares
        assert {len(share.gpus) for share in shares} == {
            WORKERS[role].num_gpus(spec) // len(shares)
        }


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (
            {"rollout": {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 8}}},
            "rollout.engine_arguments.tensor_parallel_size",
        ),
        (
            {
                "topology": {"placement": "colocated"},
                "trainer": {"world_size": 8},
                "rollout": {"replicas": 8},
            },
            "topology.placement",
        ),
    ],
)
def test_a_worker_that_no_node_can_hold_is_refused_with_key_and_fix(parts, key):
    parts = {**parts, "topology": {**parts.get("topology", {}), "gpus_per_node": 4}}
    try:
        (problem,) = problems(spec_with(**parts))
    except SpecError as error:
        pytest.fail(str(error))
    assert problem.startswith(key)
    assert "gpus_per_node" in problem
    parts["topology"]["gpus_per_node"] = 8
    assert not [*problems(spec_with(**parts))]
