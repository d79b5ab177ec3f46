"""Maps checkpoint tensors to an engine's parameters. Pure functions without an engine.

Engines fuse tensors that they multiply together, and split them over the ranks of tensor parallelism::

    checkpoint              engine, rank r of R
    q, k, v proj (+ bias)   qkv_proj      rows: heads of q, of k, of v; too few key heads are repeated
    gate, up proj           gate_up_proj  rows: a slice of gate, the same slice of up
    o_proj, down_proj       same name     columns
    embed_tokens, lm_head   same name     rows, padded at the end
    norms                   same name     whole
    visual ... attn.qkv     same name     rows: heads of q, of k, of v
    experts.gate_up_proj    w13_weight    experts (expert parallel), or slices of gate and up of each expert
    experts.down_proj       w2_weight     experts (expert parallel), or columns of each expert

Engines wrap models that take images: ``model.visual.`` is ``visual.`` there. In vLLM all other names begin
with ``language_model.``; in SGLang the tower's ``attn.qkv`` is ``attn.qkv_proj``.

The mapping depends only on names and shapes, so a model is supported if all its names and shapes
fit these rules.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from services.weightsync.arena import copy_all
from services.weightsync.checksum import write_tensor_checksums

Shape = tuple[int, ...]
_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
_FUSED = (".qkv_proj.", ".gate_up_proj.")
_TOWER_FUSED = (".attn.qkv.", ".attn.qkv_proj.")
_TOWER, _LANGUAGE_MODEL = "model.visual.", "language_model."
_ABSORBED = ".kv_b_proj."
"""Projection of latent attention; engines multiply by matrices that they compute from it."""


class UnknownLayoutError(ValueError):
    """The parameters cannot be built from the tensors by the rules of this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Block of a checkpoint tensor and its position in an engine's parameter; dense in both."""

    source: str
    """Checkpoint name."""
    dim: int
    """Dimension along which the tensor is cut."""
    start: int
    """First row or column in the source."""
    length: int
    """Number of rows or columns."""
    target: str
    """Parameter name."""
    target_start: int
    """First row or column in the parameter."""


def plan_pieces(
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    *,
    rank: int = 0,
    ranks: int = 1,
    has_plain_experts: bool = False,
) -> list[Piece]:
    """Computes the pieces of checkpoint tensors that make up one rank's parameters.

    Args:
        sources: Shapes of the checkpoint tensors, tied ones once.
        targets: Shapes of this rank's parameters.
        rank: Rank of tensor parallelism.
        ranks: Number of ranks of tensor parallelism.
        has_plain_experts: True if experts have the layout of the table above; some kernels reorder
            them, which shapes do not show.

    Returns:
        Pieces that fill all parameters except the padding of vocabularies.

    Raises:
        UnknownLayoutError: If no such pieces exist.
    """
    names = {engine_name(name, targets): name for name in sources}
    sources = {stored_name: sources[name] for stored_name, name in names.items()}
    pieces: list[Piece] = []
    for name, shape in sources.items():
        owner, _, leaf = name.rpartition(".experts.")
        if has_plain_experts and owner and leaf in _EXPERTS:
            target = f"{owner}.experts.{_EXPERTS[leaf]}"
            if target not in targets:  # vLLM from 0.32 on
                target = f"{owner}.experts.routed_experts.{_EXPERTS[leaf]}"
            pieces += _place_experts(name, shape, target, targets, rank=rank, ranks=ranks)
        elif _is_tower_fused(name) and targets.get(name) == (shape[0] // ranks, *shape[1:]):
            full_length, length = shape[0] // 3, shape[0] // ranks // 3
            pieces += [
                Piece(
                    source=name,
                    dim=0,
                    start=number * full_length + rank * length,
                    length=length,
                    target=name,
                    target_start=number * length,
                )
                for number in range(3)
            ]
        else:
            pieces.append(_place(name, shape, sources, targets, rank=rank, ranks=ranks))
    _check_filled(pieces, targets)
    return [replace(piece, source=names[piece.source]) for piece in pieces]


def engine_name(name: str, targets: Collection[str]) -> str:
    """Returns the name that a checkpoint tensor would have in an engine if it were not fused.

    Args:
        targets: Names of the engine's parameters.
    """
    if is_wrapper(targets):
        return (
            name.removeprefix("model.") if name.startswith(_TOWER) else f"{_LANGUAGE_MODEL}{name}"
        )
    if not name.startswith(_TOWER) or name in targets:
        return name
    return name.removeprefix("model.").replace(*_TOWER_FUSED)


def _is_tower_fused(name: str) -> bool:
    return name.startswith("visual.") and any(mark in name for mark in _TOWER_FUSED)


def is_wrapper(targets: Collection[str]) -> bool:
    """Returns True if parameters with these names are those of a language model and a vision tower."""
    return any(name.startswith(_LANGUAGE_MODEL) for name in targets)


def copy_weights(
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
    has_plain_experts: bool = False,
) -> None:
    """Copies a full checkpoint into an engine's parameters, in place; changes nothing if it fails.

    Arguments are those of :func:`plan_pieces`.

    Raises:
        UnknownLayoutError: If the layout of the parameters is unknown.
    """
    rank_layout = (rank, ranks, has_plain_experts)
    pieces = _planned(tuple(_shapes(sources).items()), tuple(_shapes(targets).items()), rank_layout)
    copy_all(
        [targets[p.target].narrow(p.dim, p.target_start, p.length) for p in pieces],
        [sources[p.source].narrow(p.dim, p.start, p.length) for p in pieces],
    )


class PreparedCopy:
    """Copy of versions of a checkpoint into an engine's parameters, and its comparison by checksums.

    What does not need the parameters is done before the engine pauses: the views of all pieces, once for all
    versions in the same tensors, and the checksums of each version.

    Args:
        sources: The checkpoint's tensors, which receive one version after the other.
        targets: The engine's parameters, on one device.
        rank_layout: Further arguments of :func:`plan_pieces`.

    Raises:
        UnknownLayoutError: If the layout of the parameters is unknown.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        **rank_layout: Any,
    ) -> None:
        pieces = plan_pieces(_shapes(sources), _shapes(targets), **rank_layout)
        self._addresses = _addresses(sources, targets)
        self._names = [piece.source for piece in pieces]
        self._sources = [sources[p.source].narrow(p.dim, p.start, p.length) for p in pieces]
        self._targets = [targets[p.target].narrow(p.dim, p.target_start, p.length) for p in pieces]
        self._checksums: Tensor | None = None

    def fits(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> bool:
        """Returns True if the copy is one between these tensors."""
        return self._addresses == _addresses(sources, targets)

    @torch.no_grad()
    def measure(self) -> None:
        """Computes the checksums of the version that the sources hold, in the current stream."""
        pairs = zip(self._sources, self._targets, strict=True)
        self._checksums = _checksums(
            [source.to(device=target.device, dtype=target.dtype) for source, target in pairs]
        )

    @torch.no_grad()
    def run(self) -> list[str]:
        """Copies the measured version; returns the sources whose parts the parameters do not hold."""
        assert self._checksums is not None, "the version was measured"
        copy_all(self._targets, self._sources)
        flags = (_checksums(self._targets) != self._checksums).any(1).tolist()
        return sorted({name for name, differs in zip(self._names, flags, strict=True) if differs})


def _addresses(*groups: Mapping[str, Tensor]) -> list[tuple[str, int, torch.dtype, Shape]]:
    return [
        (name, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        for tensors in groups
        for name, tensor in tensors.items()
    ]


def _checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the checksum of each tensor: ``[n, 2]`` int64 on their device."""
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    write_tensor_checksums(tensors, sums)
    return sums


def differing_sources(
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
    has_plain_experts: bool = False,
) -> list[str]:
    """Returns the checkpoint tensors whose parts an engine's parameters do not hold, to the last bit.

    Arguments are those of :func:`copy_weights`, after which nothing differs. NaN equals NaN.

    Raises:
        UnknownLayoutError: If the layout of the parameters is unknown.
    """
    rank_layout = (rank, ranks, has_plain_experts)
    pieces = _planned(tuple(_shapes(sources).items()), tuple(_shapes(targets).items()), rank_layout)
    if not pieces:
        return []
    # One transfer to the host: a GPU would wait for each comparison otherwise.
    flags = torch.stack([_differs(piece, sources, targets) for piece in pieces]).tolist()
    return sorted({piece.source for piece, differs in zip(pieces, flags, strict=True) if differs})


def _differs(piece: Piece, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    """Returns True as a ``[]`` bool on the parameter's device if a part of it is not that of its source."""
    parameter = targets[piece.target].narrow(piece.dim, piece.target_start, piece.length)
    source = sources[piece.source].narrow(piece.dim, piece.start, piece.length)
    copied_source = source.to(device=parameter.device, dtype=parameter.dtype)
    return torch.ne(*_bits(parameter, copied_source)).any()


def _bits(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns ``[n]`` integers with the bytes of each tensor, copies of tensors that are not dense."""
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    for integer in (torch.int64, torch.int32, torch.int16):
        size = integer.itemsize
        if all(b.nbytes % size == 0 == b.storage_offset() % size for b in bits):
            return tuple(b.view(integer) for b in bits)
    return tuple(bits)


@lru_cache(maxsize=4)
def _planned(
    sources: tuple[tuple[str, Shape], ...],
    targets: tuple[tuple[str, Shape], ...],
    rank_layout: tuple[int, int, bool],
) -> list[Piece]:
    """Returns the result of :func:`plan_pieces`, which is computed once for all versions of a model."""
    rank, ranks, has_plain_experts = rank_layout
    return plan_pieces(
        dict(sources), dict(targets), rank=rank, ranks=ranks, has_plain_experts=has_plain_experts
    )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _place(
    name: str,
    shape: Shape,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    *,
    rank: int,
    ranks: int,
) -> Piece:
    if _ABSORBED in name:
        raise UnknownLayoutError(f"engines derive other tensors from {name!r}")
    if name in targets:
        if ranks > 1 and any(module in name for module in _FUSED):
            raise UnknownLayoutError(
                f"a rank's shard of {name!r}, fused in checkpoints, is not one block"
            )
        return _place_alone(name, shape, targets[name], rank=rank, ranks=ranks)
    prefix, _, end = name.rpartition("_proj.")
    module, _, projection = prefix.rpartition(".")
    if projection in ("q", "k", "v"):
        target = f"{module}.qkv_proj.{end}"
        queries = sources.get(f"{module}.q_proj.{end}", (0,))[0] // ranks
        start, length = 0, queries
        if projection != "q":
            length = (_rows(targets, target, name) - queries) // 2
            start = queries + (length if projection == "v" else 0)
    elif projection in ("gate", "up"):
        target = f"{module}.gate_up_proj.{end}"
        length = _rows(targets, target, name) // 2
        start = length if projection == "up" else 0
    else:
        raise UnknownLayoutError(f"no parameter receives the tensor {name!r}")
    if length < 1 or length * ranks % shape[0] or targets.get(target, ())[1:] != shape[1:]:
        raise UnknownLayoutError(f"{name!r} of shape {shape} does not fit into {target!r}")
    copies = length * ranks // shape[0]
    return Piece(
        source=name,
        dim=0,
        start=rank // copies * length,
        length=length,
        target=target,
        target_start=start,
    )


def _place_experts(
    name: str, shape: Shape, target: str, targets: Mapping[str, Shape], *, rank: int, ranks: int
) -> list[Piece]:
    """Returns the pieces for this rank's experts, or for its slices of all experts."""
    _rows(targets, target, name)
    target_shape = targets[target]
    if (
        len(shape) == len(target_shape)
        and target_shape == (shape[0] // ranks, *shape[1:])
        and not shape[0] % ranks
    ):
        slices = [(0, rank * target_shape[0], target_shape[0], 0)]
    elif name.endswith("down_proj") and target_shape == (*shape[:2], shape[2] // ranks):
        slices = [(2, rank * target_shape[2], target_shape[2], 0)]
    elif name.endswith("gate_up_proj") and target_shape == (shape[0], shape[1] // ranks, shape[2]):
        half, length = shape[1] // 2, target_shape[1] // 2
        slices = [
            (1, half_index * half + rank * length, length, half_index * length)
            for half_index in (0, 1)
        ]
    else:
        raise UnknownLayoutError(
            f"{name!r} of shape {shape} does not fit into {target_shape} of {ranks}"
        )
    return [
        Piece(
            source=name,
            dim=dim,
            start=start,
            length=length,
            target=target,
            target_start=target_start,
        )
        for dim, start, length, target_start in slices
    ]


def _place_alone(name: str, shape: Shape, target: Shape, *, rank: int, ranks: int) -> Piece:
    dim, start, length = 0, 0, shape[0]
    if target != shape:
        dims = [d for d in range(len(shape)) if len(target) == len(shape) and target[d] != shape[d]]
        if len(dims) != 1:
            raise UnknownLayoutError(f"{name!r} of shape {shape} does not fit into {target}")
        (dim,) = dims
        is_padded = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        start = min(rank * target[dim], shape[dim])
        length = min(target[dim], shape[dim] - start)
        if target[dim] * ranks < shape[dim] or (target[dim] * ranks > shape[dim] and not is_padded):
            raise UnknownLayoutError(
                f"{name!r} of shape {shape} does not fit into {target} of {ranks}"
            )
    return Piece(source=name, dim=dim, start=start, length=length, target=name, target_start=0)


def _rows(targets: Mapping[str, Shape], target: str, name: str) -> int:
    if target not in targets:
        raise UnknownLayoutError(f"no parameter {target!r} receives the tensor {name!r}")
    return targets[target][0]


def _check_filled(pieces: Sequence[Piece], targets: Mapping[str, Shape]) -> None:
    filled: dict[str, int] = {}
    for piece in pieces:
        filled[piece.target] = filled.get(piece.target, 0) + piece.length
    for name, shape in targets.items():
        pieces_of_target = [piece for piece in pieces if piece.target == name]
        if not pieces_of_target:
            raise UnknownLayoutError(f"no tensor fills the parameter {name!r}")
        is_padded = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if filled[name] != shape[pieces_of_target[0].dim] and not is_padded:
            raise UnknownLayoutError(
                f"tensors fill {filled[name]} of {shape[pieces_of_target[0].dim]} rows of {name!r}"
            )
