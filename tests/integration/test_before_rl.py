"""Fine-tuning steps equal a plain transformers loop, on any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from services.common.runspec.run import RunSpec
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.model.policy import Policy, freeze
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.ranks import run_ranks

TOLERANCE = 1e-5
Outcome = dict[str, Any]


class Recorder:
    """Fake optimizer that records the gradients."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.param_groups: list[dict[str, Any]] = [{}]
        self.gradients: dict[str, Tensor] = {}

    def step(self) -> None:
        for name, parameter in self._policy.model.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            self.gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    def zero_grad(self, *, set_to_none: bool) -> None:
        self._policy.zero_grad(set_to_none=set_to_none)


def batch_of(spec: RunSpec) -> Queue:
    """Returns twelve conversations of several turns; the mask is True for the assistant's tokens."""
    queue = random_queue(policy_of(spec, scale=1.5), num_groups=12, group_size=1)
    if spec.teacher is None or not spec.teacher.has_own_prompt:
        return queue
    tokens = torch.arange(2, 14, dtype=torch.int32)
    prompts = [
        torch.cat([tokens[row:], prompt]) for row, prompt in enumerate(rows_of(queue, "prompt_ids"))
    ]
    prompts[3] = prompts[7] = tokens[:0]
    return queue.replaced(teacher_prompt_ids=Jagged.from_list(prompts))


def pairs_of(spec: RunSpec) -> Queue:
    """Returns six pairs of answers; the first of each is preferred."""
    queue = random_queue(policy_of(spec, scale=1.5), num_groups=6, group_size=2)
    masks = rows_of(queue, "response_mask")
    for mask in masks:
        mask[0] = True
    preferred = Jagged.from_list([torch.tensor(float(row % 2 == 0)) for row in range(12)])
    return queue.replaced(response_mask=Jagged.from_list(masks), rewards=preferred)


def teacher_of(spec: RunSpec) -> Policy:
    return policy_of(spec.of_reference, seed=1, scale=1.5)


def _train(rank: int, world_size: int, folder: str, spec_json: str) -> None:
    spec = RunSpec.model_validate_json(spec_json)
    if world_size > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    policy = policy_of(spec, scale=1.5)
    queue = pairs_of(spec) if spec.algorithm.loss == "dpo" else batch_of(spec)
    topology = build_topology(spec.trainer, device=CPU, rank=rank, world_size=world_size)
    distribute(policy, spec.trainer, topology)
    reference = None
    if spec.needs_reference:
        reference = freeze(teacher_of(spec))
        distribute(reference, spec.trainer, topology)
    trained = rank_of(spec, policy, queue, topology=topology, reference=reference)
    recorder: Any = Recorder(policy)
    trained.runner.engine.optimizer = recorder
    result = trained.train(StepCommand(1, queue.meta))
    if rank == 0:
        outcome = {"metrics": result.metrics, "gradients": recorder.gradients}
        torch.save(outcome, f"{folder}/outcome.pt")
    if world_size > 1:
        distributed.destroy_process_group()


def trained_by(spec: RunSpec, folder: Path) -> Outcome:
    size = spec.trainer.world_size
    if size == 1:
        _train(0, 1, str(folder), spec.model_dump_json())
    else:
        run_ranks(_train, size, str(folder), spec.model_dump_json(), count=size)
    return dict(torch.load(folder / "outcome.pt", weights_only=True))


def plain_logprobs(policy: Policy, queue: Queue) -> tuple[Tensor, Tensor]:
    """Returns logprobs and mask ``[N, L - 1]`` of a padded batch, without the first tokens."""
    logprobs, ids, trains = plain_distributions(policy, queue)
    return logprobs.gather(-1, ids[..., None]).squeeze(-1), trains


def plain_distributions(policy: Policy, queue: Queue) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs ``[N, L - 1, V]``, and next tokens and mask, each ``[N, L - 1]``."""
    rows = [
        torch.cat([prompt, response]).long()
        for prompt, response in zip(
            rows_of(queue, "prompt_ids"), rows_of(queue, "response_ids"), strict=True
        )
    ]
    longest = max(map(len, rows))
    ids, is_real = (
        torch.zeros(len(rows), longest, dtype=torch.int64),
        torch.zeros(len(rows), longest),
    )
    trains = torch.zeros(len(rows), longest, dtype=torch.bool)
    masks = zip(rows_of(queue, "prompt_ids"), rows_of(queue, "response_mask"), strict=True)
    for row, (tokens, (prompt, mask)) in enumerate(zip(rows, masks, strict=True)):
        ids[row, : len(tokens)], is_real[row, : len(tokens)] = tokens, 1
        trains[row, len(prompt) : len(tokens)] = mask
    policy.model.set_attn_implementation("eager")
    logits = policy.model(input_ids=ids, attention_mask=is_real).logits[:, :-1]
    return logits.log_softmax(-1), ids[:, 1:], trains[:, 1:]


def plain(policy: Policy, queue: Queue, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Outcome:
    """Returns loss and gradients of a padded batch, computed without Slipstream's code.

    Args:
        policy: Policy whose model is trained.
        queue: The batch.
        loss_of: Computes the loss from the logprobs and mask of :func:`plain_logprobs`.
    """
    loss = loss_of(*plain_logprobs(policy, queue))
    loss.backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients}


def rows_of(queue: Queue, name: str) -> list[Tensor]:
    field: Jagged = queue.fields[name]
    return list(field.values.split(field.lengths.tolist()))


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome["gradients"].keys() == expected["gradients"].keys()
    gradients = torch.cat([outcome["gradients"][name].flatten() for name in expected["gradients"]])
    expected_gradients = torch.cat(
        [gradient.flatten() for gradient in expected["gradients"].values()]
    )
    assert (gradients - expected_gradients).abs().max() <= TOLERANCE
    assert (gradients - expected_gradients).norm() <= TOLERANCE * expected_gradients.norm()


def cross_entropy(logprobs: Tensor, trains: Tensor) -> Tensor:
    return -logprobs[trains].mean()


OPTIMIZER = {"max_grad_norm": 1e9}


@pytest.mark.parametrize("trainer", [{}, {"tokens_per_micro_batch": 40}, {"world_size": 2}])
def test_supervised_training_is_the_cross_entropy_of_a_plain_loop(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    spec = spec_of(
        algorithm={"loss": "sft"},
        rollout={"group_size": 1, "rewards": []},
        trainer={"optimizer": OPTIMIZER, "prompts_per_step": 12, **trainer},
    )
    actual = trained_by(spec, tmp_path)
    expected = plain(policy_of(spec, scale=1.5), batch_of(spec), cross_entropy)
    assert actual["metrics"]["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert_same(actual, expected)


@pytest.mark.parametrize("trainer", [{}, {"tokens_per_micro_batch": 40}, {"world_size": 2}])
def test_distillation_is_the_reverse_divergence_of_a_plain_loop(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    """The loss is the reverse divergence; the gradient is that of each token's log ratio."""
    spec = spec_of(
        teacher={"path": "tiny:qwen2-1.2m"},
        rollout={"group_size": 1, "rewards": []},
        trainer={"optimizer": OPTIMIZER, "prompts_per_step": 12, **trainer},
    )
    actual = trained_by(spec, tmp_path)
    with torch.no_grad():
        taught = plain_logprobs(teacher_of(spec), batch_of(spec))[0]

    def divergence(logprobs: Tensor, trains: Tensor) -> Tensor:
        ratio = (logprobs - taught)[trains]
        return (ratio.detach() * logprobs[trains]).mean() + (
            ratio.detach() * (1 - logprobs[trains].detach())
        ).mean()

    expected = plain(policy_of(spec, scale=1.5), batch_of(spec), divergence)
    assert actual["metrics"]["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert actual["metrics"]["kl_ref"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert_same(actual, expected)


def _distill(arguments: dict[str, Any], trainer: dict[str, Any], **teacher: Any) -> RunSpec:
    return spec_of(
        teacher={"path": "tiny:qwen2-1.2m", **teacher},
        algorithm={"loss": "distill", "loss_arguments": arguments},
        rollout={"group_size": 1, "rewards": []},
        trainer={"optimizer": OPTIMIZER, "prompts_per_step": 12, **trainer},
    )


def _coarse(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the logprobs of some tokens and, in the last place, of all other tokens together."""
    rest = (1.0 - logprobs.gather(-1, token_ids).exp().sum(-1, keepdim=True)).log()
    return torch.cat([logprobs.gather(-1, token_ids), rest], -1)


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"tokens_per_micro_batch": 40},
        {"world_size": 2},
        {"world_size": 2, "context_parallel": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"divergence": "forward_kl", "top_k": 5},
        {"divergence": "reverse_kl", "top_k": 5},
        {"divergence": "jsd", "beta": 0.3, "top_k": None},
    ],
    ids=str,
)
def test_distributions_are_compared_as_in_a_plain_loop(
    tmp_path: Path, arguments: dict[str, Any], trainer: dict[str, Any]
) -> None:
    spec = _distill(arguments, trainer)
    actual = trained_by(spec, tmp_path)
    with torch.no_grad():
        taught = plain_distributions(teacher_of(spec), batch_of(spec))[0]
    policy = policy_of(spec, scale=1.5)
    student, _, trains = plain_distributions(policy, batch_of(spec))
    if (count := arguments["top_k"]) is not None:
        indices = taught.topk(count).indices
        student, taught = _coarse(student, indices), _coarse(taught, indices)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if arguments["divergence"] == "forward_kl":
        values = kl(taught, student)
    elif arguments["divergence"] == "reverse_kl":
        values = kl(student, taught)
    else:
        middle = (0.3 * taught.exp() + 0.7 * student.exp()).log()
        values = 0.3 * kl(taught, middle) + 0.7 * kl(student, middle)
    loss = values[trains].mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert actual["metrics"]["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
    assert actual["metrics"]["teacher_divergence"] == pytest.approx(loss.item(), abs=TOLERANCE)
    assert_same(actual, {"gradients": gradients})
    if trainer.get("world_size") == 2:
        alone = trained_by(_distill(arguments, {}), tmp_path)
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(actual["gradients"][name], gradient, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("trainer", [{}, {"world_size": 2}], ids=str)
@pytest.mark.parametrize("top_k", [5, None])
def test_the_policy_teaches_itself_with_another_prompt(
    tmp_path: Path, trainer: dict[str, Any], top_k: int | None
) -> None:
    """Samples contain the teacher's prompts; a sample without one does not train."""
    arguments = {"divergence": "forward_kl", "top_k": top_k}
    spec = _distill(arguments, trainer, path="policy", prompt_column="with_solution")
    actual = trained_by(spec, tmp_path)
    policy, queue = policy_of(spec, scale=1.5), batch_of(spec)
    policy.model.set_attn_implementation("eager")
    total, count = torch.zeros(()), 0
    rows = ("prompt_ids", "teacher_prompt_ids", "response_ids", "response_mask")
    for prompt, teacher_prompt, response, mask in zip(
        *(rows_of(queue, row) for row in rows), strict=True
    ):
        if not len(teacher_prompt):
            continue
        both = []
        for context in (prompt, teacher_prompt):
            ids = torch.cat([context, response]).long()
            logits = policy.model(input_ids=ids[None]).logits[0, len(context) - 1 : -1]
            both.append(logits.log_softmax(-1))
        student, taught = both[0], both[1].detach()
        if top_k is not None:
            indices = taught.topk(top_k).indices
            student, taught = _coarse(student, indices), _coarse(taught, indices)
        total = total + (taught.exp() * (taught - student)).sum(-1)[mask].sum()
        count += int(mask.sum())
    (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert actual["metrics"]["loss"] == pytest.approx(total.item() / count, abs=TOLERANCE)
    assert_same(actual, {"gradients": gradients})


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"tokens_per_micro_batch": 40},
        {"tokens_per_micro_batch": 40, "share_prefixes": False},
        {"world_size": 2},
        {"world_size": 2, "context_parallel": 2},
    ],
    ids=str,
)
def test_preferences_are_learned_as_in_a_plain_loop(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    spec = spec_of(
        algorithm={"loss": "dpo", "dpo_beta": 0.5},
        rollout={"group_size": 2, "rewards": []},
        trainer={"optimizer": OPTIMIZER, "prompts_per_step": 6, **trainer},
    )
    actual = trained_by(spec, tmp_path)
    with torch.no_grad():
        reference = plain_logprobs(teacher_of(spec), pairs_of(spec))[0]
    margins = torch.zeros(6)

    def preference(logprobs: Tensor, trains: Tensor) -> Tensor:
        ratios = ((logprobs - reference) * trains).sum(-1)
        margins[:] = 0.5 * (ratios[0::2] - ratios[1::2]).detach()
        return -torch.nn.functional.logsigmoid(0.5 * (ratios[0::2] - ratios[1::2])).mean()

    expected = plain(policy_of(spec, scale=1.5), pairs_of(spec), preference)
    metrics = actual["metrics"]
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert metrics["preference_margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert metrics["preference_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert_same(actual, expected)
