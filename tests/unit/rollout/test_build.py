"""A run gets the engine that it names, or learns why it cannot have it."""

import importlib.util
from typing import Any

import pytest
import torch

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.rollout import RewardSpec, RolloutSpec
from services.common.runspec.run import ModelSpec
from services.rollout.engines.base import Engine
from services.rollout.engines.build import build_engine

MODEL = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")


def build(**changes: Any) -> Engine:
    spec = RolloutSpec(rewards=(RewardSpec(name="exact_match"),), **changes)
    return build_engine(
        spec, MODEL, load_tokenizer(MODEL), dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_the_named_engine_is_built(engine: str) -> None:
    assert build(engine=engine, kv_policy="keep").capabilities.name == engine


def test_what_the_engine_cannot_do_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'fake' ends responses at tokens only"):
        build(engine="fake", sampling={"stop": ("\n",)})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_asked_for(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed here")
    with pytest.raises(ValueError, match=f"'{engine}' is not installed"):
        build(engine=engine)
