"""Context-parallel ranks compute the logprobs, gradients and steps of one rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.common.errors import UnavailableError
from services.common.models.families import FAMILIES
from services.common.models.loading import build_model
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.model.policy import Critic, Policy
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import Queue, policy_of, random_queue, rank_of, spec_for
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks
from tests.integration.test_trainer_ranks import assert_same, train_once

_CPU = torch.device("cpu")
_USUAL = ("llama", "mistral", "gemma2", "qwen3_5_text")
"""Plain attention, windows, alternating windows with capped scores, recurrent layers."""
_OTHERS = tuple(
    name for name, family in FAMILIES.items() if family.routing is None and name not in _USUAL
)
_MIXTURES = tuple(name for name, family in FAMILIES.items() if family.routing is not None)


def _join(rank: int, store: str, ranks: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names", [_USUAL, pytest.param(_OTHERS, marks=pytest.mark.nightly), _MIXTURES]
)
def test_packs_of_every_family_are_exact(names: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(_families, str(tmp_path / "store"), names, count=2)


def _families(rank: int, store: str, names: tuple[str, ...]) -> None:
    _join(rank, store, 2)
    plain, shared, *_ = _packs()
    for name in names:
        _compare(name, lambda n=name: _policy(n, 2), [plain, shared], ranks=2)
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_any_ranks_and_packs_are_exact(tmp_path: Path) -> None:
    run_ranks(_shapes, str(tmp_path / "store"), count=4)


def _shapes(rank: int, store: str) -> None:
    _join(rank, store, 4)
    for options in (
        # Fewer key-value heads than ranks.
        {"context_parallel": 4},
        {"context_parallel": 2, "tensor_parallel": 2},
        {"context_parallel": 4, "zero_stage": 1, "activation_checkpointing": True},
        {"context_parallel": 2, "activation_checkpointing": "selective"},
        {
            "context_parallel": 2,
            "tensor_parallel": 2,
            "activation_checkpointing": 2,
            "activation_offloading": True,
        },
    ):
        # Tensor parallelism splits the sums inside a layer, so their rounding differs a little more.
        tolerance = 3e-6 if "tensor_parallel" in options else 1e-6
        _compare(
            str(options), lambda: _policy("qwen3", 2), _packs(), tolerance=tolerance, **options
        )
    for options in (
        {"context_parallel": 2, "expert_parallel": 2},
        {"context_parallel": 2, "expert_parallel": 4, "activation_checkpointing": True},
        {"context_parallel": 4, "expert_parallel": 2},
    ):
        _compare(str(options), lambda: _policy("qwen3_moe", 2), _packs(), **options)
    _compare("critic", lambda: _critic(), _packs(), context_parallel=4)
    distributed.destroy_process_group()


def _compare(
    case: str,
    make: Callable[[], Policy | Critic],
    packs: list[PackedTokens],
    *,
    ranks: int = 4,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    """Compares the scores of packs and the gradients of one update with those of a single rank."""
    options = {"context_parallel": ranks, **options}
    spec = TrainerSpec(steps=1, prompts_per_step=1, world_size=ranks, **options)
    topology = build_topology(spec, device=_CPU, rank=distributed.get_rank(), world_size=ranks)
    expected, own_gradients = _run(make(), packs)
    module = make()
    distribute(module, spec, topology)
    with torch.no_grad():
        scored = [_scores(module, packed) for packed in packs]
    actual, gradients = _run(module, packs)
    for outputs in (scored, actual):
        for output, expected_output in zip(outputs, expected, strict=True):
            error = (output - expected_output).norm() / expected_output.norm().clamp(min=1e-6)
            assert error <= tolerance, f"{case}: scores differ by {error}"
    norm = torch.stack([value.norm() for value in own_gradients.values()]).norm()
    for key, value in own_gradients.items():
        error = (gradients[key] - value).norm() / norm
        assert error <= tolerance, f"{case}: gradient of {key} differs by {error}"


def _run(
    module: Policy | Critic, packs: list[PackedTokens]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    scores = []
    for packed in packs:
        outputs = _scores(module, packed)
        # Each token has a different gradient, for both of a policy's scores.
        weights = torch.linspace(-1.0, 1.0, outputs.numel()).view_as(outputs)
        (outputs * weights).sum().backward()
        scores.append(outputs.detach())
    # A critic's output embedding has no gradient.
    trained = ((name, value.grad) for name, value in module.named_parameters())
    return scores, {name: _whole(gradient) for name, gradient in trained if gradient is not None}


def _scores(module: Policy | Critic, packed: PackedTokens) -> Tensor:
    scores = module(packed)
    return scores if isinstance(scores, Tensor) else torch.stack(scores)


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def _packs() -> list[PackedTokens]:
    """Returns packs with and without shared prompts, one with fewer tokens than ranks, an empty one."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*lengths: int) -> list[Tensor]:
        return [torch.randint(3, 61, (length,), generator=generator) for length in lengths]

    (common,) = tokens(9)
    prompts = [*tokens(3, 5, 1), common, common, common]
    responses = tokens(40, 4, 1, 7, 2, 13)
    short = tokens(1)
    return [
        *(
            pack(
                Jagged.from_list(prompts),
                Jagged.from_list(responses),
                device=_CPU,
                shares_prefixes=shares,
            )
            for shares in (False, True)
        ),
        pack(Jagged.from_list(short), Jagged.from_list(short), device=_CPU),
        pack(Jagged.from_list(short), Jagged.from_list(tokens(0)), device=_CPU),
    ]


def _model(name: str, heads: int) -> PreTrainedModel:
    config = tiny_config(name, num_key_value_heads=heads, sliding_window=6)
    return build_model(config, dtype=torch.float32, device=_CPU, seed=3)


def _policy(name: str, heads: int) -> Policy:
    return Policy(_model(name, heads), temperature=0.7)


def _critic() -> Critic:
    critic = Critic(_model("qwen2", 2))
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    return critic


_ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"aggregation": "seq-mean-token-mean", "entropy_coefficient": 0.01},
    {"loss": "gspo"},
    {
        "loss": "ppo",
        "correction": "decoupled",
        "rejection": [{"level": "seq_mean", "statistic": "k3", "upper": 0.5}],
    },
)


@pytest.mark.timeout(300)
def test_steps_are_those_of_one_rank(tmp_path: Path) -> None:
    run_ranks(_steps, str(tmp_path / "store"), count=4)


def _steps(rank: int, store: str) -> None:
    _join(rank, store, 4)
    for algorithm in _ALGORITHMS:
        expected = train_once(spec_for(algorithm=algorithm, share_prefixes=False))
        # Two packs at a time, each on two ranks.
        spec: RunSpec = spec_for(
            algorithm=algorithm,
            world_size=4,
            context_parallel=2,
            tokens_per_micro_batch=30,
        )
        assert_same(train_once(spec, rank=rank, world_size=4), expected)
    distributed.destroy_process_group()


class _Away(Queue):
    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        raise UnavailableError("the transferqueue is away")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared", ["context_parallel", "tensor_parallel"])
def test_a_rank_without_its_samples_fails_all_ranks(shared: str, tmp_path: Path) -> None:
    run_ranks(_fetch, str(tmp_path / "store"), shared, count=2)


def _fetch(rank: int, store: str, shared: str) -> None:
    _join(rank, store, 2)
    spec = spec_for(world_size=2, **{shared: 2})
    policy = policy_of(spec)
    queue = random_queue(policy_of(spec))
    topology = build_topology(spec.trainer, device=_CPU, rank=rank, world_size=2)
    distribute(policy, spec.trainer, topology)
    rank_queue = _Away(queue.meta, queue.fields) if rank == 1 else queue
    with pytest.raises(UnavailableError, match="is away" if rank == 1 else "another rank"):
        rank_of(spec, policy, rank_queue, topology=topology).train(StepCommand(1, queue.meta))
    result = rank_of(spec, policy, queue, topology=topology).train(StepCommand(1, queue.meta))
    assert not result.skipped
    distributed.destroy_process_group()
