"""Packed attention in compiled layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.trainer.model import attention

_WIDTH = 64


def test_only_the_number_of_tokens_varies_in_compiled_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # On a GPU the kernel is part of the graph.
    monkeypatch.setattr(attention, "_batched", lambda query, *_, **__: query)
    weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH))

    def attend(layer: Any, states: Tensor) -> Tensor:
        heads = (states @ weight).view(1, states.shape[1], -1, layer.head_dim).transpose(1, 2)
        layout: Any = None
        return attention.packed_attention(layer, heads, heads, heads, None, layout=layout)[0]

    # Layers that are sharded are compiled like any object: their numbers are taken for ones that may change.
    layer: Any = SimpleNamespace(head_dim=16)
    compiled = torch.compile(attend, dynamic=True, backend=keep)
    for tokens in (46, 27):
        states = torch.randn(1, tokens, _WIDTH)
        assert torch.equal(compiled(layer, states), attend(layer, states))
    (graph,) = graphs
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    heads = [value.shape for value in values if isinstance(value, Tensor) and value.dim() == 4]
    assert heads
    for shape in heads:
        assert sum(not str(size).isdigit() for size in shape) == 1, shape
