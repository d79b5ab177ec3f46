"""The trainer on a GPU in bfloat16: packed logprobs equal the model's own, and every option trains."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.compiling import compile_ahead
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = "tiny:qwen2-3m"


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _model(dtype: torch.dtype, path: str) -> PreTrainedModel:
    spec = spec_of(model={"path": path})
    config = load_config(spec.model, load_tokenizer(spec.model))
    return build_model(config, dtype=dtype, device="cuda")


@torch.no_grad()
@pytest.mark.parametrize("path", [MODEL, "tiny:qwen3-0.4m", "tiny:llama-0.4m"])
def test_packed_logprobs_are_those_of_each_sequence_alone(path: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 700, (24,), generator=generator).tolist()
    prompts = [torch.randint(2, 20, (5,), generator=generator) for _ in lengths]
    responses = [torch.randint(2, 20, (n,), generator=generator) for n in lengths]
    plain = _model(torch.bfloat16, path)
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.cat([prompt, response]).cuda()
        logits = plain(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1)
        expected.append(logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1))
    policy = Policy(_model(torch.bfloat16, path), temperature=1.0)
    packed = pack(
        Jagged.from_list(prompts), Jagged.from_list(responses), device=torch.device("cuda")
    )
    logprobs, _ = policy(packed)
    assert (logprobs - torch.cat(expected)).abs().max() <= 2e-2


@pytest.mark.parametrize("group_size", [4, 40])
def test_a_shared_prompt_changes_no_more_than_rounding(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 50, (group_size,), generator=generator).tolist()
    prompt = torch.randint(2, 20, (300,), generator=generator)
    prompts = Jagged.from_list([prompt] * group_size)
    responses = [torch.randint(2, 20, (n,), generator=generator) for n in lengths]
    factors = torch.randn(sum(lengths), generator=generator).cuda()
    policy = Policy(_model(torch.bfloat16, MODEL), temperature=1.0)
    results = []
    for shares in (False, True):
        packed = pack(
            prompts,
            Jagged.from_list(responses),
            device=torch.device("cuda"),
            shares_prefixes=shares,
        )
        logprobs, _ = policy(packed)
        gradients = torch.autograd.grad((logprobs * factors).sum(), list(policy.parameters()))
        whole = torch.cat([gradient.float().flatten() for gradient in gradients])
        results.append((logprobs.detach(), whole, packed))
    (plain, expected, _), (shared, actual, packed) = results
    # With many responses, another kernel reads their keys without a copy.
    assert packed.layout.paths is not None
    assert packed.layout.paths.are_many == (group_size == 40)
    assert (shared - plain).abs().max() <= 2e-2
    assert (actual - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "activation_checkpointing": True},
        {"dtype": "bfloat16", "activation_checkpointing": "selective", "compile": True},
        {"dtype": "bfloat16", "activation_offloading": True},
        {"dtype": "bfloat16", "cpu_offload": True},
        {"dtype": "bfloat16", "cpu_offload": "optimizer"},
        {"dtype": "bfloat16", "compile": True},
        {"dtype": "bfloat16", "lora": {"rank": 4}},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "float16", "compile": True},
        {"dtype": "float16", "cpu_offload": True},
        {"dtype": "float16", "lora": {"rank": 4}},
    ],
    ids=str,
)
def test_every_option_trains_and_exports_weights(options: dict[str, Any]) -> None:
    spec = spec_of(model={"path": MODEL}, trainer=options)
    device = torch.device("cuda", 0)
    policy = policy_of(spec, scale=1.0).to(device)
    queue = random_queue(policy_of(spec, scale=1.0))
    topology = build_topology(spec.trainer, device=device, rank=0, world_size=1)
    if spec.trainer.lora is not None:
        add_adapters(policy.model, spec.trainer.lora)
        begin_adapters(policy, seed=spec.seed)
    distribute(policy, spec.trainer, topology)
    rank = rank_of(spec, policy, queue, topology=topology)
    for step in (1, 2):
        metrics = rank.train(StepCommand(step, queue.meta)).metrics
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
    assert metrics["rollout_logprob_abs_diff"] < 0.05
    for name, tensor in WeightExport(policy, dtype=torch.bfloat16).weight_tensors():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.timeout(400)
@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_nothing_is_compiled_after_the_start(checkpointing: bool | str) -> None:
    options = {"dtype": "bfloat16", "compile": True, "activation_checkpointing": checkpointing}
    spec = spec_of(model={"path": MODEL}, trainer={**options, "tokens_per_micro_batch": 4096})
    device, policy = torch.device("cuda", 0), policy_of(spec, scale=1.0)
    topology = build_topology(spec.trainer, device=device, rank=0, world_size=1)
    distribute(policy, spec.trainer, topology)
    compile_ahead(policy, spec.trainer, device=device)
    compiled = counters["stats"]["unique_graphs"]
    for num_groups, longest in ((1, 40), (2, 90), (3, 150)):
        prompts = [torch.full((30 + 20 * group,), 2) for group in range(num_groups)]
        lengths = torch.linspace(4, longest, 8).int().tolist()
        packed = pack(
            Jagged.from_list([prompt for prompt in prompts for _ in lengths]),
            Jagged.from_list([torch.full((length,), 3) for _ in prompts for length in lengths]),
            device=device,
            shares_prefixes=True,
        )
        logprobs, _ = policy(packed)
        logprobs.sum().backward()
    assert counters["stats"]["unique_graphs"] == compiled
