"""Tests that ``validate``, ``plan`` and the workers of a run compute the same memory plan."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config
from typer.testing import CliRunner

from services.checks.start.memory import run_memory
from services.cli.main import app
from services.common.memory.rollout import WeightPlane, plan_of
from services.common.memory.trainer import fitted, trainer_memory
from services.common.runspec.run import RunSpec
from tests.helpers.configs import qwen_7b
from tests.helpers.specs import spec_with

GB = 10**9
QWEN_7B = qwen_7b()


def spec_of(**trainer: object) -> RunSpec:
    return spec_with(
        model={"path": "/models/qwen-7b", "tokenizer": "bytes"},
        rollout={"engine": "vllm", "replicas": 1, "max_response_tokens": 1024},
        trainer={"prompts_per_step": 16, "dtype": "bfloat16", "compile": True, **trainer},
    )


def lora(**more: object) -> dict[str, object]:
    return {"rank": 32, **more}


def test_7b_with_adapters_fits_on_one_gpu_of_79_gb_by_default() -> None:
    spec = spec_of(lora=lora())
    memory = run_memory(spec, QWEN_7B, gpu_bytes=79 * GB, gpus=1)
    memory.check()
    assert memory.spec.trainer.activation_checkpointing is True
    assert memory.trainer.parts["weights, frozen"] == 2 * 7_615_616_512
    adapters = 80_740_352
    assert memory.trainer.parts["weights, float32"] == 4 * adapters
    assert memory.rollout.shadow == 0
    assert memory.rollout.kv_tokens > 100_000
    # Rollout and trainer compute the same plan independently.
    rollout = plan_of(spec, QWEN_7B, gpu_bytes=79 * GB, roles=["trainer"])
    assert rollout == memory.rollout
    alone, _ = fitted(spec, QWEN_7B, gpu_bytes=79 * GB, engines=1)
    assert alone.trainer == memory.spec.trainer


def test_more_memory_is_used_for_less_computation() -> None:
    ways = [
        fitted(spec_of(lora=lora()), QWEN_7B, gpu_bytes=size * GB)[
            0
        ].trainer.activation_checkpointing
        for size in (60, 90, 140)
    ]
    assert ways == [True, "selective", False]


def test_peaks_that_an_h100_had_are_within_5_per_cent_of_the_plan() -> None:
    """The peaks are in ``bench/results/one-gpu-lora.json``, by process, as counted by the driver.

    When they were measured, logits of two chunks existed at once, 29.4 GB were planned for the trainer, and
    the engine took the rest.
    """
    total = 81_559 << 20
    spec = spec_of(lora=lora())
    trainer = trainer_memory(spec, QWEN_7B, gpu_bytes=total, engines=1)
    rollout = plan_of(spec, QWEN_7B, gpu_bytes=total, roles=["trainer"])
    second_chunk = 2.57
    assert trainer.used / GB == pytest.approx(30.2 - second_chunk, rel=0.05)
    assert rollout.used / GB == pytest.approx(52.27 + 29.4 - trainer.used / GB, rel=0.05)


def test_the_smallest_change_that_fits_is_named_and_fits() -> None:
    spec = spec_of(lora=lora(), activation_checkpointing=False)
    memory = run_memory(spec, QWEN_7B, gpu_bytes=79 * GB, gpus=1)
    with pytest.raises(ValueError, match=r"It fits with trainer\.activation_checkpointing: 'auto'"):
        memory.check()
    whole = run_memory(spec_of(), QWEN_7B, gpu_bytes=79 * GB, gpus=1)
    assert re.search(r"It fits with .*trainer\.(lora|cpu_offload)", whole.why_not)


def test_14b_with_adapters_fits_on_one_gpu_of_79_gb_with_a_quantized_base() -> None:
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    assert run_memory(spec_of(lora=lora()), config, gpu_bytes=79 * GB, gpus=1).why_not
    memory = run_memory(spec_of(lora=lora(base_dtype="nf4")), config, gpu_bytes=79 * GB, gpus=1)
    memory.check()
    assert memory.trainer.parts["weights, frozen"] == pytest.approx(
        13.2e9 * 4.25 / 8 + 3.1e9, rel=0.02
    )
    assert memory.rollout.weights == pytest.approx(29.5 * GB, rel=0.01)


def test_merged_weights_need_a_copy_that_adapters_do_not() -> None:
    alone, merged = (
        WeightPlane.of(spec_of(lora=lora(sync=sync)), QWEN_7B) for sync in ("auto", "merged")
    )
    assert (alone.num_copies, merged.num_copies) == (0, 1)
    assert alone.merging < 2 * GB
    assert torch.bfloat16.itemsize * 7_615_616_512 > 5 * (alone.merging + alone.slot_bytes)


@pytest.mark.parametrize("bits", [40, 79])
def test_validate_and_plan_agree_about_this_machines_gpu(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "model"
    QWEN_7B.save_pretrained(folder)
    tasks = tmp_path / "tasks.py"
    tasks.write_text("def rows():\n    return [{'prompt': 'a', 'answer': 'b'}]\n")
    spec = spec_of(lora=lora(), tokens_per_micro_batch=65_536)
    document = spec.model_dump(exclude_unset=True, mode="json")
    document["model"] = {"path": str(folder), "tokenizer": "bytes"}
    document["data"]["train"] = {"source": "python", "path": f"{tasks}:rows"}
    document["topology"] = {"placement": "colocated"}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document))
    called = [
        CliRunner().invoke(app, [*command, "--gpus", "1"], env={"COLUMNS": "200", "TERM": "dumb"})
        for command in (
            ["validate", str(file), "--elsewhere", "--gpu-gb", str(bits)],
            ["plan", str(file), "--gpu-memory", f"{bits}GB"],
        )
    ]
    fits = bits == 79
    for result in called:
        assert (result.exit_code == 0) == fits, result.output
        assert ("It fits with" in result.output) != fits
