"""Engines that are attached to real servers on the CPU."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from services.extras.fleets.engine import FleetEngine
from services.extras.fleets.local import LocalServer, engine_arguments
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.contract.engines import decode, model_config
from tests.helpers.engines import running, until

_MOST_TOKENS = {"vllm-server": {}, "sglang-server": {"context_length": 506}}


def fleet_engine(servers: Sequence[LocalServer], **changes: Any) -> FleetEngine:
    """Returns the engine that attaches to servers.

    Args:
        changes: Other values of fields of ``EngineConfig``.
    """
    name = servers[0].engine
    fields: dict[str, Any] = {
        "config": model_config(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_running": 8,
        "decode": decode,
        "arguments": {**engine_arguments(servers), **_MOST_TOKENS[name]},
        "reach": AddressPolicy(("127.0.0.1",)),
        "worker": "test",
    }
    engine = make_engine(name, EngineConfig(**(fields | changes)))
    assert isinstance(engine, FleetEngine)
    return engine


@asynccontextmanager
async def attached(
    engine: FleetEngine, num_servers: int, *, timeout_s: float = 300
) -> AsyncIterator[FleetEngine]:
    """Yields the engine once it has attached to a number of servers.

    Args:
        timeout_s: Max seconds of the block.
    """
    async with running(engine), asyncio.timeout(timeout_s):
        await engine.wait_ready()
        await until(lambda: len(engine.backend.fleet.attached) == num_servers, poll_s=0.01)
        yield engine


def assert_equal(logprobs: Sequence[float], expected: Tensor) -> None:
    """Checks logprobs in float32: 1e-5 on average; rounding moves those of unlikely tokens most."""
    difference = (torch.tensor(logprobs) - expected).abs()
    assert float(difference.mean()) <= 1e-5
    assert float(difference.max()) <= 1e-4
