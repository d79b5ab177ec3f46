"""Clip-Cov and KL-Cov select and treat the tokens that their paper names (arXiv:2505.22617)."""

import math
from statistics import mean

import pytest
import torch

from services.trainer.algorithm import loss
from services.trainer.batch.segments import Segments

_LOGPROBS = [-0.1, -3.0, -0.5, -2.0, -1.0, -0.2, -4.0, -0.7]
_OLD = [-0.2, -2.9, -0.5, -2.6, -1.1, -0.1, -4.0, -0.6]
_ADVANTAGES = [1.5, -1.5, 0.5, 1.0, -0.5, 2.0, -2.0, 9.0]
_TRAINED = [0, 1, 2, 3, 4, 5, 6]  # the last token does not train


def _tokens() -> loss.LossTokens:
    old = torch.tensor(_OLD, dtype=torch.float64)
    return loss.LossTokens(
        logprobs=torch.tensor(_LOGPROBS, dtype=torch.float64, requires_grad=True),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(_ADVANTAGES, dtype=torch.float64),
        mask=torch.tensor([t in _TRAINED for t in range(len(_OLD))]),
        segments=Segments.from_lengths(torch.tensor([5, 3])),
    )


def _covariance(t: int) -> float:
    mean_advantage = mean(_ADVANTAGES[i] for i in _TRAINED)
    mean_logprob = mean(_LOGPROBS[i] for i in _TRAINED)
    return (_ADVANTAGES[t] - mean_advantage) * (_LOGPROBS[t] - mean_logprob)


def _gradient(result: loss.TokenLoss, tokens: loss.LossTokens) -> list[float]:
    total = result.values[tokens.mask].sum()
    return torch.autograd.grad(total, tokens.logprobs)[0].tolist()


def test_kl_cov_penalizes_the_tokens_with_the_largest_covariance() -> None:
    tokens = _tokens()
    result = loss.kl_cov(tokens, fraction=0.3, coefficient=0.5)
    selected = sorted(_TRAINED, key=_covariance)[-2:]  # .3 of 7 tokens
    assert result.indicators["covariance_fraction"].nonzero().squeeze(1).tolist() == sorted(
        selected
    )
    for t, found in enumerate(_gradient(result, tokens)):
        log_ratio = _LOGPROBS[t] - _OLD[t]
        wanted = -_ADVANTAGES[t] * math.exp(log_ratio) if t in _TRAINED else 0.0
        if t in selected:
            wanted += 0.5 * math.copysign(1.0, log_ratio) if log_ratio else 0.0
        assert found == pytest.approx(wanted, abs=1e-12)


def test_clip_cov_detaches_tokens_within_its_bounds_that_ppo_does_not_clip() -> None:
    tokens = _tokens()
    arguments = {"clip_low": 0.2, "clip_high": 0.2, "low": 1.0, "high": 4.0}
    plain = loss.ppo(tokens, clip_low=0.2, clip_high=0.2, dual_clip=None)
    clipped = plain.indicators["clip_fraction"].bool().tolist()
    candidates = [t for t in _TRAINED if 1.0 < _covariance(t) < 4.0 and not clipped[t]]
    assert len(candidates) == 3

    result = loss.clip_cov(tokens, fraction=1.0, **arguments)
    torch.testing.assert_close(result.values, plain.values)
    assert result.indicators["covariance_fraction"].nonzero().squeeze(1).tolist() == candidates
    unchanged = _gradient(plain, tokens)
    for t, found in enumerate(_gradient(result, tokens)):
        assert found == (0.0 if t in candidates else unchanged[t])

    for fraction, count in ((0.1, 1), (0.2, 2)):
        some = loss.clip_cov(tokens, fraction=fraction, **arguments)
        selected = some.indicators["covariance_fraction"].nonzero().squeeze(1).tolist()
        assert len(selected) == count
        assert set(selected) <= set(candidates)


def test_a_micro_batch_without_trained_tokens_has_no_covariance() -> None:
    tokens = _tokens()
    tokens.mask[:] = False
    for result in (
        loss.kl_cov(tokens, fraction=0.5, coefficient=1.0),
        loss.clip_cov(tokens, clip_low=0.2, clip_high=0.2, fraction=0.5, low=1.0, high=5.0),
    ):
        assert not result.indicators["covariance_fraction"].any()
        assert result.values.isfinite().all()
