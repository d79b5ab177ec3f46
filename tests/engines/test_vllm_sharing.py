"""Whole runs with adapters that share one of vLLM's servers, in vLLM's environment."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.extras.fleets.local import TOKEN, LocalServer, LocalVllm, local_servers
from tests.helpers.attached_servers import allow_attached_servers
from tests.helpers.cli import REPOSITORY, environment

pytest.importorskip("vllm", reason="vllm is not installed here")
pytestmark = pytest.mark.timeout(900)

_STEPS = 6


def _base(folder: Path) -> Path:
    """Writes a model with random weights; returns its folder."""
    spec = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789=")
    tokenizer = load_tokenizer(spec)
    torch.manual_seed(0)
    model = build_model(load_config(spec, tokenizer), dtype=torch.float32, device="cpu")
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def _run(server: LocalServer, model: Path, folder: Path, name: str, seed: int) -> Any:
    arguments = {
        "addresses": [server.address],
        "token": {"secret": "FLEET_TOKEN"},
        "max_model_len": 64,
    }
    settings = {
        "name": name,
        "seed": seed,
        "model": f"{{path: {model}}}",
        "trainer.lora": "{rank: 4}",
        "trainer.steps": _STEPS,
        "trainer.prompts_per_step": 4,
        "rollout.engine": "vllm-server",
        "rollout.engine_arguments": json.dumps(arguments),
        "rollout.replicas": 1,
        "weight_sync.mode": "cpu_async",
    }
    options = [
        argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")
    ]
    command = (sys.executable, "-m", "services.cli.main", "run", "examples/sort4.yaml")
    return subprocess.Popen(
        [*command, "--state-directory", str(folder / name), *options],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_runs_train_their_adapters_on_one_server_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_attached_servers(tmp_path, monkeypatch, token=TOKEN)
    model = _base(tmp_path / "model")
    lengths = ("--dtype", "float32", "--max-model-len", "64", "--max-num-batched-tokens", "2048")
    adapters = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    with local_servers(LocalVllm, model, 1, *lengths, *adapters) as (server,):
        runs = [_run(server, model, tmp_path, f"run{seed}", seed) for seed in (1, 2)]
        outputs = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    for seed in (1, 2):
        (steps,) = tmp_path.glob(f"run{seed}/run_*/metrics.jsonl")
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        assert len(rows) == _STEPS
        # Tokens under another adapter than that of their version would differ by much more.
        assert max(row["kl_rollout"] for row in rows) < 1e-4
