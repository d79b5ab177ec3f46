"""Scheduler inside vLLM's engine process that sends tokens in batches.

By default, vLLM sends every request's token with three arrays of log probabilities after every
step. This scheduler sends the tokens that a request received in several steps together, each with
its log probability and its era. A new era begins when decoding continues after a pause in which
weights may have changed, so that the receiver knows which weights sampled a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class _Gathered:
    """Tokens of a request that were not sent yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    eras: list[tuple[int, int]] = field(default_factory=list)
    """``(era, index of its first token)``."""
    prefill_stats: Any = None
    experts: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Experts of the tokens computed since the last batch, if vLLM reports them."""


class TokenBatcher:
    """Holds tokens back until a request has enough of them, or ends."""

    def __init__(self, interval: int) -> None:
        self.era = 0
        self._interval = interval
        self._held: dict[str, _Gathered] = {}

    def passed(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Returns the outputs of a step that are to be sent now.

        Eras replace the ids of candidate tokens: ``[n, 2]``, an era and the index of its first token.
        """
        held, era, interval = self._held, self.era, self._interval
        ready = []
        for output in outputs:
            new = output.new_logprobs
            if new is None:
                if output.finish_reason is not None:
                    self._complete(output)
                ready.append(output)
                continue
            request = held.get(output.request_id)
            if request is None:
                request = held[output.request_id] = _Gathered()
            if not request.eras or request.eras[-1][0] != era:
                request.eras.append((era, len(request.token_ids)))
            token_ids = output.new_token_ids
            request.token_ids += token_ids
            # This loop handles every token of the engine: building a list would double its cost.
            if len(token_ids) == 1:
                request.logprobs.append(new.logprobs.item(0))
            else:
                request.logprobs += new.logprobs[:, 0].tolist()
            if output.prefill_stats is not None:
                request.prefill_stats = output.prefill_stats
            if output.routed_experts is not None:
                request.experts.append(output.routed_experts)
            if len(request.token_ids) >= interval or output.finish_reason is not None:
                self._complete(output)
                ready.append(output)
        return ready

    def discard_tokens(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def _complete(self, output: EngineCoreOutput) -> None:
        """Moves all held tokens of a request into its output."""
        request = self._held.pop(output.request_id, None)
        if request is None:
            return
        output.new_token_ids = request.token_ids
        output.prefill_stats = request.prefill_stats
        if request.experts:
            output.routed_experts = np.concatenate(request.experts)
        output.new_logprobs = LogprobsLists(
            np.array(request.eras, dtype=np.int32),
            np.array(request.logprobs, dtype=np.float32),
            _NOTHING,
        )


class _Gathering:
    """Mixin for vLLM's schedulers that batches their outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gatherer = TokenBatcher(self.scheduler_config.stream_interval)  # type: ignore[attr-defined]

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Processes a step's tokens; returns the outputs to send to each client."""
        sent: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for outputs in sent.values():
            outputs.outputs = self._gatherer.passed(outputs.outputs)
        return sent

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        ended: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._gatherer.discard_tokens(request.request_id for request in ended)
        return ended

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses or resumes; resuming after a full pause begins a new era."""
        if pause_state == PauseState.UNPAUSED and self.pause_state == PauseState.PAUSED_ALL:  # type: ignore[attr-defined]
            self._gatherer.era += 1
        super().set_pause_state(pause_state)  # type: ignore[misc]


class BatchingScheduler(_Gathering, Scheduler):  # type: ignore[misc]
    """Batching scheduler for synchronous steps."""


class BatchingAsyncScheduler(_Gathering, AsyncScheduler):  # type: ignore[misc]
    """Batching scheduler that schedules a step while the previous one still runs."""
