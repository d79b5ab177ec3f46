"""Split of GPUs among task groups, and refusals of invalid splits."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.loader import SpecError, canonical_json, draft_of, parse_spec
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TaskGroupError, TaskGroupFault, place_groups
from services.extras.kubernetes.pod_rules import pod_problems
from tests.helpers.specs import changed, spec_with

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "task_groups.json").read_text())


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_golden_placements(case):
    inputs, expected = case["inputs"], case["expected"]
    numbers = {key: inputs[key] for key in ("total_gpus", "gpus_per_node")}
    if "error" in expected:
        with pytest.raises(TaskGroupError) as caught:
            place_groups(inputs["task_groups"], inputs["ratios"], **numbers)
        assert caught.value.fault == expected["error"]
        return
    placed = place_groups(inputs["task_groups"], inputs["ratios"], **numbers)
    assert placed.unused_gpus == expected["unused_gpus"]
    assert [
        {"tasks": list(group.tasks), "gpus": group.gpus, "pods": list(group.pods)}
        for group in placed.groups
    ] == expected["groups"]


@pytest.mark.parametrize(
    ("groups", "ratios", "options", "fault"),
    [
        (["train", [], "generate"], [0.4, 0.2, 0.4], {}, "EMPTY_GROUP"),
        (["train", "generate"], [0.5, float("nan")], {}, "BAD_RATIO"),
        (["train", "generate"], [0.5, 0.0], {}, "BAD_RATIO"),
        (["logp", "generate"], [0.5, 0.5], {}, "MISSING_TASK"),
        (
            ["train", "generate"],
            [0.5, 0.5],
            {"granularity": "node", "total_gpus": 12},
            "TOTAL_NOT_MULTIPLE_OF_NODE",
        ),
        (
            ["train", "generate"],
            [0.625, 0.375],
            {"parallelism": {"train": 2}},
            "NOT_DIVISIBLE_BY_PARALLELISM",
        ),
    ],
)
def test_each_fault_has_a_name(groups, ratios, options, fault):
    arguments = {"total_gpus": 8, "gpus_per_node": 8, **options}
    with pytest.raises(TaskGroupError) as caught:
        place_groups(groups, ratios, **arguments)
    assert caught.value.fault is TaskGroupFault(fault)


def test_whole_nodes_can_be_split_and_a_part_left_unused():
    placed = place_groups(
        ["actor-train", "rollout"],
        [0.5, 0.25],
        total_gpus=32,
        gpus_per_node=8,
        granularity="node",
    )
    assert [(group.tasks, group.gpus, group.pods) for group in placed.groups] == [
        (("train",), 16, (8, 8)),
        (("generate",), 8, (8,)),
    ]
    assert placed.unused_gpus == 8


TOPOLOGY = {"task_groups": [["train", "logp"], "ref_logp", "generate"], "ratios": [0.5, 0.25, 0.25]}


def test_the_split_gives_the_numbers_of_processes():
    spec = spec_with(topology={**TOPOLOGY, "gpus": 8}, algorithm={"kl": {"coefficient": 0.1}})
    assert (spec.trainer.world_size, spec.rollout.replicas) == (4, 2)
    assert spec.topology.own_gpus("ref_logp") == 2
    assert spec.topology.own_gpus("logp") == 0
    assert parse_spec(canonical_json(spec)) == spec


def test_an_engine_of_several_gpus_gives_fewer_replicas():
    spec = spec_with(
        topology={"task_groups": ["train", "generate"], "ratios": [0.5, 0.5], "gpus": 8},
        rollout={"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}},
    )
    assert spec.rollout.replicas == 2


@pytest.mark.parametrize("spelling", ["separated", "sperated"])
def test_the_spellings_of_dots_rl_are_accepted(spelling):
    spec = spec_with(
        topology={
            f"{spelling}_node_tasks": [["actor-train", "logp", "ref"], "rollout"],
            f"{spelling}_node_ratios": [0.5, 0.5],
            "gpus": 4,
        }
    )
    assert spec.topology.task_groups == (("train", "logp", "ref_logp"), ("generate",))


@pytest.mark.parametrize(
    ("topology", "changes", "message"),
    [
        ({**TOPOLOGY, "gpus": 8}, {}, "algorithm.kl.coefficient is 0"),
        (
            {"task_groups": ["train", "logp", "generate"], "ratios": [0.5, 0.25, 0.25], "gpus": 4},
            {},
            "trainer.updates_per_step",
        ),
        (
            {"task_groups": ["train", "logp", "generate"], "ratios": [0.5, 0.25, 0.25], "gpus": 4},
            {
                "trainer": {"updates_per_step": 2},
                "weight_sync": {"publish_every": 2},
            },
            "weight_sync.publish_every",
        ),
        (
            {"task_groups": [["train", "generate"]], "ratios": [1.0], "gpus": 4},
            {},
            "topology.task_groups puts train, generate",
        ),
        (
            {
                "task_groups": ["train", "critic", "generate"],
                "ratios": [0.5, 0.25, 0.25],
                "gpus": 4,
            },
            {},
            "has no critic",
        ),
        (
            {
                "task_groups": ["train", "critic", "generate"],
                "ratios": [0.5, 0.25, 0.25],
                "gpus": 4,
            },
            {"algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1, "placement": "reward"}}},
            "algorithm.kl.placement",
        ),
        (
            {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5], "gpus": 4},
            {"trainer": {"world_size": 1}},
            "trainer.world_size is 1",
        ),
        (
            {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5], "gpus": 4},
            {"rollout": {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 4}}},
            "topology.ratios: NOT_DIVISIBLE_BY_PARALLELISM: group generate gets 2 GPUs",
        ),
        (
            {**TOPOLOGY, "gpus": 8, "scoring_ranks": 4},
            {"algorithm": {"kl": {"coefficient": 0.1}}},
            "NOT_DIVISIBLE_BY_PARALLELISM",
        ),
        (
            {
                "task_groups": ["train", "logp", "generate"],
                "ratios": [0.25, 0.5, 0.25],
                "gpus": 4,
                "scoring_ranks": 2,
            },
            {"trainer": {"updates_per_step": 2}},
            "set it to 'cpu_async'",
        ),
        (
            {
                "task_groups": [["train", "logp"], "generate"],
                "ratios": [0.5, 0.5],
                "gpus": 4,
                "scoring_ranks": 2,
            },
            {},
            "topology.scoring_ranks",
        ),
        ({"scoring_ranks": 2}, {}, "topology.scoring_ranks"),
        ({"task_groups": ["train", "rollot"], "ratios": [0.5, 0.5], "gpus": 4}, {}, "UNKNOWN_TASK"),
        ({"task_groups": ["train", "generate"], "ratios": [0.5, 0.5]}, {}, "topology.gpus"),
        ({"gpus": 4}, {}, "topology.task_groups"),
    ],
)
def test_an_impossible_topology_is_rejected(topology, changes, message):
    with pytest.raises(SpecError, match=message):
        spec_with(topology=topology, **changes)


def test_task_groups_among_the_trainers_options_are_those_of_dots_rl():
    trainer = {
        "sperated_node_tasks": [["logp", "actor-train"], "generate"],
        "sperated_node_ratios": [0.75, 0.25],
        "nnodes": 4,
        "n_gpus_per_node": 8,
    }
    spec = spec_with(trainer=trainer)
    assert (spec.trainer.world_size, spec.rollout.replicas) == (24, 8)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"weight_sync": {"param_update_consume_bucket_size_mb": float("nan")}}, "staging_bytes"),
        ({"rollout": {"param_update_preduce_bucket_size_mb": float("inf")}}, "bucket_bytes"),
        ({"rollout": {"param_update_preduce_bucket_size_mb": 10**400}}, "bucket_bytes"),
        (
            {
                "trainer": {
                    "sperated_node_tasks": ["actor-train", "generate"],
                    "sperated_node_ratios": [0.5, 0.5],
                    "nnodes": 10**30,
                    "n_gpus_per_node": 8,
                }
            },
            "topology.gpus",
        ),
    ],
)
def test_numbers_without_a_meaning_are_refused_with_their_key(
    parts: dict[str, Any], key: str
) -> None:
    draft = draft_of(changed(**parts), [], folder=Path())
    assert any(key in str(problem) for problem in draft.examined.problems)


def noted(**parts: Any) -> tuple[RunSpec, str]:
    """Returns a specification with keys changed, and its notes."""
    draft = draft_of(changed(**parts), [], folder=Path())
    assert not draft.examined.problems
    assert draft.examined.spec is not None
    return draft.examined.spec, "\n".join(draft.notes)


@pytest.mark.parametrize("section", ["trainer", "topology"])
def test_node_ratios_split_nodes(section: str) -> None:
    split = {
        "sperated_node_tasks": [["logp", "actor-train"], "ref_logp", "generate"],
        "sperated_node_ratios": [0.5, 0.25, 0.25],
    }
    sizes = {"trainer": {"nnodes": 3, "n_gpus_per_node": 8}, "topology": {"gpus": 24}}[section]
    spec, notes = noted(**{section: split | sizes}, algorithm={"kl": {"coefficient": 0.1}})
    assert [group.gpus for group in spec.topology.place().groups] == [8, 8, 8]
    assert not [*pod_problems(spec)]
    assert "topology.granularity" in notes
    chosen, _ = noted(
        topology={**split, "gpus": 24, "granularity": "gpu"},
        algorithm={"kl": {"coefficient": 0.1}},
    )
    assert chosen.trainer.world_size == 12


def test_node_ratios_of_one_node_split_its_gpus() -> None:
    split = {
        "sperated_node_tasks": ["actor-train", "generate"],
        "sperated_node_ratios": [0.5, 0.5],
        "nnodes": 1,
        "n_gpus_per_node": 8,
    }
    spec, notes = noted(trainer=split)
    assert (spec.trainer.world_size, spec.rollout.replicas) == (4, 4)
    assert "fewer whole nodes" in notes


FIRST_EXAMPLE = {
    "sperated_node_tasks": ["logp", "ref_logp", "actor-train", "generate"],
    "sperated_node_ratios": [0.25, 0.25, 0.25, 0.25],
    "nnodes": 4,
    "n_gpus_per_node": 8,
}


@pytest.mark.parametrize(
    ("parts", "groups", "num_ranks"),
    [
        ({}, [("train", "logp", "ref_logp"), ("generate",)], 24),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}}},
            [("ref_logp",), ("train", "logp"), ("generate",)],
            16,
        ),
        (
            {"trainer": {"updates_per_step": 2}, "algorithm": {"kl": {"coefficient": 0.1}}},
            [("logp",), ("ref_logp",), ("train",), ("generate",)],
            8,
        ),
    ],
)
def test_the_first_example_of_dots_rl_runs_and_a_note_names_groups_without_work(
    parts: dict[str, Any], groups: list[tuple[str, ...]], num_ranks: int
) -> None:
    trainer = {**FIRST_EXAMPLE, **parts.get("trainer", {})}
    spec, notes = noted(**{**parts, "trainer": trainer})
    assert list(spec.topology.task_groups) == groups
    assert spec.trainer.world_size == num_ranks
    for task in ("logp", "ref_logp"):
        is_merged = (task,) not in groups
        assert (f"{task} would have GPUs" in notes or f"{task} and" in notes) == is_merged
