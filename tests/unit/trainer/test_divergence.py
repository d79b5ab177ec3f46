"""Tests that chunked divergences from a teacher and their gradients equal plain formulas."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.runspec.formulas import DistillArguments
from services.trainer.algorithm import logprobs
from services.trainer.algorithm.divergence import TokenDivergence, most_likely
from services.trainer.algorithm.logprobs import OutputHead, token_logprobs

KINDS = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd", "beta": 0.3},
]
OWN = [[0.5, -1.0, 2.0, 0.1, 0.0], [1.0, 0.3, -0.2, 0.0, -2.0], [0.2, 0.4, 0.6, -3.0, 1.1]]
TEACHER = [[0.0, 1.0, 1.5, -0.3, 0.2], [2.0, 0.1, -0.7, 0.4, 0.0], [0.1, 0.3, 4.0, 0.0, -1.0]]
TEMPERATURE = 0.7


def _probabilities(logits: Sequence[float]) -> list[float]:
    powers = [math.exp(logit / TEMPERATURE) for logit in logits]
    return [power / sum(powers) for power in powers]


def _coarse(p: list[float], tokens: list[int]) -> list[float]:
    """Returns the probabilities of the kept tokens, and the total probability of all others."""
    return [p[token] for token in tokens] + [sum(p) - sum(p[token] for token in tokens)]


def _plain(
    kind: dict[str, Any], policy: list[float], teacher: list[float], tokens: list[int]
) -> float:
    q, p = (_coarse(_probabilities(logits), tokens) for logits in (policy, teacher))

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 1e-15)

    if kind["divergence"] == "forward_kl":
        return kl(p, q)
    if kind["divergence"] == "reverse_kl":
        return kl(q, p)
    beta = kind["beta"]
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return float(beta * kl(p, m) + (1 - beta) * kl(q, m))


def _slopes(
    kind: dict[str, Any], policy: list[float], teacher: list[float], tokens: list[int]
) -> list[float]:
    """Returns the gradient with respect to the policy's logits, from finite differences in float64."""
    step, result = 1e-5, []
    for token in range(len(policy)):
        ends = []
        for sign in (step, -step):
            moved = list(policy)
            moved[token] += sign
            ends.append(_plain(kind, moved, teacher, tokens))
        result.append((ends[0] - ends[1]) / (2 * step))
    return result


def _divergence(kind: dict[str, Any], policy: Tensor, teacher: Tensor, head: Any) -> Tensor:
    compute = TokenDivergence(
        arguments=DistillArguments(**kind), temperature=TEMPERATURE, head=head
    )
    targets = torch.zeros(len(policy), dtype=torch.int64)
    return token_logprobs(
        policy,
        OutputHead(torch.eye(policy.shape[1])),
        targets,
        temperature=TEMPERATURE,
        divergence=compute,
        distributions=teacher,
    )[2]


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, None])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["divergence"])
def test_values_and_gradients_are_those_of_the_formulas(
    kind: dict[str, Any], top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 2 * 5 * 4 * 4)  # two tokens at a time
    student, teacher = torch.tensor(OWN).requires_grad_(), torch.tensor(TEACHER)
    identity = OutputHead(torch.eye(5))
    distribution, head = teacher, identity
    if top_k is not None:
        distribution, head = most_likely(teacher, identity, top_k, temperature=TEMPERATURE), None
    divergence = _divergence(kind, student, distribution, head)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    for row, (mine, teacher_row) in enumerate(zip(OWN, TEACHER, strict=True)):
        order = sorted(range(5), key=lambda token: -teacher_row[token])
        shown_tokens = order[: top_k or 5]
        assert divergence[row].item() == pytest.approx(
            _plain(kind, mine, teacher_row, shown_tokens), abs=1e-6
        )
        assert gradient[row].tolist() == pytest.approx(
            _slopes(kind, mine, teacher_row, shown_tokens), abs=1e-6
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["divergence"])
def test_more_tokens_of_the_teacher_give_a_larger_divergence_up_to_the_whole_one(
    kind: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 20, 50, generator=generator)
    head = OutputHead(torch.eye(50))
    whole = _divergence(kind, student, teacher, head)
    before = torch.zeros(20)
    for top_k in (1, 8, 32, 50):
        distribution = most_likely(teacher, head, top_k, temperature=TEMPERATURE)
        divergence = _divergence(kind, student, distribution, None)
        assert bool((divergence >= before - 1e-5).all())
        before = divergence
    torch.testing.assert_close(before, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["divergence"])
def test_a_policy_far_from_its_teacher_has_a_finite_gradient(kind: dict[str, Any]) -> None:
    student = torch.tensor([[300.0, 0.0, 0.0, -300.0, 0.0]]).requires_grad_()
    distribution = torch.tensor(
        [[[3.0, math.log(0.6)], [2.0, math.log(0.3)], [-1.0, math.log(0.1)]]]
    )
    divergence = _divergence(kind, student, distribution, None)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert bool(divergence.isfinite().all())
    assert bool(gradient.isfinite().all())
    # others have no gradient for tokens that the policy excludes
    if kind["divergence"] == "forward_kl":
        assert gradient[0].tolist() == pytest.approx(
            [logit / TEMPERATURE for logit in (0.9, 0.0, -0.3, -0.6, 0.0)], abs=1e-6
        )


def test_tokens_that_only_the_teacher_has_count_among_the_others() -> None:
    """Models of one family may pad their output heads to different sizes."""
    student = torch.tensor([[0.3, -0.2, 0.1, 0.0, 0.4]])
    first = torch.tensor([[[2.0, math.log(0.5)], [7.0, math.log(0.25)], [-1.0, math.log(0.25)]]])
    other = torch.tensor([[[2.0, math.log(0.5)], [-1.0, math.log(0.5)]]])
    divergences = [_divergence(KINDS[0], student, table, None) for table in (first, other)]
    torch.testing.assert_close(*divergences)
    wide = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    whole = _divergence(KINDS[0], student, wide, OutputHead(torch.eye(9)))
    torch.testing.assert_close(
        whole, _divergence(KINDS[0], student, wide[:, :5], OutputHead(torch.eye(5)))
    )
