"""Images in attached vLLM servers: logprobs are those of the trainer, and a whole run learns to see."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.extras.fleets.local import TOKEN, LocalServer, LocalVllm, local_servers
from services.rollout.engines.base import EngineDiedError
from services.rollout.engines.engine_config import ImageLimits
from tests.contract.fleets import attached, fleet_engine
from tests.helpers.attached_servers import allow_attached_servers
from tests.helpers.cli import REPOSITORY, train
from tests.helpers.engine_images import (
    adopt,
    crossing_difference,
    expected,
    far,
    flipped,
    model_of,
    request,
    resumed_difference,
)
from tests.helpers.vision import random_prompt, wide_config

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

_CONFIG = wide_config("qwen2_5_vl")
_LIMITS = ImageLimits(max_images=4, max_tokens=128)
_SIZES = ("--max-model-len", "256", "--max-num-batched-tokens", "256", "--dtype", "float32")
_MEMORY = ("--kv-cache-memory-bytes", str(64 << 20))
_IMAGES = ("--max-images", "4", "--max-image-tokens", "128")
_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with local_servers(LocalVllm, _CONFIG, 2, *_SIZES, *_MEMORY, *_IMAGES) as started:
        yield started


def _engine(servers: list[LocalServer], **changes: Any) -> Any:
    return fleet_engine(servers, **{"config": _CONFIG, "images": _LIMITS, **changes})


async def test_logprobs_are_those_of_the_trainer_after_every_update(
    servers: list[LocalServer],
) -> None:
    draws = random.Random(0)
    prompts = [random_prompt(draws, count) for count in (1, 2, 0, 3)]
    async with attached(_engine(servers), 2, timeout_s=800) as engine:
        for version in range(5):
            model = model_of(_CONFIG, version)
            await adopt(engine, version, model)
            # Siblings of a group share a request, in which their images travel once.
            generating = [
                engine.generate(request(f"{version}.{number}.{sibling}", *prompt, seed=sibling))
                for number, prompt in enumerate(prompts)
                for sibling in range(2)
            ]
            results = await asyncio.gather(*generating)
            for (prompt, images), *siblings in zip(
                prompts, results[::2], results[1::2], strict=True
            ):
                for result in siblings:
                    assert result.version_runs == ((version, 12),)
                    reference = expected(model, prompt, result.token_ids, images)
                    assert far(result.logprobs, reference) <= _TOLERANCE


async def test_images_of_a_response_are_seen_again_after_an_update_and_in_a_further_request(
    servers: list[LocalServer],
) -> None:
    old, new = (model_of(_CONFIG, seed) for seed in (0, 1))
    prompt, images = random_prompt(random.Random(1), 2)
    async with attached(_engine(servers), 2, timeout_s=800) as engine:
        await adopt(engine, 0, old)
        assert await resumed_difference(engine, old, prompt, images) <= _TOLERANCE
        others = flipped(images)
        different = await engine.generate(request("other", prompt, others))
        reference = expected(old, prompt, different.token_ids, others)
        assert far(different.logprobs, reference) <= _TOLERANCE
        assert await crossing_difference(engine, old, new, prompt, images) <= _TOLERANCE


async def test_a_server_that_takes_fewer_images_is_refused_by_name(
    servers: list[LocalServer],
) -> None:
    engine = _engine(servers, images=ImageLimits(max_images=5, max_tokens=128))
    with pytest.raises(EngineDiedError, match="--max-images 5 --max-image-tokens 128"):
        await engine.run()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_model_learns_which_square_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_attached_servers(tmp_path, monkeypatch, token=TOKEN)
    path = REPOSITORY / "examples" / "images.yaml"
    spec = load_spec(path)
    config = load_config(spec.model, load_tokenizer(spec.model))
    images = ("--max-images", str(spec.data.max_images), "--max-image-tokens", "64")
    with local_servers(LocalVllm, config, 1, *_SIZES, *_MEMORY, *images) as (server,):
        arguments = {
            "addresses": [server.address],
            "token": {"secret": "FLEET_TOKEN"},
            "max_model_len": 64,
        }
        settings = (
            "rollout.engine=vllm-server",
            f"rollout.engine_arguments={json.dumps(arguments)}",
            "rollout.replicas=1",
            "weight_sync.mode=cpu_async",
        )
        result = train(path, tmp_path / "state", *settings, timeout=2400)
    assert result.code == 0, result.out[-2000:] + result.err[-4000:]
    assert result.summary["heldout"]["greedy"] >= 0.9
    assert result.summary["prompts"]["quarantined"] == 0
