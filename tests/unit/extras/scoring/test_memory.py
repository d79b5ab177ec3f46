"""Tests of the planned memory of workers that only score, and of a critic with its own GPUs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from services.checks.start.memory import needed_by_gpu, run_memory
from services.common.memory.sizes import weight_bytes
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from tests.helpers.configs import qwen_7b
from tests.helpers.mixtures import tiny_config
from tests.helpers.specs import spec_with

GB = 10**9
CONFIG = qwen_7b()
WHOLE = weight_bytes(CONFIG, torch.bfloat16)


def run_with(ranks: int, *roles: str, **parts: Any) -> RunSpec:
    """Returns a run of 8 trainer processes, whose further roles have GPUs of their own."""
    groups = {"train": 8, **dict.fromkeys(roles, ranks), "generate": 1}
    total = sum(groups.values())
    algorithm: dict[str, Any] = {"kl": {"coefficient": 0.1}} if "ref_logp" in roles else {}
    if "critic" in roles:
        algorithm["advantage"] = "gae"
    topology = {
        "task_groups": [*groups],
        "ratios": [count / total for count in groups.values()],
        "gpus": total,
        **({} if roles == ("critic",) else {"scoring_ranks": ranks}),
        **parts.pop("topology", {}),
    }
    trainer = {"dtype": "bfloat16", "updates_per_step": 2, **parts.pop("trainer", {})}
    sync = {"mode": "cpu_async"}
    return spec_with(
        algorithm=algorithm, trainer=trainer, topology=topology, weight_sync=sync, **parts
    )


def memory_of(spec: RunSpec, gpu_gb: int = 141) -> Any:
    return run_memory(spec, CONFIG, gpu_bytes=gpu_gb * GB)


def test_the_plan_shows_each_kind_of_worker_with_its_own_gpus() -> None:
    memory = memory_of(run_with(2, "logp", "ref_logp", "critic"))
    table = memory.table()
    for role in ("logp", "ref_logp", "critic"):
        assert f"each of the {role}'s 2 GPU(s)" in table
    assert memory_of(spec_with()).apart == {}


def test_ranks_share_the_weights_of_a_reference() -> None:
    sizes = [
        memory_of(run_with(ranks, "ref_logp")).apart["ref_logp"].parts["weights, frozen"]
        for ranks in (1, 2, 4)
    ]
    assert sizes == pytest.approx([WHOLE, WHOLE / 2, WHOLE / 4])


def test_tensor_parallel_ranks_hold_their_part_of_layers_and_all_that_is_outside() -> None:
    scoring = {"scoring": {"tensor_parallel": 2}}
    memory = memory_of(run_with(2, "ref_logp", topology=scoring)).apart["ref_logp"]
    outside = 2 * 2 * 152_064 * 3584 + 2 * 3584
    assert memory.parts["weights, frozen"] == pytest.approx((WHOLE - outside) / 2 + outside)
    assert "weights gathered for a forward pass" not in memory.parts


def test_offloaded_weights_are_in_host_memory() -> None:
    scoring = {"scoring": {"cpu_offload": True}}
    here = memory_of(run_with(2, "ref_logp")).apart["ref_logp"]
    there = memory_of(run_with(2, "ref_logp", topology=scoring)).apart["ref_logp"]
    assert there.host["weights, frozen"] == here.parts["weights, frozen"]
    assert there.used == pytest.approx(here.used - here.parts["weights, frozen"])


def test_a_sharded_policy_receives_whole_weights_in_host_memory() -> None:
    memory = memory_of(run_with(2, "logp")).apart["logp"]
    assert memory.host["weights in transfer"] == WHOLE
    assert memory.parts["weights in transfer"] == 2 * 152_064 * 3584


def test_a_critic_has_a_trainers_state_in_its_own_layout_and_no_logits() -> None:
    memory = memory_of(run_with(4, "critic", trainer={"lora": {"rank": 8}})).apart["critic"]
    assert memory.parts["weights, float32"] == pytest.approx(2 * WHOLE / 4)
    assert memory.parts["optimizer"] == 2 * memory.parts["weights, float32"]
    assert not memory.parts.keys() & {"logits", "weights in transfer", "reference"}
    offloaded = memory_of(run_with(4, "critic", critic={"cpu_offload": True})).apart["critic"]
    assert offloaded.host["optimizer"] == memory.parts["optimizer"]


@pytest.mark.parametrize(
    ("role", "count", "gpu_gb", "key", "change"),
    [
        ("ref_logp", 4, 60, "topology.scoring_ranks", "topology.scoring_ranks: 2"),
        ("ref_logp", 1, 60, "topology.scoring_ranks", 'topology.scoring: {"cpu_offload": true}'),
        ("critic", 1, 80, "critic.cpu_offload", "critic.cpu_offload: 'optimizer'"),
        ("critic", 1, 60, "critic.cpu_offload", "critic.cpu_offload: true"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_smallest_change_that_fits(
    tmp_path: Path, role: str, count: int, gpu_gb: int, key: str, change: str
) -> None:
    """The trainer and the rollouts fit."""
    shape = {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64}
    Qwen2Config(**shape, vocab_size=152_064).save_pretrained(tmp_path)
    teacher = {"path": str(tmp_path), "tokenizer": "bytes"}
    parts = {"teacher": teacher, "topology": {"scoring_ranks": 1}} if role == "ref_logp" else {}
    memory = memory_of(run_with(count, role, **parts), gpu_gb)
    fix = rf"{re.escape(key)}.* It fits with {re.escape(change)}\n"
    with pytest.raises(ValueError, match=rf"a GPU of the {role} has .*{fix}"):
        memory.check()


def test_a_teachers_own_shape_is_planned(tmp_path: Path) -> None:
    config = tiny_config("qwen2", vocab_size=24)
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "teacher")
    teacher = {"path": str(tmp_path / "teacher"), "tokenizer": "bytes"}
    memory = memory_of(run_with(1, "ref_logp", teacher=teacher)).apart["ref_logp"]
    assert memory.parts["weights, frozen"] == weight_bytes(config, torch.bfloat16)


def test_a_machines_gpu_needs_include_workers_apart() -> None:
    spec = run_with(1, "ref_logp")
    gpus = [str(number) for number in range(10)]
    sizes = needed_by_gpu(spec, CONFIG, gpu_bytes=141 * GB, gpus=gpus)
    used = memory_of(spec).apart["ref_logp"].used
    assert used in sizes.values()
