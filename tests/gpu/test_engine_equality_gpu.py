"""Logprobs of the trainer and the engine torch on a GPU in bfloat16, which are equal to the last bit."""

from typing import Any

import pytest
import torch

from tests.helpers.equality import Subject, decoded, groups, logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
_SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logprobs_of_packs_equal_those_of_decoding(family: str) -> None:
    subject = Subject({"model_type": family, **_SHAPE}, device="cuda", dtype=torch.bfloat16)
    requests = groups(160, tokens=150, vocabulary=32_000, context=700)
    results = decoded(subject.batch(), requests, running=48)
    policy, total = subject.policy(), 0
    for start in range(0, len(requests), 16):
        pack_requests = requests[start : start + 16]
        packed = subject.packed(pack_requests, results, shares_prefixes=start % 32 == 0)
        with torch.no_grad():
            pack_logprobs = policy(packed)[0].cpu()
        assert torch.equal(pack_logprobs, logprobs(pack_requests, results))
        total += len(pack_logprobs)
    assert total >= 10_000


def test_a_pass_with_gradients_has_the_same_logprobs() -> None:
    subject = Subject({"model_type": "qwen3", **_SHAPE}, device="cuda", dtype=torch.bfloat16)
    requests = groups(8, tokens=60, vocabulary=32_000, context=100)
    results = decoded(subject.batch(), requests, running=8)
    policy = subject.policy()
    pack_logprobs, _ = policy(subject.packed(requests, results, shares_prefixes=True))
    pack_logprobs.sum().backward()
    assert torch.equal(pack_logprobs.detach().cpu(), logprobs(requests, results))
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())
