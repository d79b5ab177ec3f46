"""Tests that a run gets the engine of its specification, or an error with the reason."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.engines import ENGINES, EngineKind
from services.common.runspec.rollout import RewardSpec, RolloutSpec
from services.common.runspec.run import ModelSpec
from services.rollout.engines import imports
from services.rollout.engines.base import Engine
from services.rollout.engines.build import build_engine
from services.rollout.engines.imports import begin_imports

MODEL = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")


def build(**changes: Any) -> Engine:
    spec = RolloutSpec(rewards=(RewardSpec(name="exact_match"),), **changes)
    tokenizer = load_tokenizer(MODEL)
    config = load_config(MODEL, tokenizer)
    return build_engine(
        spec, MODEL, config, tokenizer, dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_the_named_engine_is_built(engine: str) -> None:
    assert build(engine=engine, kv_policy="keep").capabilities.name == engine


def test_stop_texts_need_an_engine_that_supports_them() -> None:
    with pytest.raises(ValueError, match=r"rollout\.sampling\.stop"):
        build(engine="fake", sampling={"stop": ("\n",)})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_asked_for(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed here")
    with pytest.raises(ValueError, match=f"package {engine} is not installed"):
        build(engine=engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_external_engine_is_not_batch_invariant_on_a_cpu(engine: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.reproducible is batch_invariant"):
        build(engine=engine, reproducible="batch_invariant")


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_vllm_does_not_speculate_on_a_cpu(method: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.speculation"):
        build(engine="vllm", speculation={"method": method})


def test_vllm_reports_no_masks_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"rollout\.sampling\.top_k"):
        build(engine="vllm", sampling={"top_k": 8})


@pytest.mark.parametrize(
    ("package", "is_cpu", "begun"),
    [(None, False, ["json.tool"]), (None, True, []), ("a_package_that_is_missing", False, [])],
)
def test_imports_begin_in_the_process_that_the_engine_is_forked_from(
    monkeypatch: pytest.MonkeyPatch, package: str | None, is_cpu: bool, begun: list[str]
) -> None:
    modules: list[str] = []
    monkeypatch.setattr(imports, "set_forkserver_preload", modules.extend)
    monkeypatch.setattr(imports.forkserver, "ensure_running", lambda: None)
    kind = EngineKind(adapter="json:loads", package=package, process_modules=("json.tool",))
    begin_imports(kind, is_cpu=is_cpu)
    assert modules == begun


def test_own_modules_that_an_engines_process_imports_exist() -> None:
    for kind in ENGINES.values():
        own_modules = [name for name in kind.process_modules if name.startswith("services.")]
        assert all(importlib.util.find_spec(name) for name in own_modules)


def test_the_engines_process_can_begin_before_the_worker_imports_torch() -> None:
    look = (
        "import services.rollout.__main__, sys; print({'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
