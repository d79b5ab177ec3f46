"""FlashAttention 4 on a Hopper GPU: it computes attention, and is one operator in compiled layers."""

import random

import pytest
import torch
from torch import Tensor

from services.trainer.batch import attention, flash
from services.trainer.batch.layout import AttentionLayout
from services.trainer.batch.packing import pack
from tests.helpers.tries import random_trie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not flash.is_here(), reason="needs a Hopper GPU and flash-attn-4"),
]


def _layout(seed: int) -> AttentionLayout:
    prompts, responses = random_trie(random.Random(seed), vocabulary=3)
    return pack(prompts, responses, device=torch.device("cuda"), shares_prefixes=True).layout


def _differentiated(output: Tensor, states: list[Tensor]) -> list[Tensor]:
    factors = torch.randn(
        output.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    grads = torch.autograd.grad((output.float() * factors).sum(), states)
    return [output.detach().float(), *(grad.float() for grad in grads)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("heads", "size"), [((4, 4), 64), ((12, 2), 128), ((4, 2), 80), ((4, 2), 20)]
)
def test_flash_attention_is_attention(
    heads: tuple[int, int], size: int, window: int | None
) -> None:
    scores = attention.Scores(size**-0.5, window)
    generator = torch.Generator("cuda").manual_seed(0)
    for seed in range(6):
        layout = _layout(seed)
        states = [
            torch.randn(len(layout.ends), number, size, generator=generator, device="cuda")
            .bfloat16()
            .requires_grad_()
            for number in (heads[0], heads[1], heads[1])
        ]
        actual = _differentiated(attention._varlen(*states, scores=scores, layout=layout), states)
        exact = [state.detach().float().requires_grad_() for state in states]
        expected = _differentiated(attention._batched(*exact, scores=scores, layout=layout), exact)
        for ours, plain in zip(actual, expected, strict=True):
            assert (ours - plain).norm() <= 1e-2 * plain.norm(), (seed, size)


def test_compiled_layers_have_it_as_one_operator() -> None:
    def attend(query: Tensor, key: Tensor, layout: AttentionLayout) -> Tensor:
        states = (query * 2.0, key * 2.0, key)
        return attention._varlen(*states, scores=attention.Scores(0.1), layout=layout)

    compiled = torch.compile(attend, dynamic=True, fullgraph=True)
    for seed in (0, 1, 2):
        layout = _layout(seed)
        states = [
            torch.randn(len(layout.ends), number, 128, device="cuda").bfloat16().requires_grad_()
            for number in (12, 2)
        ]
        ours, plain = (
            _differentiated(function(*states, layout), states) for function in (compiled, attend)
        )
        for tensor, other_tensor in zip(ours, plain, strict=True):
            assert (tensor - other_tensor).norm() <= 1e-2 * other_tensor.norm(), seed
