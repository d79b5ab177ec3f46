"""A step with score centering equals a plain loop over the whole vocabulary, on any ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from services.common.fields import SAMPLER_TOP_K
from services.common.runspec.run import RunSpec
from services.rollout.engines.torch.decoding import most_likely
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.ranks import run_ranks

COUNT, CAP = 5, 1.2


def _spec(**trainer: Any) -> RunSpec:
    return spec_of(
        algorithm={
            "loss": "reinforce",
            "score_centering": COUNT,
            "correction_cap": CAP,
            "max_staleness": 8,
        },
        trainer={
            "optimizer": {"learning_rate": 0.1, "max_grad_norm": 1e9},
            "prompts_per_step": 4,
            **trainer,
        },
    )


def _distributions(spec: RunSpec, queue: Queue, *, seed: int) -> list[Tensor]:
    """Returns logprobs ``[r, V]`` of a random policy in place of each sample's response tokens."""
    policy = policy_of(spec, seed=seed, scale=1.5)
    policy.model.set_attn_implementation("eager")
    result = []
    for prompt, response in zip(
        queue.fields["prompt_ids"].unbind(), queue.fields["response_ids"].unbind(), strict=True
    ):
        ids = torch.cat([prompt, response]).long()
        logits = policy.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        result.append(logits.log_softmax(-1))
    return result


def _queue(spec: RunSpec) -> Queue:
    """Returns samples with the distributions of another policy, which sampled them."""
    queue = random_queue(policy_of(spec, scale=1.5), num_groups=4, group_size=4)
    with torch.no_grad():
        sampler = _distributions(spec, queue, seed=1)
    responses = queue.fields["response_ids"].unbind()
    sampled_logprobs = [
        logprobs.gather(1, response.long()[:, None]).squeeze(1)
        for logprobs, response in zip(sampler, responses, strict=True)
    ]
    top = [most_likely(logprobs, COUNT) for logprobs in sampler]
    return queue.replaced(
        rollout_logprobs=Jagged.from_list(sampled_logprobs),
        **{SAMPLER_TOP_K: Jagged.from_list(top)},
    )


def _train(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    spec = RunSpec.model_validate_json(spec_json)
    if world_size > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    policy = policy_of(spec, scale=1.5)
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    queue = _queue(spec)
    result = rank_of(spec, policy, queue, topology=topology).train(StepCommand(1, queue.meta))
    if rank == 0:
        torch.save(dict(result.metrics), f"{folder}/outcome.pt")
    if world_size > 1:
        distributed.destroy_process_group()


def _trained_by(spec: RunSpec, folder: Path) -> dict[str, float]:
    size = spec.trainer.world_size
    if size == 1:
        _train(0, 1, str(folder), spec.model_dump_json())
    else:
        run_ranks(_train, size, str(folder), spec.model_dump_json(), count=size)
    return dict(torch.load(folder / "outcome.pt", weights_only=True))


def _plain_norm(spec: RunSpec) -> float:
    """Returns the norm of the gradient, from a sum over all tokens of the modelled sampler."""
    queue = _queue(spec)
    policy = policy_of(spec, scale=1.5)
    policy.model.set_attn_implementation("eager")
    rewards = queue.fields["rewards"].values.view(4, 4)
    deviation = rewards.std(dim=1, keepdim=True)
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + 1e-6)).flatten()
    with torch.no_grad():
        sampler = _distributions(spec, queue, seed=1)
    total, count = torch.zeros(()), 0
    for row, (prompt, response, mask) in enumerate(
        zip(
            *(queue.fields[n].unbind() for n in ("prompt_ids", "response_ids", "response_mask")),
            strict=True,
        )
    ):
        ids = torch.cat([prompt, response]).long()
        logprobs = policy.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        p, q = logprobs.detach().exp(), sampler[row].exp()
        head = torch.zeros_like(q, dtype=torch.bool).scatter(1, q.topk(COUNT).indices, True)
        alpha = (q * ~head).sum(1, keepdim=True) / (p * ~head).sum(1, keepdim=True)
        model = torch.where(head, q, alpha * p)
        center = (model * (p / model).clamp(max=CAP) * logprobs).sum(1)
        weights = (p / q).clamp(max=CAP).gather(1, response.long()[:, None]).squeeze(1)
        values = weights * logprobs.gather(1, response.long()[:, None]).squeeze(1) - center
        total = total - advantages[row] * values[mask.bool()].sum()
        count += int(mask.sum())
    (total / count).backward()
    squares = [float(parameter.grad.square().sum()) for parameter in policy.model.parameters()]
    return sum(squares) ** 0.5


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"tokens_per_micro_batch": 40},
        pytest.param({"world_size": 2}, marks=pytest.mark.nightly),
        {"world_size": 2, "context_parallel": 2},
        {"world_size": 2, "tensor_parallel": 2},
    ],
    ids=str,
)
def test_a_step_is_that_of_a_plain_loop(tmp_path: Path, trainer: dict[str, Any]) -> None:
    spec = _spec(**trainer)
    assert spec.correction == "bypass"
    actual = _trained_by(spec, tmp_path)
    assert actual["grad_norm"] == pytest.approx(_plain_norm(spec), rel=2e-4)
    assert 0 < actual["sampler_topk_mass"] < 1
