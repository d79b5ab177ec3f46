"""Tests that the pods of a valid run have room on nodes, and that other runs are refused with key and fix."""

import re
from math import prod
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from services.common.errors import FailedPreconditionError
from services.common.launchers import PodTopology
from services.common.runspec.keys import flat
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import total_gpus
from services.extras.kubernetes.pod_rules import pod_problems
from services.extras.kubernetes.worker_pods import Pod, WorkerTemplates, build_pods
from tests.helpers.specs import changed, spec_with

GPU = "nvidia.com/gpu"
TEMPLATE: Pod = {
    "metadata": {"labels": {}, "annotations": {"slipstream.dev/gpu-resource": GPU}},
    "spec": {
        "subdomain": "workers",
        "containers": [{"name": "worker", "image": "worker", "env": [], "resources": {}}],
        "volumes": [],
    },
}


def built(spec: RunSpec, topology: PodTopology) -> list[Pod]:
    pods = {"trainer": TEMPLATE, "rollout": TEMPLATE}
    return build_pods(
        WorkerTemplates(topology=topology, pods=pods),
        "run_01",
        spec,
        controller_address="controller:50051",
        owner={},
    )


def gpus(pod: Pod) -> int:
    limits = [c["resources"].get("limits", {}) for c in pod["spec"]["containers"]]
    return sum(int(limit.get(GPU, 0)) for limit in limits)


def ranks(pod: Pod) -> int:
    """Returns the number of processes that the first container starts."""
    command = pod["spec"]["containers"][0].get("command", [])
    counts = [
        argument.partition("=")[2]
        for argument in command
        if argument.startswith("--nproc-per-node=")
    ]
    return int(counts[0]) if counts else 1


def named_key(problem: str) -> str:
    """Returns the key with which a problem begins."""
    return re.split(r"[:, ]", problem, maxsplit=1)[0]


SIZES = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16, 24, 26))
NODES = st.sampled_from((1, 2, 4, 8))
ENGINES = (*3 * [(1, 1, 1)], (2, 1, 1), (1, 2, 1), (1, 1, 4), (8, 1, 1), (4, 2, 1), (2, 2, 4))
ENGINE_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Draws trainers of stages and of tensor- and context-parallel processes, on several nodes too."""
    small = st.sampled_from((1, 2, 4))
    stages, tensor, context = draw(st.sampled_from((1, 2, 3, 4))), draw(small), draw(small)
    return {
        "engine": "stages" if stages > 1 else "fsdp",
        "pipeline_parallel": stages,
        "tensor_parallel": tensor,
        "context_parallel": context,
        "world_size": stages * tensor * context * draw(SIZES),
    }


def options(pod: Pod) -> dict[str, str]:
    """Returns the options of ``torchrun`` in the command of a pod's first container."""
    command = pod["spec"]["containers"][0].get("command", [])
    pairs = (argument[2:].partition("=") for argument in command if argument.startswith("--"))
    return {name: value for name, _, value in pairs}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Draws specifications with counts, a colocated or mixed placement, or task groups."""
    sizes = draw(st.sampled_from(ENGINES))
    arguments, engine_gpus = dict(zip(ENGINE_SIZES, sizes, strict=True)), prod(sizes)
    rollout: dict[str, Any] = {"engine": "vllm", "engine_arguments": arguments}
    parts: dict[str, Any] = {"rollout": rollout, "topology": {"gpus_per_node": draw(NODES)}}
    kind = draw(st.sampled_from(("counts", "colocated", "mixed", "groups", "layout")))
    if kind == "layout":
        parts["trainer"] = draw(layouts())
        rollout["replicas"] = draw(st.integers(1, 4))
    elif kind == "groups":
        others = draw(st.lists(st.sampled_from(("ref_logp", "critic")), unique=True))
        scoring_ranks = draw(SIZES) if "ref_logp" in others else 1
        units = {"generate": engine_gpus, "ref_logp": scoring_ranks}
        tasks = ["train", "generate", *others]
        counts = [units.get(task, draw(SIZES)) * draw(st.integers(1, 2)) for task in tasks]
        parts["topology"] |= {
            "task_groups": tasks,
            "ratios": [count / sum(counts) for count in counts],
            "gpus": sum(counts),
        }
        if "ref_logp" in others:
            parts["topology"]["scoring_ranks"] = scoring_ranks
            parts["algorithm"] = {"kl": {"coefficient": 0.1}}
        if "critic" in others:
            parts["algorithm"] = {**parts.get("algorithm", {}), "advantage": "gae"}
    else:
        unit = 1 if kind == "counts" else engine_gpus
        parts["trainer"] = {"world_size": unit * draw(SIZES)}
        if kind == "counts":
            rollout["replicas"] = draw(st.integers(1, 4))
        else:
            parts["topology"]["placement"] = kind
    return changed(**parts)


@given(document=documents(), topology=st.sampled_from(("separate", "bundled")))
def test_a_pod_of_a_valid_run_has_at_most_the_gpus_of_a_node(
    document: dict[str, Any], topology: PodTopology
) -> None:
    try:
        spec = spec_with(**document)
    except SpecError as error:
        note(str(error))
        return
    node_gpus = spec.topology.gpus_per_node
    problems = [*pod_problems(spec, topology)]
    if problems:
        with pytest.raises(FailedPreconditionError):
            built(spec, topology)
        for problem in problems:
            assert named_key(problem) in dict(flat(spec.model_dump()))
            assert "topology.gpus_per_node" in problem
        # A node with all GPUs of the run has room for each pod.
        wide = {**document["topology"], "gpus_per_node": total_gpus(spec)}
        assert not [*pod_problems(spec_with(**{**document, "topology": wide}), topology)]
        return
    pods = built(spec, topology)
    assert all(gpus(pod) <= node_gpus for pod in pods), [gpus(pod) for pod in pods]
    assert sum(map(gpus, pods)) == total_gpus(spec)
    if topology == "separate" and not spec.topology.is_colocated:
        for pod in pods:
            assert ranks(pod) in {gpus(pod), 1}
        assert_ranks_meet([pod for pod in pods if named(pod) == "trainer-0"], spec)


def assert_ranks_meet(pods: list[Pod], spec: RunSpec) -> None:
    """Asserts that the pods of a trainer start each rank once, and meet at the first one's stable name."""
    size, node_gpus = spec.trainer.world_size, spec.topology.gpus_per_node
    assert len(pods) == max(1, size // node_gpus)
    assert sum(map(ranks, pods)) == size
    if len(pods) == 1:
        return
    first = pods[0]["spec"]
    for number, pod in enumerate(pods):
        torchrun_options = options(pod)
        assert (torchrun_options["nnodes"], torchrun_options["node-rank"]) == (
            str(len(pods)),
            str(number),
        )
        assert torchrun_options["master-addr"] == f"{first['hostname']}.{first['subdomain']}"
        assert torchrun_options["master-port"] == options(pods[0])["master-port"]
        assert pod["spec"]["hostname"] == pod["metadata"]["name"]


def named(pod: Pod) -> str:
    """Returns the worker of a pod."""
    return str(pod["spec"]["containers"][0]["name"])


@pytest.mark.parametrize(
    ("parts", "topology", "key"),
    [
        ({"trainer": {"world_size": 12}}, "separate", "trainer.world_size"),
        ({"trainer": {"world_size": 16}}, "separate", ""),
        (
            {"trainer": {"world_size": 24, "engine": "stages", "pipeline_parallel": 3,
                         "tensor_parallel": 2}},
            "separate",
            "",
        ),
        (
            {"trainer": {"world_size": 20, "engine": "stages", "pipeline_parallel": 2}},
            "separate",
            "trainer.world_size",
        ),
        ({"trainer": {"world_size": 16}}, "bundled", "trainer.world_size"),
        (
            {"rollout": {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 16}}},
            "separate",
            "rollout.engine_arguments.tensor_parallel_size",
        ),
        (
            {"rollout": {"engine": "vllm", "engine_arguments": {"data_parallel_size": 8}},
             "topology": {"gpus_per_node": 4}},
            "separate",
            "rollout.engine_arguments.data_parallel_size",
        ),
        (
            {"trainer": {"world_size": 16}, "topology": {"placement": "colocated"}},
            "separate",
            "topology.placement",
        ),
        (
            {"trainer": {"world_size": 16}, "topology": {"placement": "mixed"}},
            "separate",
            "topology.placement",
        ),
        (
            {"topology": {"task_groups": ["train", "ref_logp", "generate"], "gpus": 28,
                          "ratios": [8 / 28, 12 / 28, 8 / 28], "scoring_ranks": 12},
             "algorithm": {"kl": {"coefficient": 0.1}}},
            "separate",
            "topology.scoring_ranks",
        ),
        (
            {"topology": {"task_groups": ["train", "critic", "generate"], "gpus": 28,
                          "ratios": [8 / 28, 12 / 28, 8 / 28]},
             "algorithm": {"advantage": "gae"}},
            "separate",
            "topology.ratios",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_key(parts: dict[str, Any], topology: PodTopology, key: str) -> None:
    problems = [*pod_problems(spec_with(**parts), topology)]
    assert [named_key(problem) for problem in problems] == [key] * bool(key)
