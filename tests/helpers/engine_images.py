"""Engines that serve tiny models with images, and the trainer's logprobs of their responses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.models.loading import build_model, stored_tensors
from services.rollout.engines.base import Engine, GenerationRequest
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig, ImageLimits
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs
from tests.helpers.batches import prompt_spans
from tests.helpers.engines import running, until
from tests.helpers.vision import IMAGE

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "vllm": {"max_model_len": 256, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20}
}


@asynccontextmanager
async def serving(
    engine_name: str, config: Any, dtype: torch.dtype = torch.float32, *, in_place: bool = False
) -> AsyncIterator[Engine]:
    """Yields a running engine on a CPU for a model that takes images."""
    engine_config = EngineConfig(
        config=config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_running=4,
        arguments=_ARGUMENTS.get(engine_name, {}),
        images=ImageLimits(max_images=4, max_tokens=128),
        is_written_in_place=in_place,
    )
    engine = make_engine(engine_name, engine_config)
    async with asyncio.timeout(800), running(engine):
        await engine.wait_ready()
        yield engine


def model_of(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a model with random weights from a seed; in float32, no tensor is constant."""
    model = build_model(deepcopy(config), dtype=dtype, device="cpu", seed=seed)
    if dtype != torch.float32:
        return model
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


async def adopt(engine: Engine, version: int, model: PreTrainedModel) -> None:
    """Sends a model's weights to an engine."""
    tensors = {name: value.detach().clone() for name, value in stored_tensors(model).items()}
    await engine.adopt_weights(version, tensors)


def request(name: str, context: Sequence[int], inputs: ModelInputs, **changes: Any) -> Any:
    """Returns a request with images."""
    values = {"max_tokens": 12, "seed": 3, **changes}
    return GenerationRequest(
        request_id=name, context_ids=tuple(context), model_inputs=inputs, **values
    )


@torch.no_grad()
def expected(
    model: PreTrainedModel,
    prompt: Sequence[int],
    response: Sequence[int],
    model_inputs: ModelInputs,
) -> Tensor:
    """Returns the trainer's logprobs of a response."""
    packed = pack(
        Jagged.from_list([torch.tensor(prompt)]),
        Jagged.from_list([torch.tensor(response)]),
        device=torch.device("cpu"),
        inputs=prompt_spans([prompt], [model_inputs]),
    )
    return Policy(model, temperature=1.0)(packed)[0]


def far(got: Sequence[float], logprobs: Tensor) -> float:
    """Returns the mean absolute difference of logprobs."""
    return float((torch.tensor(got) - logprobs).abs().mean())


def flipped(inputs: ModelInputs) -> ModelInputs:
    """Returns images of the same sizes with other pixels."""
    pixels = inputs.tensors["pixel_values"].flip(0)
    return ModelInputs.from_values({**inputs.tensors, "pixel_values": pixels})


async def resumed_difference(
    engine: Any, model: PreTrainedModel, prompt: Sequence[int], inputs: ModelInputs
) -> float:
    """Resumes a response, and returns how far its logprobs are from the trainer's."""
    first = await engine.generate(request("first", prompt, inputs))
    # Placeholders that the policy samples are ordinary tokens.
    sampled = [*first.token_ids[:6], IMAGE, IMAGE]
    resumed = await engine.generate(request("resumed", [*prompt, *sampled], inputs, draw_offset=8))
    logprobs = expected(model, prompt, [*sampled, *resumed.token_ids], inputs)
    return far(resumed.logprobs, logprobs[8:])


async def crossing_difference(
    engine: Any,
    old: PreTrainedModel,
    new: PreTrainedModel,
    prompt: Sequence[int],
    inputs: ModelInputs,
) -> float:
    """Updates weights of version 0 during a response; returns how far its logprobs are from the trainer's."""
    tokens: list[int] = []
    crossing = request(
        "long", prompt, inputs, max_tokens=120, on_tokens=lambda news, _: tokens.extend(news)
    )
    generating = asyncio.create_task(engine.generate(crossing))
    await until(lambda: len(tokens) >= 16)
    await adopt(engine, 1, new)
    result = await generating
    (_, before), (version, after) = result.version_runs
    assert (version, before + after) == (1, 120)
    both = [expected(model, prompt, result.token_ids, inputs) for model in (old, new)]
    return far(result.logprobs, torch.cat([both[0][:before], both[1][before:]]))
