"""Expert-parallel ranks train, load, send and save as one rank does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.common.models.experts import is_fused
from services.common.models.loading import build_model, load_folder, stored_tensors
from services.common.runspec.trainer import LoraSpec, TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.checkpoint import manifest
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.build import fill
from services.trainer.engines.fsdp.checkpoint import ModelCheckpoint
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters, merged_parameters
from services.trainer.engines.fsdp.optim import build_optimizer, clip_gradients, gradient_norm
from services.trainer.engines.fsdp.parallel import RankTopology, build_topology, distribute
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.policy import Policy
from services.weightsync.weight_plan import row_shards
from services.wire.data.jagged import Jagged
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
_ADAPTERS = LoraSpec(rank=3, target_modules=("o_proj", "experts.gate_up_proj", "experts.down_proj"))
_ALL = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "shared", "families"),
    [(2, 2, _ALL), (4, 2, ("qwen3_moe", "deepseek_v3")), (4, 4, ("qwen3_moe", "gpt_oss"))],
)
def test_shared_experts_give_the_gradients_of_one_rank(
    tmp_path: Path, ranks: int, shared: int, families: tuple[str, ...]
) -> None:
    run_ranks(_compare, str(tmp_path / "store"), shared, families, ranks, count=ranks)


def _compare(rank: int, store: str, shared: int, families: tuple[str, ...], ranks: int) -> None:
    topology, spec = _join(rank, store, ranks, shared)
    for name in families:
        for build in (_policy, _lopsided, _adapted):
            expected, own_gradients = _run(build(name), range(ranks))
            policy = build(name)
            recomputed = {"activation_checkpointing": build is _lopsided}
            distribute(policy, spec.model_copy(update=recomputed), topology)
            loss, gradients = _run(policy, [rank], scale=ranks)
            loss = topology.data.sum(loss) / ranks
            case = f"{name}, {build.__name__}"
            assert (loss - expected).abs() <= 1e-6 * expected.abs(), case
            norm = torch.stack([value.norm() for value in own_gradients.values()]).norm()
            for key, value in own_gradients.items():
                error = (gradients[key] - value).norm() / norm
                assert error <= 1e-6, f"{case}: gradient of {key} differs by {error}"
    distributed.destroy_process_group()


def _join(
    rank: int, store: str, ranks: int, shared: int, *, tensor: int = 1
) -> tuple[RankTopology, TrainerSpec]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    spec = TrainerSpec(
        steps=1,
        prompts_per_step=1,
        world_size=ranks,
        expert_parallel=shared,
        tensor_parallel=tensor,
    )
    return build_topology(spec, device=_CPU, rank=rank, world_size=ranks), spec


def _policy(name: str) -> Policy:
    return Policy(_model(name), temperature=1.0)


def _lopsided(name: str) -> Policy:
    return Policy(_model(name, is_lopsided=True), temperature=1.0)


def _adapted(name: str) -> Policy:
    """Returns a policy with trained adapters on its experts."""
    policy = _policy(name)
    add_adapters(policy.model, _ADAPTERS)
    begin_adapters(policy, seed=5)
    with torch.no_grad():
        for key, parameter in policy.named_parameters():
            if "lora_B" in key:
                parameter.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(len(key)))
    return policy


def _model(name: str, is_lopsided: bool = False) -> PreTrainedModel:
    """Returns a random model; a lopsided one routes every token to the first expert."""
    # A single group of experts, of which a token chooses one.
    shape = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1} if is_lopsided else {}
    model = build_model(tiny_config(name, **shape), dtype=torch.float32, device=_CPU, seed=3)
    with torch.no_grad():
        for key, value in stored_tensors(model).items():
            if key.endswith("e_score_correction_bias"):
                value.uniform_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
            if is_lopsided and key.endswith(("e_score_correction_bias", "router.bias")):
                value[0] = 100.0
            if is_lopsided and key.endswith("mlp.gate.weight"):
                value[1:] = value[0]  # all equal: the first is chosen
    return model


def _pack(rank: int) -> tuple[Jagged, Jagged]:
    generator = torch.Generator().manual_seed(rank)
    sizes = [(3 + rank, 11), (5, 4 + rank)]
    prompts = [torch.randint(3, 61, (size,), generator=generator) for size, _ in sizes]
    responses = [torch.randint(3, 61, (size,), generator=generator) for _, size in sizes]
    return Jagged.from_list(prompts), Jagged.from_list(responses)


def _packed(rank: int) -> PackedTokens:
    return pack(*_pack(rank), device=_CPU)


def _run(policy: Policy, parts: Any, *, scale: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    total = torch.zeros(())
    for rows in parts:
        logprobs, _ = policy(_packed(rows))
        loss = scale * logprobs.square().sum()
        loss.backward()
        total += loss.detach()
    trained = {
        key: parameter.grad
        for key, parameter in policy.named_parameters()
        if parameter.requires_grad
    }
    return total, {key: _whole(gradient) for key, gradient in trained.items()}


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "shared", "tensor", "families"),
    [
        (4, 2, 2, ("qwen3_moe", "deepseek_v3")),
        pytest.param(8, 2, 2, ("qwen3_moe", "deepseek_v3"), marks=pytest.mark.nightly),
    ],
)
def test_tensor_parallel_ranks_share_experts_and_give_the_gradients_of_one_rank(
    tmp_path: Path, ranks: int, shared: int, tensor: int, families: tuple[str, ...]
) -> None:
    run_ranks(
        _compare_divided, str(tmp_path / "store"), shared, tensor, families, ranks, count=ranks
    )


def _compare_divided(
    rank: int, store: str, shared: int, tensor: int, families: tuple[str, ...], ranks: int
) -> None:
    """Compares with one rank; tensor-parallel ranks have the same pack."""
    topology, spec = _join(rank, store, ranks, shared, tensor=tensor)
    packs = topology.data.size
    for name in families:
        for build in (_policy, _lopsided):
            expected, own_gradients = _run(build(name), range(packs))
            policy = build(name)
            recomputed = {"activation_checkpointing": build is _lopsided}
            distribute(policy, spec.model_copy(update=recomputed), topology)
            loss, gradients = _run(policy, [topology.data.rank], scale=packs)
            loss = topology.data.sum(loss) / packs
            case = f"{name}, {build.__name__}"
            assert (loss - expected).abs() <= 1e-5 * expected.abs(), case
            norm = torch.stack([value.norm() for value in own_gradients.values()]).norm()
            for key, value in own_gradients.items():
                error = (gradients[key] - value).norm() / norm
                assert error <= 5e-6, f"{case}: gradient of {key} differs by {error}"
            measured = gradient_norm(list(policy.parameters()))
            assert (measured - norm).abs() <= 1e-5 * norm, case
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "shared"), [(2, 2), (4, 2)])
def test_adapters_of_shared_experts_begin_and_leave_as_those_of_one_rank(
    tmp_path: Path, ranks: int, shared: int
) -> None:
    alone = _adapted("mixtral")
    begin_adapters(alone, seed=7)
    torch.save(dict(alone.named_parameters()), tmp_path / "begun.pt")
    torch.save(dict(merged_parameters(_adapted("mixtral").model)), tmp_path / "merged.pt")
    run_ranks(_begin_adapters, str(tmp_path), shared, ranks, count=ranks)


def _begin_adapters(rank: int, folder: str, shared: int, ranks: int) -> None:
    root = Path(folder)
    topology, spec = _join(rank, str(root / "store"), ranks, shared)
    policy = _adapted("mixtral")
    distribute(policy, spec, topology)
    for key, value in merged_parameters(policy.model):
        torch.testing.assert_close(value, torch.load(root / "merged.pt")[key], msg=key)
    begin_adapters(policy, seed=7)
    begun = torch.load(root / "begun.pt")
    for key, value in policy.named_parameters():
        assert torch.equal(_whole(value.detach()), begun[key]), key
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "ranks", "shared"), [("deepseek_v3", 2, 2), ("mixtral", 4, 2), ("gpt_oss", 2, 1)]
)
def test_what_ranks_load_send_and_save_is_the_whole_model(
    tmp_path: Path, name: str, ranks: int, shared: int
) -> None:
    _model(name).save_pretrained(tmp_path / "model")
    run_ranks(_load_and_save, str(tmp_path), name, shared, ranks, count=ranks)
    # One rank resumes from the checkpoint of all ranks.
    policy = _policy(name)
    optimizer = build_optimizer(policy, _spec_alone().optimizer)
    alone = Checkpointer(
        {"": _saving(policy, optimizer, RankTopology(device=_CPU, data=Ranks()))},
        root=tmp_path / "run",
        keep=1,
        ranks=Ranks(),
    )
    alone.load()
    trained = torch.load(tmp_path / "trained.pt")
    for key, value in stored_tensors(policy.model).items():
        assert torch.equal(value, trained[key]), key


def _saving(policy: Policy, optimizer: Any, topology: RankTopology) -> Any:
    """Returns the part of an engine that saves and loads."""
    return ModelCheckpoint(policy, optimizer, topology=topology)


def _spec_alone() -> TrainerSpec:
    return TrainerSpec(steps=1, prompts_per_step=1)


def _load_and_save(rank: int, folder: str, name: str, shared: int, ranks: int) -> None:
    root = Path(folder)
    topology, spec = _join(rank, str(root / "store"), ranks, shared)
    policy = Policy(
        build_model(tiny_config(name), dtype=torch.float32, device="meta"), temperature=1.0
    )
    distribute(policy, spec, topology)
    fill(policy, root / "model", device=_CPU)
    whole = stored_tensors(load_folder(root / "model", dtype=torch.float32, device=_CPU))
    export = WeightExport(policy, dtype=torch.float32, ranks=topology.data)
    for key, value in export.weight_tensors():
        assert torch.equal(value, whole[key]), key

    # After an update changed the weights, the rows of all ranks still make up the whole weights.
    optimizer = build_optimizer(policy, spec.optimizer)
    checkpointer = Checkpointer(
        {"": _saving(policy, optimizer, topology)}, root=root / "run", keep=1, ranks=topology.data
    )
    _run(policy, [rank], scale=ranks)
    norm = gradient_norm(list(policy.parameters()))
    clip_gradients(list(policy.parameters()), norm, 1.0)
    optimizer.step()
    trained = dict(export.weight_tensors())
    assert not torch.equal(trained["lm_head.weight"], whole["lm_head.weight"])
    assert export.sends_rows == (shared in (1, ranks))
    if export.sends_rows:
        specs = export.weight_specs()
        rows = dict(export.weight_rows())
        for shard in row_shards(specs, ranks)[rank]:
            tensor = specs[shard.tensor]
            expected = trained[tensor.name][shard.start : shard.stop]
            assert torch.equal(rows[tensor.name], expected), tensor.name
    assert any(is_fused(key, policy.model.config.to_dict()) for key in trained) or name == "gpt_oss"
    checkpointer.write(checkpointer.snapshot(1, {"num_updates": 1}))
    if rank == 0:
        torch.save(trained, root / "trained.pt")
        assert manifest.newest(root / "run")[1]["num_updates"] == 1
    distributed.destroy_process_group()
