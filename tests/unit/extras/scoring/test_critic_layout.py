"""Tests of the layout of a critic with its own GPUs, and of scoring workers of a trainer of stages."""

from typing import Any

import pytest

from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.worker_kinds import gpu_needs
from tests.helpers.specs import changed, spec_with

STAGES = {"engine": "stages", "pipeline_parallel": 2}


def critic_run(
    critic: dict[str, Any], *, gpus: int = 4, trainer: dict[str, Any] | None = None, **parts: Any
) -> dict[str, Any]:
    """Returns a run of two trainer processes, a critic with some GPUs, and a rollout."""
    total = gpus + 3
    return {
        "critic": critic,
        "algorithm": {"advantage": "gae"},
        "trainer": trainer or {},
        "topology": {
            "task_groups": ["train", "critic", "generate"],
            "ratios": [count / total for count in (2, gpus, 1)],
            "gpus": total,
        },
        **parts,
    }


@pytest.mark.parametrize("trainer", [{}, {"tensor_parallel": 2}, STAGES])
def test_a_critic_has_a_layout_of_its_own(trainer: dict[str, Any]) -> None:
    layout = {"tensor_parallel": 2, "expert_parallel": 2, "cpu_offload": True}
    spec = spec_with(**critic_run(layout, trainer=trainer))
    apart = spec.of_critic.trainer
    assert (apart.world_size, apart.tensor_parallel, apart.expert_parallel) == (4, 2, 2)
    assert (apart.pipeline_parallel, apart.cpu_offload, apart.engine) == (1, True, "fsdp")
    assert gpu_needs(spec)["critic-0"] == 4
    assert spec.trainer.cpu_offload is False


def test_a_critic_has_stages_of_its_own() -> None:
    spec = spec_with(**critic_run({"pipeline_parallel": 2}, trainer=STAGES))
    apart = spec.of_critic.trainer
    assert (apart.world_size, apart.pipeline_parallel, apart.engine) == (4, 2, "stages")


def test_a_critic_without_a_layout_is_sharded_and_offloads_as_the_trainer_does() -> None:
    offloading = {"cpu_offload": "optimizer", "tensor_parallel": 2}
    apart = spec_with(**critic_run({}, trainer=offloading)).of_critic.trainer
    assert (apart.world_size, apart.tensor_parallel, apart.cpu_offload) == (4, 1, "optimizer")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            critic_run({"tensor_parallel": 2}, gpus=4, topology={}),
            ["critic.tensor_parallel is 2", "topology.task_groups"],
        ),
        (
            critic_run({"expert_parallel": 3}),
            ["critic.expert_parallel is 3", "number of GPUs of critic", "divisor"],
        ),
        (
            critic_run({"pipeline_parallel": 2}),
            ["critic.pipeline_parallel", "'fsdp'", "'stages'"],
        ),
        (
            critic_run({"pipeline_parallel": 2, "cpu_offload": True}, trainer=STAGES),
            ["critic.cpu_offload", "false"],
        ),
        (
            critic_run({"tensor_parallel": 2}, trainer={"optimizer": {"kind": "muon"}}),
            ["'muon'", "critic.tensor_parallel is 2"],
        ),
        (
            critic_run({"cpu_offload": True}, trainer={"zero_stage": 1}),
            ["trainer.zero_stage", "critic.cpu_offload"],
        ),
        (
            critic_run({"tensor_parallel": 3}),
            ["number of GPUs of critic (4)", "multiple of critic.tensor_parallel (3)"],
        ),
    ],
)
def test_layouts_that_a_critic_cannot_have_are_refused_with_its_keys(
    run: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(changed(**run))
    problems = refused.value.problems
    assert any(all(word in problem for word in words) for problem in problems), problems


@pytest.mark.parametrize(
    ("role", "parts"),
    [
        ("logp", {"trainer": {**STAGES, "updates_per_step": 2}}),
        ("ref_logp", {"trainer": STAGES, "algorithm": {"kl": {"coefficient": 0.1}}}),
    ],
)
def test_a_trainer_of_stages_has_scoring_workers_of_another_layout(
    role: str, parts: dict[str, Any]
) -> None:
    spec = spec_with(
        **parts,
        weight_sync={"mode": "cpu_async"},
        topology={
            "task_groups": ["train", role, "generate"],
            "ratios": [2 / 7, 4 / 7, 1 / 7],
            "gpus": 7,
            "scoring_ranks": 4,
            "scoring": {"tensor_parallel": 2, "expert_parallel": 2},
        },
    )
    assert gpu_needs(spec)[f"{role.replace('_', '-')}-0"] == 4
