"""Logprobs of the trainer and vLLM with batch_invariant, which are equal to the last bit."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.cli import run_module
from tests.helpers.gpu_runs import train_on_gpus, use_one_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logprobs_of_packs_equal_those_of_vllm(family: str) -> None:
    output = run_module("tests.helpers.vllm_equality", family)
    print(output)
    entries = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    assert sum(entry["tokens"] for entry in entries.values()) > 20_000
    assert {name: entry["unequal"] for name, entry in entries.items()} == dict.fromkeys(entries, 0)
    assert entries["with gradients"]["are_finite"]


def test_ratios_of_a_synchronous_run_are_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gpu(monkeypatch)
    settings = (
        "rollout.reproducible=batch_invariant",
        "algorithm.max_staleness=0",
        "algorithm.correction=none",
        "trainer.steps=4",
    )
    finished = train_on_gpus(tmp_path, "vllm", *settings, timeout=800)
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["rollout_logprob_abs_diff_max"] for step in steps] == [0.0] * len(steps)
    assert [step["ratio_mean"] for step in steps] == [1.0] * len(steps)
