"""Tests of the engine for data that contains the answers."""

import pytest
import torch
from transformers import LlamaConfig

from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.helpers.engines import request, running


async def test_it_refuses_requests_and_reports_the_adopted_version() -> None:
    config = EngineConfig(
        config=LlamaConfig(max_position_embeddings=77),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=1,
    )
    engine = make_engine("none", config)
    assert engine.max_tokens == 77
    async with running(engine):
        with pytest.raises(ValueError, match=r"rollout\.engine"):
            await engine.generate(request("r", (1,), max_tokens=1))
        with pytest.raises(ValueError, match=r"rollout\.engine"):
            await engine.score((1, 2))
        await engine.adopt_weights(3, {})
    stats = engine.stats()
    assert (stats.weight_version, stats.num_running, stats.tokens_total) == (3, 0, 0)
