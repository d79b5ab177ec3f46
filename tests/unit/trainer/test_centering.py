"""Score centering against formulas in float64 over the whole vocabulary, token by token."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.fields import SAMPLER_TOP_K
from services.common.runspec.run import RunSpec
from services.trainer.algorithm import logprobs
from services.trainer.algorithm.centering import ScoreCentering, score_centering
from services.trainer.algorithm.divergence import most_likely
from services.trainer.algorithm.logprobs import OutputHead, token_logprobs
from services.trainer.batch.samples import Samples, idle_samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.steps.objective import Objective
from services.wire.data.jagged import Jagged
from tests.helpers.specs import spec_with

TEMPERATURE = 0.8
POLICY = [[0.3, -1.2, 0.9, 2.1, -0.4, 0.0], [1.7, 0.2, -2.0, 0.4, 0.3, -0.6]]
SAMPLER = [[1.4, -0.9, 0.1, 0.7, -0.2, 0.5], [0.1, 1.2, -0.3, 2.4, -1.0, 0.2]]
ADVANTAGES = [1.5, -0.7]
SIZE = len(POLICY[0])
CORRECTIONS: list[dict[str, Any]] = [
    {"correction": "none"},
    {"correction": "bypass", "correction_cap": 1.3},
    {
        "correction": "bypass",
        "correction_cap": 1.5,
        "correction_floor": 0.6,
        "correction_cap_mode": "mask",
    },
]


def _spec(count: int, **algorithm: Any) -> RunSpec:
    return spec_with(
        algorithm={"loss": "reinforce", "score_centering": count, **algorithm},
        rollout={"engine": "torch"},
    )


def _probabilities(logits: list[float]) -> list[float]:
    powers = [math.exp(logit / TEMPERATURE) for logit in logits]
    return [power / math.fsum(powers) for power in powers]


def _weight(settings: dict[str, Any]) -> Callable[[float], float]:
    if settings["correction"] == "none":
        return lambda ratio: 1.0
    cap, floor = settings["correction_cap"], settings.get("correction_floor", 0.0)
    if settings.get("correction_cap_mode") == "mask":
        return lambda ratio: ratio if floor <= ratio <= cap else 0.0
    return lambda ratio: min(ratio, cap)


def _expected_score(
    policy: list[float], sampler: list[float], count: int, weight: Callable[[float], float]
) -> list[float]:
    """Returns the sampler's expectation of the weighted score by each logit, with the modelled tail."""
    p, q = _probabilities(policy), _probabilities(sampler)
    head = sorted(range(SIZE), key=lambda token: -q[token])[:count]
    tail = [token for token in range(SIZE) if token not in head]
    model = list(q)
    for token in tail:
        model[token] = p[token] * sum(q[t] for t in tail) / sum(p[t] for t in tail)
    return [
        math.fsum(
            model[v] * weight(p[v] / model[v]) * (float(v == logit) - p[logit]) / TEMPERATURE
            for v in range(SIZE)
        )
        for logit in range(SIZE)
    ]


def _term(policy: Tensor, sampler: Tensor, count: int, centering: ScoreCentering) -> Tensor:
    identity = OutputHead(torch.eye(SIZE))
    reported = most_likely(sampler, identity, count, temperature=TEMPERATURE)
    targets = torch.zeros(len(policy), dtype=torch.int64)
    return token_logprobs(
        policy,
        identity,
        targets,
        temperature=TEMPERATURE,
        divergence=centering,
        distributions=reported,
    )[2]


@pytest.mark.parametrize("count", [1, 3, 5, SIZE, 2 * SIZE])
@pytest.mark.parametrize("settings", CORRECTIONS, ids=["alone", "truncated", "masked"])
def test_the_gradient_of_the_term_is_the_samplers_expectation_of_the_score(
    count: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", SIZE * 4 * 4)  # one token at a time
    centering = score_centering(_spec(count, **settings))
    assert centering is not None
    policy = torch.tensor(POLICY).requires_grad_()
    term = _term(policy, torch.tensor(SAMPLER), count, centering)
    (gradient,) = torch.autograd.grad(term.sum(), policy)
    for row in range(2):
        expected = _expected_score(POLICY[row], SAMPLER[row], count, _weight(settings))
        assert gradient[row].tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("count", [1, 3, SIZE])
@pytest.mark.parametrize("settings", CORRECTIONS, ids=["alone", "truncated", "masked"])
def test_a_sampler_that_is_the_policy_has_no_expected_score(
    count: int, settings: dict[str, Any]
) -> None:
    centering = score_centering(_spec(count, **settings))
    assert centering is not None
    policy = torch.tensor(POLICY).requires_grad_()
    term = _term(policy, policy.detach(), count, centering)
    (gradient,) = torch.autograd.grad(term.sum(), policy)
    assert gradient.abs().max() < 1e-6


def test_tokens_that_could_not_be_drawn_do_not_count() -> None:
    """Under a sampling mask, both policies are relative to the allowed tokens."""
    allowed, excluded = [0, 2, 3], [1, 4, 5]
    centering = score_centering(_spec(4, correction="none"))
    assert centering is not None
    sampler = torch.tensor(SAMPLER[:1])
    sampler[:, excluded] = -1e30
    reported = most_likely(sampler, OutputHead(torch.eye(SIZE)), 4, temperature=TEMPERATURE)
    assert reported[0, 3, 1] < -1e29
    policy = torch.tensor(POLICY[:1]).requires_grad_()
    pairs = torch.tensor([[0, 0, 0], allowed])
    *_, term = token_logprobs(
        policy,
        OutputHead(torch.eye(SIZE)),
        torch.tensor([0]),
        temperature=TEMPERATURE,
        mask=pairs,
        divergence=centering,
        distributions=reported,
    )
    (gradient,) = torch.autograd.grad(term.sum(), policy)
    p, q = (_probabilities([logits[0][token] for token in allowed]) for logits in (POLICY, SAMPLER))
    assert term.isfinite().all()
    assert gradient[0, excluded].tolist() == [0.0] * 3
    expected = [(q[n] - p[n]) / TEMPERATURE for n in range(3)]
    assert gradient[0, allowed].tolist() == pytest.approx(expected, abs=2e-6)


def _samples(rollout: Tensor, advantages: Tensor, reported: Tensor) -> Samples:
    """Returns responses of one token."""
    count, ones = len(rollout), torch.ones(len(rollout), dtype=torch.int64)
    mask = torch.ones(count, dtype=torch.bool)
    samples = replace(
        idle_samples(),
        rows=torch.arange(count),
        numbers=torch.zeros(count, dtype=torch.int64),
        prompts=Jagged(ones, ones),
        responses=Jagged(ones, ones),
        rewards=torch.zeros(count),
        groups=None,
        tokens={},
    )
    return samples.with_tokens(
        loss_mask=mask,
        response_mask=mask,
        rollout_logprobs=rollout,
        advantages=advantages,
        **{SAMPLER_TOP_K: reported},
    )


def _gradient(spec: RunSpec, row: int, advantages: list[float]) -> tuple[Tensor, MetricTotals]:
    """Returns ``[V, V]`` gradients of the losses of all tokens in one place by the logits of the policy."""
    identity, count = OutputHead(torch.eye(SIZE)), spec.algorithm.score_centering
    policy = torch.tensor([POLICY[row]] * SIZE).requires_grad_()
    sampler = torch.tensor([SAMPLER[row]] * SIZE)
    targets = torch.arange(SIZE)
    (rollout, _) = token_logprobs(sampler, identity, targets, temperature=TEMPERATURE)
    reported = most_likely(sampler, identity, count or 1, temperature=TEMPERATURE)
    current, entropy, *term = token_logprobs(
        policy,
        identity,
        targets,
        temperature=TEMPERATURE,
        divergence=score_centering(spec),
        distributions=reported,
    )
    objective = Objective(spec.algorithm, correction=spec.correction, horizon=8)
    one_token, tally = torch.ones(1), MetricTotals()
    loss = objective(
        current,
        entropy,
        _samples(rollout, torch.tensor(advantages), reported),
        divergence=term[0] if term else None,
        denominators=objective.denominators(one_token, one_token),
        kl_coefficient=0.0,
        tally=tally,
    )
    (gradient,) = torch.autograd.grad(loss, policy)
    return gradient, tally


@pytest.mark.parametrize("count", [2, SIZE])
@pytest.mark.parametrize("settings", CORRECTIONS, ids=["alone", "truncated", "masked"])
def test_the_loss_of_each_token_is_the_centered_policy_gradient(
    count: int, settings: dict[str, Any]
) -> None:
    spec = _spec(count, aggregation="token-sum", **settings)
    weight = _weight(settings)
    for row, advantage in enumerate(ADVANTAGES):
        gradient, _ = _gradient(spec, row, [advantage] * SIZE)
        p, q = _probabilities(POLICY[row]), _probabilities(SAMPLER[row])
        center = _expected_score(POLICY[row], SAMPLER[row], count, weight)
        for token in range(SIZE):
            expected = [
                -advantage
                * (
                    weight(p[token] / q[token]) * (float(token == logit) - p[logit]) / TEMPERATURE
                    - center[logit]
                )
                for logit in range(SIZE)
            ]
            assert gradient[token].tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("settings", CORRECTIONS, ids=["alone", "truncated", "masked"])
def test_an_equal_advantage_of_all_tokens_does_not_move_the_policy(
    settings: dict[str, Any],
) -> None:
    """The drift that the method removes: without it, the policy moves towards the sampler."""
    q = torch.tensor(_probabilities(SAMPLER[0]))
    centered, tally = _gradient(_spec(SIZE, aggregation="token-sum", **settings), 0, [1.0] * SIZE)
    assert (q[:, None] * centered).sum(0).abs().max() < 2e-6
    assert tally.reduce(Ranks())["sampler_topk_mass"] == pytest.approx(1.0)
    plain = spec_with(
        algorithm={
            "loss": "reinforce",
            "aggregation": "token-sum",
            "max_staleness": 0,
            "correction_cap": 1.3,
            "correction": settings["correction"],
        }
    )
    drifting, _ = _gradient(plain, 0, [1.0] * SIZE)
    assert (q[:, None] * drifting).sum(0).abs().max() > 0.02


def test_places_beyond_the_vocabulary_are_no_tokens() -> None:
    centering = score_centering(_spec(SIZE, correction="none"))
    assert centering is not None
    whole = most_likely(
        torch.tensor(SAMPLER), OutputHead(torch.eye(SIZE)), SIZE, temperature=TEMPERATURE
    )
    padding = torch.tensor([-1.0, -1e30]).expand(2, 3, 2)
    padded = torch.cat([whole[:, :-1], padding, whole[:, -1:]], 1)
    logits = torch.tensor(POLICY) / TEMPERATURE
    assert torch.equal(centering(logits, padded), centering(logits, whole))
