"""Key-value cache with one slot per running request, for any transformers model."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """Keys and values of the running requests, ``[slots, heads, tokens, head_dim]`` per layer.

    Running requests occupy the slots ``0..n-1`` without holes, so that a decode step attends over
    views and copies nothing. Before each forward pass the owner calls :meth:`begin_prefill` or
    :meth:`begin_decode`. Entries beyond a request's length are never attended to.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_slots = 0
        self.num_tokens = 0
        self._targets: Tensor | None = None
        self._sources: Tensor | None = None
        self._positions: Tensor | None = None
        self._first = self._span = 0

    @property
    def layout(self) -> tuple[int, int]:
        """Slots and tokens per slot; while they do not change, neither does the memory."""
        return self.num_slots, self.num_tokens

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Ensures room for that many slots and tokens per slot; sizes at least double when they grow."""
        slots, tokens = self.num_slots, self.num_tokens
        if num_slots > slots:
            slots = max(num_slots, 2 * slots)
        if num_tokens > tokens:
            tokens = max(num_tokens, 2 * tokens)
        if (slots, tokens) == (self.num_slots, self.num_tokens):
            return
        for stored in (self._keys, self._values):
            for layer, old in enumerate(stored):
                stored[layer] = old.new_zeros(slots, old.shape[1], tokens, old.shape[3])
                stored[layer][: old.shape[0], :, : old.shape[2]] = old
        self.num_slots, self.num_tokens = slots, tokens

    def clear(self) -> None:
        """Frees all memory; requests must be stored again."""
        self._keys.clear()
        self._values.clear()
        self.num_slots = self.num_tokens = 0

    def begin_prefill(self, targets: Tensor, sources: Tensor, *, first: int = 0) -> None:
        """Begins a pass over a part of contexts; tokens before the part must be stored already.

        Args:
            targets: ``[N]`` int64 slots to fill.
            sources: ``[N]`` int64 row that fills each slot, ascending; equal contexts share a row.
            first: Position of the part's first token.
        """
        self._targets, self._sources, self._positions = targets, sources, None
        self._first = first

    def begin_decode(self, positions: Tensor, span: int) -> None:
        """Begins a pass of one token for each of the first ``N`` slots.

        Args:
            positions: ``[N]`` int64 position of each new token.
            span: Number of tokens to attend over, greater than any position.
        """
        self._positions, self._span = positions, span
        self._targets = torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values and returns those to attend over."""
        if layer_idx == len(self._keys):
            shape = (self.num_slots, key_states.shape[1], self.num_tokens, key_states.shape[3])
            self._keys.append(key_states.new_zeros(shape))
            self._values.append(value_states.new_zeros(*shape[:3], value_states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert self._targets is not None, "no forward pass is prepared"
        if self._positions is None:
            assert self._sources is not None
            end = self._first + key_states.shape[2]
            keys[self._targets, :, self._first : end] = key_states[self._sources]
            values[self._targets, :, self._first : end] = value_states[self._sources]
            if self._first == 0:
                return key_states, value_states
            rows = torch.arange(len(key_states), device=key_states.device)
            holders = self._targets[torch.searchsorted(self._sources, rows)]
            return keys[holders, :, :end], values[holders, :, :end]
        keys[self._targets, :, self._positions] = key_states[:, :, 0]
        values[self._targets, :, self._positions] = value_states[:, :, 0]
        num_rows = len(self._positions)
        return keys[:num_rows, :, : self._span], values[:num_rows, :, : self._span]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots over others, to close the holes that finished requests leave."""
        for stored in (*self._keys, *self._values):
            stored[targets] = stored[sources]
