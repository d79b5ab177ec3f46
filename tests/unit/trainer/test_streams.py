"""Streams in which FSDP exchanges on a rank that exchanges with no other."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from transformers import Qwen2Config

from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp import parallel
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU


@pytest.fixture
def _group() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_rank_that_is_alone_uses_the_stream_of_its_passes() -> None:
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy = Policy(build_model(config, dtype=torch.float32, device="cpu", seed=0), temperature=1.0)
    spec = TrainerSpec(steps=1, prompts_per_step=1, dtype="bfloat16")
    topology = build_topology(spec, device=CPU, rank=0, world_size=1)
    distribute(policy, spec, topology)
    tokens = [torch.arange(3, dtype=torch.int32), torch.arange(2, dtype=torch.int32)]
    packed = pack(Jagged.from_list(tokens), Jagged.from_list(tokens), device=CPU)
    scores, _ = policy(packed)
    context = policy._get_fsdp_state()._comm_ctx
    stream = torch.cpu.current_stream()
    assert all(getattr(context, name) is stream for name in parallel._STREAMS)
    scores.sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())
