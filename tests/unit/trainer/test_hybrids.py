"""Hybrids: random packs, plain and with shared prefixes, against the model's own pass over each sequence."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.models.families import FAMILIES
from services.common.models.loading import build_model
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from tests.helpers.batches import CPU
from tests.helpers.mixtures import tiny_config
from tests.helpers.tries import random_trie

_HYBRIDS = [name for name, family in FAMILIES.items() if family.recurrent is not None]


@pytest.mark.parametrize("num_packs", [4, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", _HYBRIDS)
@pytest.mark.timeout(1800)
def test_packed_logprobs_and_gradients_are_those_of_single_sequences(
    family: str, num_packs: int
) -> None:
    worst = [0.0, 0.0]
    for seed in range(num_packs):
        rng = random.Random(seed)
        model = build_model(_config(family, rng), dtype=torch.float32, device="cpu", seed=seed)
        # Sequences shorter and longer than a chunk of the gated delta rule.
        longest = rng.choice((4, 24, 80))
        rows = random_trie(rng, vocabulary=61, most_samples=6, longest=longest)
        factors = torch.randn(len(rows[1].values), generator=torch.Generator().manual_seed(seed))
        weights = list(model.parameters())
        own = [_own(model, *row) for row in zip(*(part.unbind() for part in rows), strict=True)]
        expected = torch.cat(own)
        wanted = _gradient(expected @ factors, weights)

        packed = pack(*rows, device=CPU, shares_prefixes=seed % 2 == 1)
        actual, _ = Policy(model, temperature=1.0)(packed)
        gradient = _gradient(actual @ factors, weights)

        difference = (actual - expected).detach().abs().max()
        error = (gradient - wanted).norm() / wanted.norm()
        worst = [max(worst[0], float(difference)), max(worst[1], float(error))]
        assert difference <= 1e-5, f"seed {seed}"
        assert error <= 1e-5, f"seed {seed}"
    print(f"{family}: logprobs {worst[0]:.1e}, gradients {worst[1]:.1e} over {num_packs} packs")


def _config(family: str, rng: random.Random) -> Any:
    experts = {"num_experts": rng.choice((0, 8))} if family == "qwen3_next" else {}
    return tiny_config(
        family,
        **experts,
        num_hidden_layers=4,
        full_attention_interval=rng.choice((2, 4)),
        linear_num_value_heads=rng.choice((2, 4)),
        initializer_range=0.05,
        max_position_embeddings=512,
    )


def _own(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, response[:, None]).squeeze(1)


def _gradient(total: Tensor, weights: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(total, weights, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])
