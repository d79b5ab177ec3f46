"""Which keys each query attends to: all earlier ones, or those within a layer's window."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.common.models.families import has_plain_scores, windows_of


class Visibility:
    """Attention masks in the form that a transformers model takes.

    Args:
        config: The model's ``config.json``.
        dtype: Of its scores.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._windows = windows_of(config)
        self._by_kind = bool(config.get("layer_types"))
        self._dtype = dtype
        self._is_added = not has_plain_scores(config)

    def masks(self, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask of a forward pass; one for each kind of layer where a model has several.

        Args:
            queries: ``[N, Q]`` int64 positions.
            keys: ``[K]`` int64 positions.

        Returns:
            ``[N, 1, Q, K]``, by kind of layer if the model distinguishes them. Bool; where scores are capped
            or heads have sinks, what is added to the scores.
        """
        masks = {
            kind: self._formed(_visible(queries, keys, window))
            for kind, window in self._windows.items()
        }
        return masks if self._by_kind else next(iter(masks.values()))

    def _formed(self, visible: Tensor) -> Tensor:
        if not self._is_added:
            return visible
        lowest = torch.finfo(self._dtype).min
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill(~visible, lowest)


def _visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    queries = queries[:, None, :, None]
    visible = queries >= keys
    return visible if window is None else visible & (queries - keys < window)
