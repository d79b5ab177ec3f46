"""`slipstream run` with external engines on GPUs, without the engine's variables in the environment."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.helpers.gpu_runs import train_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
_TENSOR_PARALLEL = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
_PIPELINE_PARALLEL = {"vllm": "pipeline_parallel_size", "sglang": "pp_size"}


def _needs(num_gpus: int) -> None:
    # On a machine with exactly this number, the trainer shares one of the GPUs.
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("arguments", [{}, _TENSOR_PARALLEL, _PIPELINE_PARALLEL])
def test_a_run_trains_with_an_engine_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, arguments: dict[str, str]
) -> None:
    _train(tmp_path, monkeypatch, engine, arguments)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("arguments", [{}, _TENSOR_PARALLEL])
def test_a_run_writes_weights_into_an_engine_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, arguments: dict[str, str]
) -> None:
    _train(tmp_path, monkeypatch, engine, arguments, "weight_sync.mode=inplace")


def test_no_step_of_a_run_waits_for_a_compilation(tmp_path: Path) -> None:
    _needs(1)
    settings = ("trainer.steps=4", "trainer.compile=true", "validation.every=0")
    folder = train_on_gpus(tmp_path, "torch", *settings, timeout=500).folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["compilations"] for step in steps] == [0] * 4


def _train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    arguments: dict[str, str],
    *others: str,
) -> None:
    overrides = [f"rollout.engine_arguments.{arguments[engine]}=2"] if arguments else []
    _needs(2 if arguments else 1)
    for name in os.environ:
        if name.startswith(("VLLM_", "SGLANG_")):
            monkeypatch.delenv(name)
    settings = ("trainer.steps=4", "validation.every=0", *overrides, *others)
    finished = train_on_gpus(folder, engine, *settings, timeout=500)
    assert finished.summary["state"] == "SUCCEEDED"
    assert finished.summary["steps"] == 4
