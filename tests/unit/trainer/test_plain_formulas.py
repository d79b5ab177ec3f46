"""Tests that advantages, objective and gradients equal formulas that are computed token by token."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.runspec.algorithm import AlgorithmSpec
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.objective import Objective
from tests.unit.trainer.plain_formulas import (
    HORIZON,
    Batch,
    Rows,
    plain_advantages,
    plain_objective,
)

ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "maxrl", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "gae",
)  # fmt: skip
LOSSES = ("ppo", "gspo", "cispo", "aipo", "sapo", "dppo", "gmpo", "vespo", "reinforce")
AGGREGATIONS = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip


def draw_spec(seed: int) -> tuple[AlgorithmSpec, str]:
    pick = random.Random(1000 + seed)
    loss = pick.choice(LOSSES)
    rejection = [
        {
            "level": pick.choice(("token", "seq_sum", "seq_mean", "seq_max")),
            "statistic": pick.choice(("k1", "k2", "k3")),
            "lower": pick.choice((None, 0.5)),
            "upper": pick.choice((None, 2.0)),
            "negative_only": pick.random() < 0.3,
        }
        for _ in range(pick.choice((0, 0, 1, 2)))
    ]
    arguments = {
        "dppo": {"divergence": pick.choice(("tv", "kl")), "ratio_max": pick.choice((1.5, 20.0))},
        "vespo": {"k_positive": pick.choice((0.0, 1.1)), "lambda_negative": 0.7},
    }
    spec = AlgorithmSpec.model_validate(
        {
            "loss": loss,
            "loss_arguments": arguments.get(loss, {}),
            "aggregation": pick.choice(AGGREGATIONS),
            "dual_clip": pick.choice((None, 3.0)),
            "kl": {"coefficient": pick.choice((0.0, 0.1))},
            "entropy_coefficient": pick.choice((0.0, 0.01)),
            "correction_level": pick.choice(("token", "sequence")),
            "correction_cap_mode": pick.choice(("truncate", "mask")),
            "correction_floor": pick.choice((0.0, 0.5)),
            "rejection": rejection,
            "max_staleness": 0,
        }
    )
    return spec, pick.choice(("bypass", "decoupled", "none"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_the_formulas(name: str) -> None:
    for seed in range(40):
        batch = Batch(seed)
        kl, gamma, decay = (0.0, 0.05)[seed % 2], (1.0, 0.9)[seed // 2 % 2], 0.95
        spec = AlgorithmSpec.model_validate(
            {"advantage": name, "gamma": gamma, "gae_lambda": decay}
        )
        credit = CreditAssigner(spec, Ranks(), max_response_tokens=HORIZON)
        batch_credit = credit(batch.samples(), batch.facts(), kl_coefficient=kl)
        rows = plain_advantages(batch, name, kl=kl, gamma=gamma, decay=decay)
        expected = torch.tensor([x for row in rows for x in row], dtype=torch.float32)
        torch.testing.assert_close(
            batch_credit.advantages,
            expected,
            rtol=2e-5,
            atol=2e-5,
            msg=lambda m, s=seed: f"{s}: {m}",
        )


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 240), marks=pytest.mark.nightly)], ids=str
)
def test_the_objective_and_its_gradient_are_those_of_the_formulas(seeds: range) -> None:
    for seed in seeds:
        batch, (spec, correction) = Batch(seed), draw_spec(seed)
        pick = random.Random(seed)
        rows = [[pick.choice((0.0, pick.gauss(0, 1))) for _ in row] for row in batch.trained]
        leaves = [
            [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row]
            for row in batch.logprobs
        ]
        objective = plain_objective(batch, spec, correction, leaves, rows)
        if objective.requires_grad:
            objective.backward()
        gradient = [0.0 if x.grad is None else float(x.grad) for row in leaves for x in row]

        divisions = [_split(batch, spec, correction, rows, parts) for parts in (1, 2, 5)]
        for loss, grad in divisions:
            torch.testing.assert_close(
                loss, objective.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, s=seed: f"{s}: {m}"
            )
            torch.testing.assert_close(
                grad,
                torch.tensor(gradient, dtype=torch.float64),
                rtol=1e-9,
                atol=1e-9,
                msg=lambda m, s=seed: f"{s}: {m}",
            )


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("loss", [*LOSSES, "m2po", "clip_cov", "kl_cov"])
def test_values_of_tokens_that_do_not_train_reach_neither_the_loss_nor_a_gradient(
    loss: str, junk: float
) -> None:
    for seed in (5, 7, 10, 12):  # batches of which some tokens train
        batch, (spec, correction) = Batch(seed), draw_spec(seed)
        names = ("aggregation", "kl", "entropy_coefficient", "correction_level", "rejection")
        options = {name: getattr(spec, name) for name in names}
        spec = AlgorithmSpec.model_validate({"loss": loss, "max_staleness": 2, **options})
        pick = random.Random(seed)
        samples, per_token = batch.samples(), (batch.logprobs, batch.entropy)
        logprobs, entropy = (torch.tensor([x for row in rows for x in row]) for rows in per_token)
        mask = samples.tokens["loss_mask"]
        advantages = torch.tensor([pick.gauss(0, 1) for _ in mask])
        samples = samples.with_tokens(advantages=advantages)
        junk_columns = {
            name: values.masked_fill(~mask, junk)
            for name, values in samples.tokens.items()
            if values.is_floating_point()
        }
        results = []
        for is_junk in (False, True):
            objective = Objective(spec, correction=correction, horizon=HORIZON)
            counts, tally = samples.segments.count(mask), MetricTotals()
            values = logprobs.masked_fill(~mask, junk) if is_junk else logprobs.clone()
            loss_value = objective(
                values.requires_grad_(),
                entropy.masked_fill(~mask, junk) if is_junk else entropy,
                samples.with_tokens(**junk_columns) if is_junk else samples,
                denominators=objective.denominators(counts.sum(), (counts > 0).sum()),
                kl_coefficient=spec.kl.coefficient,
                tally=tally,
            )
            (gradient,) = torch.autograd.grad(loss_value, values)
            results.append((loss_value.detach(), gradient, tally.reduce(Ranks())))
        torch.testing.assert_close(results[1], results[0], equal_nan=True)


def _split(
    batch: Batch, spec: AlgorithmSpec, correction: Any, rows: Rows, parts: int
) -> tuple[Tensor, Tensor]:
    """Returns loss and gradient of the trainer's objective, summed over several micro-batches."""
    samples = batch.samples()
    advantages = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    samples = samples.with_tokens(advantages=advantages)
    logprobs = torch.tensor([x for row in batch.logprobs for x in row], dtype=torch.float64)
    entropy = torch.tensor([x for row in batch.entropy for x in row], dtype=torch.float64)
    logprobs.requires_grad_()
    objective = Objective(spec, correction=correction, horizon=HORIZON)
    counts = samples.segments.count(samples.tokens["loss_mask"])
    total = torch.zeros((), dtype=torch.float64)
    for index in range(parts):
        positions = [i for i in range(len(batch.groups)) if i % parts == index]
        places = samples.places(positions)
        total = total + objective(
            logprobs[places],
            entropy[places],
            samples.select(positions),
            denominators=objective.denominators(counts.sum(), (counts > 0).sum()),
            kl_coefficient=spec.kl.coefficient,
            tally=MetricTotals(),
        )
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.detach(), gradient
