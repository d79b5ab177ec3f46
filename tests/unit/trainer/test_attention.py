"""Packed attention: kernels, and compiled layers."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from services.trainer.batch import attention, flash
from services.trainer.batch.layout import build_layout
from services.trainer.batch.packing import pack
from services.trainer.batch.prefixes import branches, unshared
from tests.helpers.tries import random_trie

_WIDTH = 64


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_weight_as_in_gpt_oss(window: int | None) -> None:
    lengths = [13, 4, 9]
    layer: Any = SimpleNamespace(sinks=torch.randn(4), num_key_value_groups=2, training=False)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    layout = build_layout(branches(unshared(3), lengths), torch.device("cpu"))
    actual, _ = attention.packed_attention(
        layer, query, key, value, None, sliding_window=window, s_aux=layer.sinks, layout=layout
    )
    expected = []
    for q, k, v in zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        visible = (distance >= 0) & (distance < (window or 100))
        mask = torch.zeros_like(distance, dtype=torch.float32).masked_fill(~visible, -torch.inf)
        expected.append(
            eager_attention_forward(layer, q, k, v, mask[None, None], scaling=8**-0.5)[0]
        )
    torch.testing.assert_close(actual, torch.cat(expected, 1), rtol=0, atol=1e-6)


def _aligned_at_the_end(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *_: int,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Computes attention like the varlen kernel: each sequence's last query is aligned with its last key."""
    outputs = []
    for q, k, v in zip(
        query.split(cu_queries.diff().tolist()),
        key.split(cu_keys.diff().tolist()),
        value.split(cu_keys.diff().tolist()),
        strict=True,
    ):
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        reach = len(k) if window_size[0] < 0 else window_size[0]
        mask = (distance >= 0) & (distance <= reach)
        heads = (states.transpose(0, 1)[None] for states in (q, k, v))
        output = functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


class _FlashPasses:
    """Forward and backward pass of FlashAttention 4, computed by ``_aligned_at_the_end``."""

    @staticmethod
    def _attend(states: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
        assert options.get("causal") or options["window_size_right"] == 0
        reach = -1 if options.get("causal") else options["window_size_left"]
        lengths = (options["cu_seqlens_q"], options["cu_seqlens_k"])
        for offsets, name in zip(lengths, ("max_seqlen_q", "max_seqlen_k"), strict=True):
            assert options[name] == int(offsets.diff().max())
        return _aligned_at_the_end(
            *states, *lengths, scale=options["softmax_scale"], window_size=(reach, 0)
        )

    def _flash_attn_fwd(
        self, *states: Tensor, return_lse: bool, **options: Any
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        output = self._attend(states, options)
        return output, output.new_zeros(output.shape[1], output.shape[0]), None

    def _flash_attn_bwd(
        self,
        *tensors: Tensor,
        deterministic: bool,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **options: Any,
    ) -> None:
        assert not deterministic
        # Autograd is disabled inside a custom operator, but not in another thread.
        with ThreadPoolExecutor(1) as pool:
            grads = pool.submit(self._differentiate, tensors, options).result()
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    def _differentiate(
        self, tensors: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        states = tuple(tensor.detach().requires_grad_() for tensor in tensors[:3])
        output = self._attend(states, options)
        assert torch.equal(output, tensors[3])
        return torch.autograd.grad(output, states, tensors[4])


def test_flash_attention_is_one_operator_of_compiled_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash, "_kernels", _FlashPasses)
    monkeypatch.setattr(flash, "is_here", lambda: True)
    monkeypatch.setattr(flash, "HEAD_SIZES", (16,))

    def attend(query: Tensor, key: Tensor, layout: Any) -> Tensor:
        states = (query * 2.0, key * 2.0, key)
        return attention._varlen(*states, scores=attention.Scores(0.3), layout=layout)

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 9], [7, 12, 3]):
        layout = build_layout(branches(unshared(len(lengths)), lengths), torch.device("cpu"))
        states = [torch.randn(sum(lengths), heads, 12).requires_grad_() for heads in (4, 2)]
        actual, expected = (function(*states, layout) for function in (compiled, attend))
        assert torch.equal(actual, expected)
        factors = torch.randn_like(expected)
        for gradient, plain in zip(
            torch.autograd.grad((actual * factors).sum(), states),
            torch.autograd.grad((expected * factors).sum(), states),
            strict=True,
        ):
            torch.testing.assert_close(gradient, plain)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["_varlen", "_flash", "_flex"])
def test_kernels_of_gpus_see_the_same_paths(
    kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_varlen_kernel", _aligned_at_the_end)
    monkeypatch.setattr(flash, "_kernels", _FlashPasses)
    monkeypatch.setattr(flash, "is_here", lambda: kernel == "_flash")
    monkeypatch.setattr(flash, "HEAD_SIZES", (8,))
    monkeypatch.setattr(attention, "_flex_kernel", lambda: flex_attention)
    is_flex = kernel == "_flex"
    scores = attention.Scores(
        0.3, window, cap=2.0 if is_flex else None, sinks=torch.randn(4) if is_flex else None
    )
    compared = 0
    for seed in range(6):
        prompts, responses = random_trie(random.Random(seed), vocabulary=3)
        layout = pack(prompts, responses, device=torch.device("cpu"), shares_prefixes=True).layout
        if layout.paths is None:
            continue
        compared += 1
        states = [torch.randn(len(layout.ends), heads, 8).requires_grad_() for heads in (4, 2, 2)]
        expected = attention._batched(*states, scores=scores, layout=layout)
        if is_flex:
            batched = (state.detach().transpose(0, 1)[None] for state in states)
            actual = attention._flex(*batched, scores=scores, layout=layout)[0]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
            continue  # torch cannot compute gradients of FlexAttention on CPUs
        actual = attention._varlen(*states, scores=scores, layout=layout)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        factors = torch.randn_like(expected)
        for gradient, plain in zip(
            torch.autograd.grad((actual * factors).sum(), states),
            torch.autograd.grad((expected * factors).sum(), states),
            strict=True,
        ):
            torch.testing.assert_close(gradient, plain, rtol=0, atol=1e-5)
    assert compared >= 3


def test_copies_of_shared_keys_are_part_of_compiled_layers() -> None:
    def attend(states: Tensor, places: Tensor) -> Tensor:
        copied: Tensor = attention._CopyRows.apply(states * 2.0, places)
        return copied.square()

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    for tokens in (6, 9):
        states = torch.randn(tokens, 2, 4).requires_grad_()
        places = torch.randint(0, tokens, (20,))
        factors = torch.randn(20, 2, 4)
        actual, expected = compiled(states, places), (states * 2.0)[places].square()
        assert torch.equal(actual, expected)
        gradients = [
            torch.autograd.grad((output * factors).sum(), states)[0]
            for output in (actual, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_only_the_number_of_tokens_varies_in_compiled_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # On a GPU the attention kernel is part of the graph.
    monkeypatch.setattr(attention, "_batched", lambda query, *_, **__: query)
    weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH))

    layout: Any = SimpleNamespace(paths=None)

    def attend(layer: Any, states: Tensor) -> Tensor:
        heads = (states @ weight).view(1, states.shape[1], -1, layer.head_dim).transpose(1, 2)
        return attention.packed_attention(layer, heads, heads, heads, None, layout=layout)[0]

    # Sharded layers are compiled like plain objects: torch.compile treats their numbers as dynamic.
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
