"""Helpers that several benchmarks of rollouts share."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.rollout.data.prompts import PromptStore
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.rewards.base import Reward, RewardInput, Score
from services.rollout.sampling.progress_cache import GroupProgress
from services.wire.workers import GroupAssignment

MODEL = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")
_START_S = 30.0
_REAL_TIME_PRIORITY = 10


def run_before_others() -> None:
    """Schedules this process and its future children before all other programs (``SCHED_RR``).

    Latencies are then those of the machine without its other load.

    Raises:
        PermissionError: Without the rights of root.
    """
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REAL_TIME_PRIORITY))


def machine_state() -> dict[str, Any]:
    """Returns the cores, the load averages over 1, 5 and 15 minutes, and this process's scheduling."""
    return {
        "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "niceness": os.nice(0),
        "is_real_time": os.sched_getscheduler(0) == os.SCHED_RR,
    }


def tokenizer() -> Tokenizer:
    """Returns the tokenizer of the tiny model."""
    return load_tokenizer(MODEL)


class CountedEngine(TorchEngine):
    """A torch engine that counts its requests."""

    num_requests = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.num_requests += 1
        return await super().generate(request)


def tiny_engine(*, max_running: int, seed: int = 0) -> CountedEngine:
    """Returns a torch engine on a CPU with random weights."""
    return CountedEngine(_model(seed), max_running=max_running, decode=tokenizer().decode)


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """Returns random weights of the tiny model, with tied ones once."""
    return {name: value.detach() for name, value in _model(seed).named_parameters()}


def _model(seed: int) -> PreTrainedModel:
    config = load_config(MODEL, tokenizer())
    return build_model(config, dtype=torch.float32, device=torch.device("cpu"), seed=seed)


class _NoReward:
    async def score(self, reward_input: RewardInput) -> Score:
        return Score(0.0)


def no_reward() -> Reward:
    """Returns a reward that scores nothing and takes no time."""
    return _NoReward()


def number_prompts(rows: Mapping[str, str] | None = None) -> PromptStore:
    """Returns a thousand prompts such as ``012=``, with further columns if any are given."""
    data = DataSpec.model_validate(
        {
            "train": {"source": "jsonl", "path": "rows"},
            "answer_column": "answer" if rows else None,
        }
    )
    train = [{"prompt": f"{i:03}=", **(rows or {})} for i in range(1000)]
    return PromptStore(data, {"train": train}, tokenizer())


def group_assignment(index: int, *, size: int) -> GroupAssignment:
    """Returns a group with its own prompt and seeds."""
    return GroupAssignment(
        group_id=f"g{index:08}",
        attempt=1,
        split="train",
        row=index % 1000,
        partition_id="run/train",
        members=tuple(range(size)),
        seeds=tuple(index * size + member for member in range(size)),
        temperatures=(1.0,) * size,
    )


class NoCache:
    """A progress cache that stores nothing."""

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        return {}

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None: ...

    async def delete_progress(self, group_id: str, members: Collection[int]) -> None: ...


@contextmanager
def queue_process() -> Iterator[str]:
    """Runs a transferqueue in a separate process; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "services.transferqueue"],
            stdin=subprocess.PIPE,
            env={
                "PYTHONPATH": ":".join(sys.path),
                "SLIPSTREAM_TRANSFERQUEUE_READY_FILE": str(ready),
                "SLIPSTREAM_TRANSFERQUEUE_STOP_ON_STDIN_EOF": "true",
                "SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES": str(256 << 20),
            },
        )
        try:
            deadline = time.monotonic() + _START_S
            while not ready.exists():
                assert process.poll() is None, "the transferqueue ended"
                assert time.monotonic() < deadline, "the transferqueue does not start"
                time.sleep(0.05)
            yield json.loads(ready.read_text())["address"]
        finally:
            process.terminate()
            process.wait()
