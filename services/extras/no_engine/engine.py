"""Engine ``none``, for data that contains the answers: it has no model and refuses every request."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from services.rollout.engines.base import (
    EngineCapabilities,
    EngineStats,
    GenerationRequest,
    GenerationResult,
)
from services.rollout.engines.engine_config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from services.weightsync.weight_plan import TensorSpec
    from services.wire.data.model_inputs import ModelInputs


def build(config: EngineConfig) -> "NoEngine":
    return NoEngine(max_tokens=int(config.config.max_position_embeddings))


class NoEngine:
    """Serves a rollout that only reads rows.

    Args:
        max_tokens: Max length of a context of the model that trains.
    """

    capabilities = EngineCapabilities(
        name="none",
        kv_policies=frozenset({"recompute", "keep"}),
        stop_texts=False,
        truncation=False,
        seeds=True,
        model_inputs=True,
    )

    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._weight_version = -1
        self._start_s = time.monotonic()

    async def run(self) -> None:
        """Waits until cancelled."""
        await asyncio.Event().wait()

    async def wait_ready(self) -> None:
        """Returns at once: nothing has to start."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        _refuse()

    async def score(
        self, token_ids: Sequence[int], model_inputs: "ModelInputs | None" = None
    ) -> tuple[float, ...]:
        _refuse()

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Does nothing: no request is accepted."""

    async def peek(self) -> dict[str, GenerationResult]:
        """Returns an empty dictionary: no request is accepted."""
        return {}

    async def pause(self, *, drain: bool = False) -> None:
        """Does nothing: no token is produced."""

    resume = sleep = wake = wait_ready

    def weight_specs(self) -> "list[TensorSpec]":
        """Returns an empty list: the engine has no weights."""
        return []

    async def adopt_weights(self, version: int, tensors: "Mapping[str, Tensor]") -> float:
        """Reports a version as live; takes no time."""
        self._weight_version = version
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=0,
            num_waiting=0,
            tokens_total=0,
            kv_used_fraction=0.0,
            idle_seconds=time.monotonic() - self._start_s,
            weight_version=self._weight_version,
        )


def _refuse() -> NoReturn:
    raise ValueError(
        "rollout.engine is 'none', which generates and scores nothing; set it to another engine, or remove "
        "what needs responses"
    )
