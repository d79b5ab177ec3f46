"""Tests that chunked logprobs, entropies and their gradients equal the plain computation."""

import math
import weakref

import pytest
import torch

from services.trainer.algorithm import logprobs
from services.trainer.batch.packing import pack
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU, policy_of, spec_of


@pytest.mark.parametrize("chunk_bytes", [1, 37 * 4 * 4, 1 << 20])
def test_chunks_do_not_change_values_or_gradients(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator).requires_grad_()
    weight = torch.randn(37, 8, generator=generator).requires_grad_()
    targets = torch.randint(0, 37, (11,), generator=generator)
    factors = torch.randn(2, 11, generator=generator)

    def gradients(values: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (values * factors[0]).sum() + (entropy * factors[1]).sum()
        return torch.autograd.grad(total, (hidden, weight))

    log_p = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    expected = log_p[torch.arange(11), targets], -(log_p.exp() * log_p).sum(-1)
    actual = logprobs.token_logprobs(hidden, logprobs.OutputHead(weight), targets, temperature=0.7)
    for chunked, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-5)
    for chunked, plain in zip(gradients(*actual), gradients(*expected), strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_logits_of_one_chunk_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 37 * 4)
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def products(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert not any(storage() is not None for storage in storages)
        logits = hidden @ weight.T
        storages.append(weakref.ref(logits.untyped_storage()))
        return logits

    monkeypatch.setattr(logprobs, "float32_products", products)
    monkeypatch.setitem(logprobs._MULTIPLIED, None, products)
    hidden, weight = torch.randn(11, 8).requires_grad_(), torch.randn(37, 8).requires_grad_()
    values, _ = logprobs.token_logprobs(
        hidden, logprobs.OutputHead(weight), torch.zeros(11, dtype=torch.int64), temperature=1.0
    )
    values.sum().backward()
    assert len(storages) == 6, "three chunks, in both passes"


def test_logprobs_relative_to_a_mask_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares with ``log pi(a) - log sum of pi over the mask`` (DeepSeek-V3.2) and its gradient."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 2 * 4 * 4)
    logits = [[0.5, -1.0, 2.0, 0.1], [1.0, 0.3, -0.2, 0.0], [0.2, 0.4, 0.6, -3.0]]
    token_sets, targets, temperature = [[0, 2], [0, 1, 2, 3], [1]], [0, 3, 1], 0.7
    hidden = torch.tensor(logits).requires_grad_()
    pairs = torch.tensor([[0, 0, 2], [0, 2, 1]])  # the second row has no mask
    logprobs_found, entropy = logprobs.token_logprobs(
        hidden,
        logprobs.OutputHead(torch.eye(4)),
        torch.tensor(targets),
        temperature=temperature,
        mask=pairs,
    )
    (gradient,) = torch.autograd.grad(logprobs_found.sum(), hidden, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), hidden)
    for row, target in enumerate(targets):
        powers = {token: math.exp(logits[row][token] / temperature) for token in token_sets[row]}
        p = {token: power / sum(powers.values()) for token, power in powers.items()}
        h = -sum(probability * math.log(probability) for probability in p.values())
        assert logprobs_found[row].item() == pytest.approx(math.log(p[target]), abs=1e-6)
        assert entropy[row].item() == pytest.approx(h, abs=1e-6)
        for token in range(4):
            share = p.get(token, 0.0)
            expected = ((token == target) - share) / temperature
            slope = -share * (math.log(share) + h) / temperature if share else 0.0
            assert float(gradient[row, token]) == pytest.approx(expected, abs=1e-6)
            assert float(of_entropy[row, token]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("prompts", [[[1], [2]], [[1, 2], [3]]])
def test_empty_responses_have_no_logprobs(prompts):
    rows = Jagged.from_list([torch.tensor(prompt) for prompt in prompts])
    nothing = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    logprobs, entropy = policy_of(spec_of())(pack(rows, nothing, device=CPU))
    assert logprobs.shape == entropy.shape == (0,)
