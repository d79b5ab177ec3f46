"""Proposes n-grams on the GPU for vLLM's second model runner, which cannot do so before version 0.32.

The runner decodes requests with equal numbers of proposals by one CUDA graph, and a step is scheduled while
the previous one runs. Therefore every request has proposals in such a step. If its last tokens did not occur
before, its last token is proposed again, which rejection sampling treats like any other proposal. Such
proposals are not counted.

Importing this module in a vLLM worker replaces the code that creates the runner's proposer and its outputs.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

_BLOCK = 1024
"""Tokens that are compared at once."""


@triton.jit  # type: ignore[untyped-decorator]
def propose(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0913, PLR0917 -- arrays of one operation
    drafts,  # noqa: ANN001
    was_found,  # noqa: ANN001
    totals,  # noqa: ANN001
    slots,  # noqa: ANN001
    token_ids,  # noqa: ANN001
    stride,  # noqa: ANN001
    lengths,  # noqa: ANN001
    num_sampled,  # noqa: ANN001
    num_rejected,  # noqa: ANN001
    num_tokens: tl.constexpr,
    tokens_power: tl.constexpr,
    shortest: tl.constexpr,
    longest: tl.constexpr,
    longest_power: tl.constexpr,
    block: tl.constexpr,
):
    """Proposes tokens for one request, and counts its earlier proposal, which the last step verified.

    Args:
        drafts: ``[requests, num_tokens]`` int64 output.
        was_found: ``[slots]`` int32: 1 if the last tokens of a slot's last proposal occurred before; updated.
        totals: ``[3]`` int64 numbers of such proposals, of their tokens and of accepted tokens; updated.
        slots: ``[requests]`` int32 slot of each request.
        token_ids: ``[slots, stride]`` int32, in the host's memory.
        lengths: ``[slots]`` int32 numbers of tokens.
        num_sampled: ``[requests]`` int32 number of tokens that the last step added; 0 if the prompt is not
            complete.
        num_rejected: ``[requests]`` int32 number of proposed tokens that the last step rejected.
        tokens_power: Power of two that is not below ``num_tokens``; ``longest_power`` likewise.
        block: Number of tokens that are compared at once.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    sampled = tl.load(num_sampled + row)
    num_verified = sampled + tl.load(num_rejected + row) - 1
    if (num_verified > 0) & (tl.load(was_found + slot) > 0):
        tl.atomic_add(totals, 1)
        tl.atomic_add(totals + 1, num_verified.to(tl.int64))
        tl.atomic_add(totals + 2, (sampled - 1).to(tl.int64))

    length = tl.where(sampled > 0, tl.load(lengths + slot), 0)
    tokens = token_ids + slot * stride
    nth = tl.arange(0, longest_power)
    last = tl.load(tokens + length - 1 - nth, mask=(nth < longest) & (nth < length), other=-1)
    best = tl.zeros((), dtype=tl.int64)
    for begin in range(0, length, block):
        ends = begin + 1 + tl.arange(0, block)  # of possible earlier occurrences
        is_equal = ends < length
        count = tl.zeros((block,), dtype=tl.int64)
        # Only the first comparison reads all tokens.
        for index in tl.static_range(longest):
            index_of_token = ends - 1 - index
            token = tl.load(
                tokens + index_of_token, mask=is_equal & (index_of_token >= 0), other=-2
            )
            is_equal = is_equal & (token == tl.sum(tl.where(nth == index, last, 0), axis=0))
            count += is_equal.to(tl.int64)
        # Prefers the longest occurrence, and of equally long ones the latest.
        score = tl.where(count >= shortest, (count << 32) + ends, 0)
        best = tl.maximum(best, tl.max(score, axis=0))

    is_found = best > 0
    end = tl.where(is_found, best & 0xFFFFFFFF, tl.maximum(length - 1, 0)).to(tl.int32)
    # An occurrence that overlaps the last tokens continues with the proposed ones.
    period = tl.maximum(length - end, 1)
    offset = tl.arange(0, tokens_power)
    is_inside = offset < num_tokens
    draft = tl.load(tokens + end + offset % period, mask=is_inside & (length > 0), other=0)
    tl.store(drafts + row * num_tokens + offset, draft.to(tl.int64), mask=is_inside)
    tl.store(was_found + slot, is_found.to(tl.int32))


class NgramProposer:
    """Proposes the tokens of :func:`~services.rollout.engines.speculation.propose_ngram` for each request.

    Has the interface of vLLM's speculators as far as the runner uses it.
    """

    supports_mm_inputs = False
    draft_logits = None
    """No distribution: proposals are deterministic."""
    req_states: Any
    """The runner's states of requests."""

    def __init__(self, config: Any, device: torch.device) -> None:
        """Allocates the outputs.

        Args:
            config: vLLM's configuration, with speculative decoding.
        """
        speculation, num_slots = config.speculative_config, config.scheduler_config.max_num_seqs
        self.model = torch.nn.Module()
        self.totals = torch.zeros(3, dtype=torch.int64, device=device)
        """``[3]`` numbers of verified proposals that occurred before, of their tokens, of accepted tokens."""
        self._num_tokens = int(speculation.num_speculative_tokens)
        self._shortest = int(speculation.prompt_lookup_min)
        self._longest = int(speculation.prompt_lookup_max)
        self._drafts = torch.zeros(num_slots, self._num_tokens, dtype=torch.int64, device=device)
        self._was_found = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def init_cudagraph_manager(self, _: Any) -> None:
        """Does nothing: there is no model to capture."""

    def capture(self) -> None:
        """Does nothing: there is no model to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> Tensor:
        """Returns ``[requests, tokens]`` int64 proposals that continue the tokens sampled so far.

        Args:
            input_batch: The step that has just run.
            num_sampled: ``[requests]`` int32 number of tokens that the step added; 0 while a prompt is not
                complete.
            num_rejected: ``[requests]`` int32 number of proposed tokens that the step rejected.
            dummy_run: True if the requests do not exist.
        """
        num_requests = input_batch.num_reqs
        if not dummy_run:
            token_ids = self.req_states.all_token_ids.gpu
            propose[(num_requests,)](
                self._drafts,
                self._was_found,
                self.totals,
                input_batch.idx_mapping,
                token_ids,
                token_ids.stride(0),
                self.req_states.total_len.gpu,
                num_sampled,
                num_rejected,
                num_tokens=self._num_tokens,
                tokens_power=triton.next_power_of_2(self._num_tokens),
                shortest=self._shortest,
                longest=self._longest,
                longest_power=triton.next_power_of_2(self._longest),
                block=_BLOCK,
            )
        return self._drafts[:num_requests]


_PROPOSERS: list[NgramProposer] = []
"""The proposer of this process's runner, if it has one."""
_init_speculator = model_runner.init_speculator
_init_runner = model_runner.GPUModelRunner.__init__


def _make_proposer(config: Any, device: torch.device) -> Any:
    if config.speculative_config.method != "ngram":
        return _init_speculator(config, device)
    _PROPOSERS[:] = [NgramProposer(config, device)]
    return _PROPOSERS[0]


def _init(self: Any, *arguments: Any, **keywords: Any) -> None:
    _init_runner(self, *arguments, **keywords)
    if isinstance(self.speculator, NgramProposer):
        self.speculator.req_states = self.req_states


class _CountedOutput(model_runner.AsyncOutput):  # type: ignore[misc]
    """Output of a step that also has the totals of proposals."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._totals = None
        if _PROPOSERS:
            with stream(keywords["copy_stream"], keywords["main_stream"]):
                keywords["copy_stream"].wait_stream(keywords["main_stream"])
                self._totals = async_copy_to_np(_PROPOSERS[0].totals)
        super().__init__(*arguments, **keywords)  # waits for all copies

    def get_output(self) -> Any:
        output = super().get_output()
        if self._totals is not None:
            output.draft_totals = self._totals.tolist()
        return output


model_runner.init_speculator = _make_proposer
model_runner.GPUModelRunner.__init__ = _init
model_runner.AsyncOutput = _CountedOutput
