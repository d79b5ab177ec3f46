"""Tests of the mapping from checkpoint tensors to the parameters of engines."""

import pytest
import torch
from torch import Tensor

from services.extras.external_engine.layout import (
    PreparedCopy,
    UnknownLayoutError,
    copy_weights,
    differing_sources,
    plan_pieces,
)

HIDDEN, HEADS, KV_HEADS, HEAD, FF, VOCAB = 16, 8, 2, 4, 24, 40
LAYER = "model.layers.0"


def checkpoint() -> dict[str, Tensor]:
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.q_proj.bias": (HEADS * HEAD,),
        f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.k_proj.bias": (KV_HEADS * HEAD,),
        f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.v_proj.bias": (KV_HEADS * HEAD,),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{LAYER}.mlp.gate_proj.weight": (FF, HIDDEN),
        f"{LAYER}.mlp.up_proj.weight": (FF, HIDDEN),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, FF),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def engine_parameters(ranks: int, padded_vocab: int) -> dict[str, Tensor]:
    kv_rows = max(KV_HEADS // ranks, 1) * HEAD
    qkv_rows = HEADS * HEAD // ranks + 2 * kv_rows
    shapes = {
        "model.embed_tokens.weight": (padded_vocab // ranks, HIDDEN),
        f"{LAYER}.self_attn.qkv_proj.weight": (qkv_rows, HIDDEN),
        f"{LAYER}.self_attn.qkv_proj.bias": (qkv_rows,),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD // ranks),
        f"{LAYER}.mlp.gate_up_proj.weight": (2 * FF // ranks, HIDDEN),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, FF // ranks),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def adopt(source: dict[str, Tensor], rank: int, ranks: int, padded_vocab: int) -> dict[str, Tensor]:
    target = engine_parameters(ranks, padded_vocab)
    copy_weights(source, target, rank=rank, ranks=ranks)
    return target


@pytest.mark.parametrize(("prefix", "fused"), [("language_model.", "qkv"), ("", "qkv_proj")])
def test_a_model_that_sees_images_is_a_wrapper_in_the_engine(prefix: str, fused: str) -> None:
    """vLLM prefixes the names of the language model; SGLang renames only parts of the vision tower."""
    block = "visual.blocks.0"
    tower = {
        f"model.{block}.attn.qkv.weight": torch.randn(3 * HIDDEN, HIDDEN),
        f"model.{block}.mlp.gate_proj.weight": torch.randn(FF, HIDDEN),
        f"model.{block}.mlp.up_proj.weight": torch.randn(FF, HIDDEN),
        "model.visual.patch_embed.proj.weight": torch.randn(HIDDEN, 3, 2, 4, 4),
    }
    text = checkpoint()
    for rank in range(2):
        inner = engine_parameters(2, VOCAB)
        target = {f"{prefix}{name}": tensor for name, tensor in inner.items()} | {
            f"{block}.attn.{fused}.weight": torch.empty(3 * HIDDEN // 2, HIDDEN),
            f"{block}.mlp.gate_up_proj.weight": torch.empty(FF, HIDDEN),
            "visual.patch_embed.proj.weight": torch.empty(HIDDEN, 3, 2, 4, 4),
        }
        copy_weights(text | tower, target, rank=rank, ranks=2)
        for name, tensor in adopt(text, rank, 2, VOCAB).items():
            assert torch.equal(target[f"{prefix}{name}"], tensor)
        weights = tower[f"model.{block}.attn.qkv.weight"].chunk(3)
        heads = torch.cat([weight.chunk(2)[rank] for weight in weights])
        assert torch.equal(target[f"{block}.attn.{fused}.weight"], heads)
        gate_and_up = [tower[f"model.{block}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        slices = torch.cat([weight.chunk(2)[rank] for weight in gate_and_up])
        assert torch.equal(target[f"{block}.mlp.gate_up_proj.weight"], slices)
        assert torch.equal(
            target["visual.patch_embed.proj.weight"], tower["model.visual.patch_embed.proj.weight"]
        )


def test_one_rank_holds_everything_fused() -> None:
    source = checkpoint()
    target = adopt(source, 0, 1, VOCAB)
    for kind in ("weight", "bias"):
        fused = [source[f"{LAYER}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(target[f"{LAYER}.self_attn.qkv_proj.{kind}"], torch.cat(fused))
    fused = [source[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(target[f"{LAYER}.mlp.gate_up_proj.weight"], torch.cat(fused))
    for name in target.keys() & source.keys():
        assert torch.equal(target[name], source[name])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_their_heads_rows_and_columns(ranks: int) -> None:
    source = checkpoint()
    padded = 48
    for rank in range(ranks):
        target = adopt(source, rank, ranks, padded)

        def own(tensor: Tensor, dim: int = 0, rank: int = rank) -> Tensor:
            return tensor.chunk(ranks, dim)[rank]

        kv_head = rank * KV_HEADS // ranks
        num_kv = max(KV_HEADS // ranks, 1)
        for kind in ("weight", "bias"):
            query, key, value = (source[f"{LAYER}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            rows = slice(kv_head * HEAD, (kv_head + num_kv) * HEAD)
            expected = torch.cat([own(query), key[rows], value[rows]])
            assert torch.equal(target[f"{LAYER}.self_attn.qkv_proj.{kind}"], expected)
        gate, up = (source[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        expected = torch.cat([own(gate), own(up)])
        assert torch.equal(target[f"{LAYER}.mlp.gate_up_proj.weight"], expected)
        for name in (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"):
            assert torch.equal(target[name], own(source[name], 1))
        rows = target["model.embed_tokens.weight"]
        start = rank * padded // ranks
        num_rows = min(len(rows), max(VOCAB - start, 0))
        expected = source["model.embed_tokens.weight"][start : start + num_rows]
        assert torch.equal(rows[:num_rows], expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (HIDDEN + 1,)),
        (f"{LAYER}.mlp.gate_up_proj.weight", (0,)),
        (f"{LAYER}.self_attn.qkv_proj.weight", (49, HIDDEN)),
        ("model.extra.weight", (3,)),
    ],
)
def test_tensors_outside_the_rules_are_unknown(name: str, shape: tuple[int, ...]) -> None:
    targets = shapes(engine_parameters(1, VOCAB)) | {name: shape}
    with pytest.raises(UnknownLayoutError):
        plan_pieces(shapes(checkpoint()), targets)


def test_a_tensor_without_a_parameter_is_unknown() -> None:
    targets = shapes(engine_parameters(1, VOCAB))
    with pytest.raises(UnknownLayoutError, match="lm_head"):
        plan_pieces(shapes(checkpoint()) | {"lm_head.weight": (VOCAB, HIDDEN)}, targets)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by_experts", [False, True])
@pytest.mark.parametrize("block", ["", ".routed_experts"])
def test_fused_experts_go_whole_or_in_slices(ranks: int, block: str, *, by_experts: bool) -> None:
    gate, up = torch.randn(8, 12, 6), torch.randn(8, 12, 6)
    name = f"{LAYER}.mlp.experts"
    source = {
        f"{name}.gate_up_proj": torch.cat([gate, up], 1),
        f"{name}.down_proj": torch.randn(8, 6, 12),
    }
    num_experts, width = (8 // ranks, 12) if by_experts else (8, 12 // ranks)
    for rank in range(ranks):
        target = {
            f"{name}{block}.w13_weight": torch.full((num_experts, 2 * width, 6), float("nan")),
            f"{name}{block}.w2_weight": torch.full((num_experts, 6, width), float("nan")),
        }
        copy_weights(source, target, rank=rank, ranks=ranks, has_plain_experts=True)
        experts = slice(rank * num_experts, (rank + 1) * num_experts) if by_experts else slice(None)
        rows = slice(None) if by_experts else slice(rank * width, (rank + 1) * width)
        expected = torch.cat([gate[experts, rows], up[experts, rows]], 1)
        assert torch.equal(target[f"{name}{block}.w13_weight"], expected)
        down = source[f"{name}.down_proj"][experts, :, rows]
        assert torch.equal(target[f"{name}{block}.w2_weight"], down)
        with pytest.raises(UnknownLayoutError):
            copy_weights(source, target, rank=rank, ranks=ranks)


@pytest.mark.parametrize("name", ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"])
def test_fused_tensors_are_placed_whole_or_are_unknown(name: str) -> None:
    """A rank's rows of three fused parts are not contiguous, although the shapes would match."""
    source = {f"{LAYER}.{name}": torch.randn(24, HIDDEN)}
    target = {f"{LAYER}.{name}": torch.zeros(24, HIDDEN)}
    copy_weights(source, target)
    assert torch.equal(source[f"{LAYER}.{name}"], target[f"{LAYER}.{name}"])
    with pytest.raises(UnknownLayoutError, match="fused in checkpoints"):
        copy_weights(source, {f"{LAYER}.{name}": torch.zeros(12, HIDDEN)}, rank=1, ranks=2)


def test_tensors_that_engines_compute_others_of_are_not_copied() -> None:
    shape = {f"{LAYER}.self_attn.kv_b_proj.weight": (24, HIDDEN)}
    with pytest.raises(UnknownLayoutError, match="kv_b_proj"):
        plan_pieces(shape, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [(0, 0), (3, 2), (6, 4)])
def test_tensors_whose_parameters_have_other_bits_are_named(
    index: tuple[int, int], dtype: torch.dtype
) -> None:
    sources = {
        "norm.weight": torch.randn(3).to(dtype),
        "a.weight": torch.randn(7, 5).to(dtype),
        "b.weight": torch.full((8, 4), torch.nan, dtype=dtype),
    }
    targets = {name: tensor.clone() for name, tensor in sources.items()}
    assert differing_sources(sources, targets) == []
    targets["a.weight"][index] = -targets["a.weight"][index]
    targets["b.weight"][1, 1] = 0.0
    assert differing_sources(sources, targets) == ["a.weight", "b.weight"]


def test_an_engine_without_parameters_holds_nothing() -> None:
    assert differing_sources({}, {}) == []


def _attention(dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    shapes = dict(zip(names, ((8, 8), (4, 8), (4, 8), (8, 8)), strict=True))
    return {
        f"{LAYER}.self_attn.{name}.weight": torch.randn(shape).to(dtype)
        for name, shape in shapes.items()
    }


def _fused(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        f"{LAYER}.self_attn.qkv_proj.weight": torch.zeros(16, 8, dtype=dtype),
        f"{LAYER}.self_attn.o_proj.weight": torch.zeros(8, 8, dtype=dtype),
    }


def test_a_prepared_copy_copies_each_version_that_its_sources_hold() -> None:
    sources, targets = _attention(torch.float32), _fused(torch.bfloat16)
    copy = PreparedCopy(sources, targets)
    for _ in range(2):
        for tensor in sources.values():
            tensor.normal_()
        copy.measure()
        assert copy.run() == []
        expected = torch.cat([*sources.values()][:3]).to(torch.bfloat16)
        assert torch.equal(targets[f"{LAYER}.self_attn.qkv_proj.weight"], expected)
        assert differing_sources(sources, targets) == []


def test_a_prepared_copy_names_sources_that_changed_after_they_were_measured() -> None:
    sources, targets = _attention(torch.bfloat16), _fused(torch.bfloat16)
    copy = PreparedCopy(sources, targets)
    copy.measure()
    changed = f"{LAYER}.self_attn.k_proj.weight"
    sources[changed][3, 7] += 1.0
    assert copy.run() == [changed]


def test_a_prepared_copy_fits_only_the_tensors_that_it_was_made_for() -> None:
    sources, targets = _attention(torch.float32), _fused(torch.float32)
    copy = PreparedCopy(sources, targets)
    assert copy.fits(sources, targets)
    name = f"{LAYER}.self_attn.o_proj.weight"
    assert not copy.fits({**sources, name: sources[name].clone()}, targets)
    assert not copy.fits(sources, {**targets, name: targets[name].clone()})


def test_a_prepared_copy_of_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UnknownLayoutError):
        PreparedCopy(_attention(torch.float32), {"other.weight": torch.zeros(3)})
