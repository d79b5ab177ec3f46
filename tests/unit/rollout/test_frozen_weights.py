"""Tests that adapters sent without their base are merged into the engine's live weights."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.errors import InvalidArgumentError
from services.common.memory.rollout import BUCKET_BYTES, LARGEST_BUCKET_BYTES, divide_slots
from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.frozen_weights import FrozenWeights
from services.rollout.weights import WeightReceiver
from services.weightsync.adapters import FROZEN_DIGEST, frozen_digest, merged_weight

CPU = torch.device("cpu")
QUERY = "model.layers.0.self_attn.q_proj"


class Case:
    """Model in a folder, an engine with other weights, and the adapters that a trainer sends."""

    def __init__(self, folder: Path, *, num_slots: int = 2) -> None:
        tiny = ModelSpec(path="tiny:qwen2-0.4m")
        tokenizer = load_tokenizer(tiny)
        config = load_config(tiny, tokenizer)
        stored = build_model(config, dtype=torch.bfloat16, device=CPU, seed=1)
        stored.save_pretrained(folder)
        tokenizer.save(folder)
        self.weights = {name: value.detach() for name, value in stored.named_parameters()}
        spec = ModelSpec(path=str(folder))
        self.frozen = FrozenWeights(
            spec,
            load_config(spec, tokenizer),
            dtype=torch.bfloat16,
            device=CPU,
            bucket_bytes=1 << 16,
            num_slots=num_slots,
        )
        self.engine = TorchEngine(
            build_model(config, dtype=torch.bfloat16, device=CPU, seed=2), max_running=2
        )
        self.refused: list[str] = []
        self.receiver = WeightReceiver(self.refused.append)
        sampler: Any = SimpleNamespace(checkpoint_soon=lambda: None)
        self.receiver.attach(self.engine, sampler, is_partial=True, frozen=self.frozen)
        rows, columns = self.weights[f"{QUERY}.weight"].shape
        generator = torch.Generator().manual_seed(0)
        self.sent = {
            f"{QUERY}.lora_A.weight": torch.randn(4, columns, generator=generator),
            f"{QUERY}.lora_B.weight": torch.randn(rows, 4, generator=generator),
            FROZEN_DIGEST: frozen_digest(self.weights.items()),
        }

    def adopt(self, version: int) -> None:
        async def adopted() -> None:
            running = asyncio.create_task(self.engine.run())
            await self.receiver.adopt_weights(version, self.sent)
            running.cancel()

        asyncio.run(adopted())


@pytest.mark.parametrize("num_slots", [2, 5, 1000])
def test_live_weights_are_the_frozen_ones_with_the_newest_adapters(
    tmp_path: Path, num_slots: int
) -> None:
    case = Case(tmp_path, num_slots=num_slots)
    for version in range(2):
        case.sent[f"{QUERY}.lora_B.weight"] += 1.0
        case.adopt(version)
        expected = dict(case.weights)
        down, up = (case.sent[f"{QUERY}.lora_{letter}.weight"] for letter in "AB")
        expected[f"{QUERY}.weight"] = merged_weight(expected[f"{QUERY}.weight"], down, up)
        live = case.engine._parameters
        assert live.keys() == expected.keys()
        assert all(torch.equal(live[name], value) for name, value in expected.items())
        assert case.engine.stats().weight_version == version


def test_other_frozen_weights_are_rejected_before_anything_changes(tmp_path: Path) -> None:
    case = Case(tmp_path)
    before = {name: value.clone() for name, value in case.engine._parameters.items()}
    case.sent[FROZEN_DIGEST] = torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError, match=r"model\.path"):
        case.adopt(0)
    assert all(torch.equal(case.engine._parameters[name], value) for name, value in before.items())


def test_an_engine_with_unknown_places_gets_merged_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)

    async def open_weights(*_: Any) -> None:
        raise ValueError("its layout is not known")

    monkeypatch.setattr(case.engine, "open_weights", open_weights)
    case.adopt(0)
    down, up = (case.sent[f"{QUERY}.lora_{letter}.weight"] for letter in "AB")
    expected = merged_weight(case.weights[f"{QUERY}.weight"], down, up)
    assert torch.equal(case.engine._parameters[f"{QUERY}.weight"], expected)


def test_a_merge_that_breaks_off_leaves_nothing_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)

    def write(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(case.frozen, "write", write)
    with pytest.raises(RuntimeError, match="gone"):
        case.adopt(0)
    assert case.refused


def test_with_slots_for_all_weights_nothing_is_merged_while_the_engine_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, num_slots=1000)
    merged_while_waiting: list[int] = []
    fill, open_weights = case.frozen._fill, case.engine.open_weights

    async def open_and_watch(*arguments: Any) -> Any:
        places = await open_weights(*arguments)
        monkeypatch.setattr(
            case.frozen,
            "_fill",
            lambda index, *rest: merged_while_waiting.append(index) or fill(index, *rest),
        )
        return places

    monkeypatch.setattr(case.engine, "open_weights", open_and_watch)
    case.adopt(0)
    assert len(case.frozen.plan.sources[0].buckets) > 2
    assert merged_while_waiting == []


def test_slots_are_larger_and_more_with_more_memory() -> None:
    assert divide_slots(2 * BUCKET_BYTES) == (BUCKET_BYTES, 2)
    assert divide_slots(6 * BUCKET_BYTES) == (6 * BUCKET_BYTES // 4, 4)
    assert divide_slots(100 * LARGEST_BUCKET_BYTES + 1) == (LARGEST_BUCKET_BYTES, 100)
