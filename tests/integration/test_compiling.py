"""Compiled layers: a run compiles all its graphs before its first step."""

import random

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen2Config

from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.parallel import RankTopology, distribute
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

CPU = torch.device("cpu")


def packed(rng: random.Random, num_sequences: int, longest: int) -> PackedTokens:
    prompts = [torch.zeros(rng.randint(1, 9), dtype=torch.int32) for _ in range(num_sequences)]
    lengths = [rng.randint(2, longest) for _ in range(num_sequences)]
    responses = [torch.zeros(length, dtype=torch.int32) for length in lengths]
    # All tokens are 0, so each sequence begins with all shorter ones.
    return pack(
        Jagged.from_list(prompts),
        Jagged.from_list(responses),
        device=CPU,
        shares_prefixes=rng.random() < 0.5,
    )


@pytest.mark.nightly  # a minute of compiling
@pytest.mark.timeout(900)
def test_no_pack_is_compiled_for_after_compile_ahead() -> None:
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy = Policy(build_model(config, dtype=torch.float32, device="cpu", seed=0), temperature=1.0)
    spec = TrainerSpec(steps=1, prompts_per_step=1, compile=True, tokens_per_micro_batch=8192)
    distribute(policy, spec, RankTopology(device=CPU, data=Ranks()))
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}
    counters.clear()
    compile_ahead(policy, spec, device=CPU)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    rng = random.Random(0)
    sizes = [(1, 2), (1, 30), (7, 300), (40, 60), (5, 4000), (16, 512)]
    for num_sequences, longest in sizes:
        pack_ = packed(rng, num_sequences, longest)
        logprobs, _ = policy(pack_)
        logprobs.sum().backward()
        with torch.no_grad():
            policy(pack_)
    assert counters["stats"]["unique_graphs"] == num_graphs
    for name, value in policy.named_parameters():
        torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0)
