"""Scheduler inside vLLM's engine process that sends tokens in batches.

By default, vLLM sends every request's token with three arrays of log probabilities after every
step. This scheduler sends the tokens that a request received in several steps together, each with
its log probability and its era. A new era begins when decoding continues after a pause in which
weights may have changed, so that the receiver knows which weights sampled a token.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from services.extras.vllm import images as _images  # noqa: F401 -- replaces a function of vLLM
from services.extras.vllm import versions as _versions  # noqa: F401 -- replaces a function of vLLM
from services.rollout.engines.speculation import SpeculationSwitch

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
    tops: list[LogprobsLists] = field(default_factory=list)
    """Logprobs of each step that has more than those of the tokens."""
    masks: list[Any] = field(default_factory=list)
    """vLLM's ``SamplingMaskLists`` of each step, if it reports the tokens that could be drawn."""


class TokenBatcher:
    """Holds tokens back until a request has enough of them, or ends."""

    def __init__(self, interval: int, *, has_masks: bool = False) -> None:
        self.era = 0
        self._interval = interval
        self._has_masks = has_masks
        self._gathered: dict[str, _Gathered] = {}

    def passed(  # noqa: C901 -- one loop over every token of the engine
        self, outputs: list[EngineCoreOutput]
    ) -> list[EngineCoreOutput]:
        """Returns the outputs of a step that are to be sent now.

        Eras replace the ids of candidate tokens: ``[n, 2]``, an era and the index of its first token. If all
        ``n`` tokens have candidates, the logprobs are ``[n, 1 + M]``, and the candidates' ids, ``[n, M]``,
        replace the ranks.
        """
        gathered, era, interval = self._gathered, self.era, self._interval
        ready_outputs = []
        for output in outputs:
            new = output.new_logprobs
            if new is None:
                if output.finish_reason is not None:
                    self._complete(output)
                ready_outputs.append(output)
                continue
            request = gathered.get(output.request_id)
            if request is None:
                request = gathered[output.request_id] = _Gathered()
            if not request.eras or request.eras[-1][0] != era:
                request.eras.append((era, len(request.token_ids)))
            token_ids = output.new_token_ids
            request.token_ids += token_ids
            # This loop handles every token of the engine: building a list would double its cost.
            if len(token_ids) == 1:
                request.logprobs.append(new.logprobs.item(0))
            else:
                request.logprobs += new.logprobs[:, 0].tolist()
            if new.logprobs.shape[1] > 1:
                request.tops.append(new)
            if self._has_masks and output.new_sampling_mask is not None:
                request.masks.append(output.new_sampling_mask)
            if output.prefill_stats is not None:
                request.prefill_stats = output.prefill_stats
            if output.routed_experts is not None:
                request.experts.append(output.routed_experts)
            if len(request.token_ids) >= interval or output.finish_reason is not None:
                self._complete(output)
                ready_outputs.append(output)
        return ready_outputs

    def discard_tokens(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._gathered.pop(request_id, None)

    def _complete(self, output: EngineCoreOutput) -> None:
        """Moves all held tokens of a request into its output."""
        request = self._gathered.pop(output.request_id, None)
        if request is None:
            return
        output.new_token_ids = request.token_ids
        output.prefill_stats = request.prefill_stats
        if request.experts:
            output.routed_experts = np.concatenate(request.experts)
        if request.masks:
            output.new_sampling_mask = _concat_masks(request.masks)
        logprobs, candidates = np.array(request.logprobs, dtype=np.float32), _NOTHING
        if sum(len(step.logprobs) for step in request.tops) == len(request.token_ids):
            # A step has as many candidates as any of its requests asks for.
            width = min(step.logprobs.shape[1] for step in request.tops)
            logprobs = np.concatenate([step.logprobs[:, :width] for step in request.tops])
            candidates = np.concatenate(
                [step.logprob_token_ids[:, 1:width] for step in request.tops]
            )
        output.new_logprobs = LogprobsLists(
            np.array(request.eras, dtype=np.int32), logprobs, candidates
        )


def _concat_masks(masks: list[Any]) -> Any:
    """Joins the ``SamplingMaskLists`` of one request; a mask without offsets is that of one token."""
    sizes = np.concatenate(
        [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
    )
    return masks[0]._replace(
        token_ids=np.concatenate([mask.token_ids for mask in masks]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
    )


class SpeculationMeter:
    """Times steps, decides whether the next ones have proposals, and counts proposals.

    Replaces vLLM's table of the number of proposed tokens by batch size, which vLLM reads in each step.
    """

    def __init__(self, num_tokens: int) -> None:
        self.totals = SpecDecodingStats.new(num_tokens)
        """Proposals since the start."""
        self._num_tokens = num_tokens
        self._switch = SpeculationSwitch()
        self._ended_at: float | None = None

    def __getitem__(self, num_requests: int) -> int:
        """Returns the number of tokens to propose with a number of running requests."""
        return self._num_tokens if self._switch.is_on(num_requests) else 0

    def record(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Adds a step that has just ended."""
        began, self._ended_at = self._ended_at, time.perf_counter()
        drafts = {name: len(ids) for name, ids in step.scheduled_spec_decode_tokens.items() if ids}
        num_drafted = sum(drafts.values())
        tokens = output.sampled_token_ids
        index = output.req_id_to_index
        # Without these totals, as in vLLM's first model runner, every proposal was found by the proposer.
        if (totals := getattr(output, "draft_totals", None)) is not None:
            stats = self.totals
            stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens = totals
        elif drafts:
            self.totals.num_drafts += len(drafts)
            self.totals.num_draft_tokens += num_drafted
            self.totals.num_accepted_tokens += sum(
                max(len(tokens[index[name]]) - 1, 0) for name in drafts if name in index
            )
        num_requests = len(step.num_scheduled_tokens)
        # Steps that prefill prompts take longer than others, so they are not compared.
        is_plain = step.total_num_scheduled_tokens == num_requests + num_drafted
        if began is not None and num_requests and is_plain:
            self._switch.record(
                num_requests,
                num_tokens=sum(map(len, tokens)),
                has_drafts=num_drafted > 0,
                seconds=self._ended_at - began,
            )

    def forget_time(self) -> None:
        """Excludes the next step from timing, because the engine has been idle."""
        self._ended_at = None


class _Gathering:
    """Mixin for vLLM's schedulers that batches outputs, and stops proposals where they do not pay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self.vllm_config.model_config  # type: ignore[attr-defined]
        self._gatherer = TokenBatcher(
            self.scheduler_config.stream_interval,  # type: ignore[attr-defined]
            has_masks=getattr(model, "return_sampling_mask", False),
        )
        self._meter: SpeculationMeter | None = None
        config = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        if config is not None:
            self._meter = SpeculationMeter(config.num_speculative_tokens)
            # vLLM's suffix decoding cannot propose fewer tokens.
            self._drops_drafts = config.method == "suffix"
            if not self._drops_drafts:
                self.dynamic_sd_lookup = self._meter

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Receives the tokens proposed for the next step."""
        if self._meter is not None and self._drops_drafts and not self._meter[len(self.running)]:  # type: ignore[attr-defined]
            return
        super().update_draft_token_ids(drafts)  # type: ignore[misc]

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Processes a step's tokens; returns the outputs to send to each client."""
        results: dict[int, EngineCoreOutputs] = super().update_from_output(step, output, **kwargs)  # type: ignore[misc]
        if self._meter is not None:
            self._meter.record(step, output)
            if not self.running:  # type: ignore[attr-defined]
                self._meter.forget_time()
        for outputs in results.values():
            outputs.outputs = self._gatherer.passed(outputs.outputs)
            if self._meter is not None and outputs.outputs:
                outputs.scheduler_stats = SchedulerStats(spec_decoding_stats=self._meter.totals)
        return results

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._gatherer.discard_tokens(request.request_id for request in finished)
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses or resumes; resuming after a full pause begins a new era."""
        if pause_state == PauseState.UNPAUSED and self.pause_state == PauseState.PAUSED_ALL:  # type: ignore[attr-defined]
            self._gatherer.era += 1
            if self._meter is not None:
                self._meter.forget_time()
            # Features of images are computed again: the vision tower may have changed.
            self.reset_encoder_cache()  # type: ignore[attr-defined]
        super().set_pause_state(pause_state)  # type: ignore[misc]


class BatchingScheduler(_Gathering, Scheduler):  # type: ignore[misc]
    """Batching scheduler for synchronous steps."""


class BatchingAsyncScheduler(_Gathering, AsyncScheduler):  # type: ignore[misc]
    """Batching scheduler that schedules a step while the previous one still runs."""
