"""One token for every running request: the model's forward pass and the draw.

On a GPU, where launching the kernels of a small batch takes longer than running them, a step is a CUDA graph.
Graphs have fixed shapes, so batches and spans are rounded up; they read weights and cache where they lie, so
they stay valid while weights are replaced in place, and are thrown away when the cache moves.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from services.common.models.routers import RouterWatch
from services.rollout.engines.draw import Truncation, draw_tokens
from services.rollout.engines.kv_slots import SlotCache
from services.rollout.engines.visibility import Visibility

_CAPTURE_AFTER = 4
"""Steps of one shape before it is worth a graph, which costs about as much as a hundred steps save."""
_LEAST_SPAN = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads, one entry per row; ``[N]``."""

    tokens: NDArray[np.int64]
    """Last token of each request."""
    positions: NDArray[np.int64]
    """Its position."""
    temperatures: NDArray[np.float32]
    """Divisors of the logits; 0 is greedy."""
    numbers: NDArray[np.float64]
    """Random numbers in [0, 1)."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step makes, one entry per row."""

    tokens: Tensor
    """``[N]`` int64."""
    logprobs: Tensor
    """``[N]`` float32."""
    experts: Tensor | None
    """``[N, layers, K]`` int64 experts that the token before was passed to, if they are watched."""

    def first(self, num_rows: int) -> "StepOutputs":
        """The outputs of the first rows."""
        experts = None if self.experts is None else self.experts[:num_rows]
        return StepOutputs(self.tokens[:num_rows], self.logprobs[:num_rows], experts)


class DecodeStep:
    """Runs steps over the first ``N`` slots of a cache."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, watch: RouterWatch | None = None
    ) -> None:
        self._model = model
        self._watch = watch
        self._cache = cache
        self._device = model.device
        self._is_cuda = model.device.type == "cuda"
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._num_seen: dict[tuple[int, int], int] = {}
        self._layout = cache.layout
        self._visibility = Visibility(model.config.to_dict(), model.dtype)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, truncation: Truncation | None) -> StepOutputs:
        """Store keys and values, and draw; on a GPU, returns when both are done.

        Args:
            inputs: Of all rows.
            truncation: Which tokens may be drawn; None allows all.
        """
        num_rows, span = len(inputs.tokens), int(inputs.positions.max()) + 1
        if not self._is_cuda:
            return self._compute(self._move(inputs), span, truncation)
        size, span = rounded_up(num_rows), max(rounded_up(span), _LEAST_SPAN)
        self._cache.reserve(size, span)
        padded = _pad(inputs, size)
        graph = self._graph(size, span) if truncation is None else None
        if graph is not None:
            outputs = graph.replay(padded)
        else:
            if truncation is not None:
                truncation = truncation.padded(size)
            outputs = self._compute(self._move(padded), span, truncation)
        # Whoever waits in a copy to the host keeps other threads from starting work on the GPU.
        if outputs.tokens.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return outputs.first(num_rows)

    def forget(self) -> None:
        """Throw the graphs away: weights or cache are about to lie elsewhere."""
        self._graphs.clear()

    def _compute(
        self, inputs: "_DeviceInputs", span: int, truncation: Truncation | None
    ) -> StepOutputs:
        positions = inputs.positions
        self._cache.begin_decode(positions, span)
        keys = torch.arange(span, device=self._device)
        logits = self._model(
            input_ids=inputs.tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._visibility.masks(positions[:, None], keys),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        drawn = draw_tokens(logits, inputs.temperatures, inputs.numbers, truncation=truncation)
        return StepOutputs(*drawn, None if self._watch is None else self._watch.chosen())

    def _move(self, inputs: StepInputs) -> "_DeviceInputs":
        return _DeviceInputs(
            tokens=torch.from_numpy(inputs.tokens).to(self._device),
            positions=torch.from_numpy(inputs.positions).to(self._device),
            temperatures=torch.from_numpy(inputs.temperatures).to(self._device),
            numbers=torch.from_numpy(inputs.numbers).to(self._device),
        )

    def _graph(self, size: int, span: int) -> "_Graph | None":
        """The graph of a shape, once the shape has come often enough."""
        if self._cache.layout != self._layout:
            self._graphs.clear()
            self._layout = self._cache.layout
        key = size, span
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if key not in self._graphs and self._num_seen[key] > _CAPTURE_AFTER:
            self._graphs[key] = _Graph(self, size, span)
        return self._graphs.get(key)


@dataclass(frozen=True, slots=True)
class _DeviceInputs:
    """:class:`StepInputs` on the model's device."""

    tokens: Tensor
    positions: Tensor
    temperatures: Tensor
    numbers: Tensor


class _Graph:
    """A step of one shape, captured."""

    def __init__(self, step: DecodeStep, size: int, span: int) -> None:
        empty = StepInputs(
            *(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.float32, float))
        )
        self._inputs = step._move(_pad(empty, size))  # noqa: SLF001 -- a part of the step
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        compute = step._compute  # noqa: SLF001
        # Padding writes at position 0 of slots: what lies there is stored again before it is used.
        self._inputs.positions.fill_(span - 1)
        with torch.cuda.stream(stream):
            compute(self._inputs, span, None)
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may receive weights meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = compute(self._inputs, span, None)

    def replay(self, inputs: StepInputs) -> StepOutputs:
        """Run with these inputs; the results are overwritten by the next replay."""
        for name in StepInputs.__dataclass_fields__:
            source = torch.from_numpy(getattr(inputs, name))
            getattr(self._inputs, name).copy_(source, non_blocking=True)
        self._graph.replay()
        return self._outputs


def rounded_up(number: int) -> int:
    """The least ``2**k`` or ``3 * 2**k`` that is not below a number: a third of waste at most."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= number else power


def _pad(inputs: StepInputs, size: int) -> StepInputs:
    """Add rows that draw something and are ignored."""
    num_missing = size - len(inputs.tokens)
    return StepInputs(
        tokens=np.pad(inputs.tokens, (0, num_missing)),
        positions=np.pad(inputs.positions, (0, num_missing)),
        temperatures=np.pad(inputs.temperatures, (0, num_missing), constant_values=1),
        numbers=np.pad(inputs.numbers, (0, num_missing)),
    )
