"""AdamW whose moments have 8 bits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.extras.optimizers.kinds import PART_BYTES, block_of_moments
from services.extras.optimizers.parts import update_parts
from services.trainer.collectives import local_part, spread_like

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_IS_SIGNED: Final = {"exp_avg": True, "exp_avg_sq": False}
_PART_VALUES: Final = PART_BYTES // 8
"""Values whose two float32 moments are one part."""
_COMPILED_BLOCKS: Final = 16
"""Blocks with which the kernels are compiled, for any number of them."""
_EXPONENTS: Final = 7
"""Number of exponents of the 8-bit type: powers of ten from ``10**-6`` to 1. Larger exponents have more
values.
"""


class AdamW8bit(torch.optim.AdamW):
    """AdamW whose moments of large matrices have 8 bits; vectors and small matrices keep float32.

    The type is the dynamic tree of 8-bit optimizers (arXiv:2110.02861), as in bitsandbytes and torchao, with
    a scale for each block of consecutive values. A block never leaves its row, so every sharding by rows has
    the same blocks, the result does not depend on the sharding, and any number of processes can load a
    checkpoint. An update dequantizes some rows at a time.

    The states of a parameter are ``exp_avg`` and ``exp_avg_sq``, and for 8 bits the ``*_scale`` of each.

    Args:
        groups: Parameter groups, as in other optimizers.
        **options: Options of ``torch.optim.AdamW``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(list(groups), fused=True, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = no_moments(parameter)
            compile_for(group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            for batch in parts_of(group, self.state):
                update_rows(batch, group)
            count_update(group, self.state)


_States = Mapping[Tensor, Mapping[str, Tensor]]


def parts_of(group: Mapping[str, Any], states: _States) -> Iterator[list["QuantizedRows"]]:
    """Yields the rows of a group's parameters that have gradients, as many at a time as fit into a part."""
    batch: list[QuantizedRows] = []
    for rows in _rows_of(group["params"], states):
        batch.append(rows)
        if sum(entry.weight.numel() for entry in batch) >= _PART_VALUES:
            yield batch
            batch = []
    if batch:
        yield batch


def count_update(group: Mapping[str, Any], states: _States) -> None:
    """Increments ``step`` of the group's parameters that have a gradient."""
    for parameter in group["params"]:
        if parameter.grad is not None:
            states[parameter]["step"].add_(1)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Some rows of this rank's part of a parameter."""

    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    """The optimizer's state of these rows, and ``step`` before the update."""


def _rows_of(parameters: Iterable[nn.Parameter], states: _States) -> Iterator[QuantizedRows]:
    """Yields the rows of parameters that have gradients, in blocks whose moments fit into a part."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad)
        state = {name: local_part(value) for name, value in states[parameter].items()}
        step = state.pop("step")
        if block_of_moments(tuple(parameter.shape)) is None:
            yield QuantizedRows(weight, gradient, {**state, "step": step.clone()})
            continue
        size = max(1, _PART_VALUES * len(weight) // max(1, weight.numel()))
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            some = {name: value[rows] for name, value in state.items()}
            yield QuantizedRows(weight[rows], gradient[rows], {**some, "step": step.clone()})


def update_rows(batch: Sequence[QuantizedRows], group: Mapping[str, Any]) -> None:
    """Updates rows and their moments, which are on the device of the weights."""
    moments = {name: [_read_moment(rows.state, name) for rows in batch] for name in _IS_SIGNED}
    update_parts(
        group,
        weights=[rows.weight for rows in batch],
        gradients=[rows.gradient for rows in batch],
        first_moments=moments["exp_avg"],
        second_moments=moments["exp_avg_sq"],
        steps=[rows.state["step"] for rows in batch],
    )
    for name, values in moments.items():
        for rows, value in zip(batch, values, strict=True):
            _write_moment(rows.state, name, value)


def no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns the state of a parameter before its first update."""
    block = block_of_moments(tuple(parameter.shape))
    state = {"step": torch.zeros((), device=parameter.device)}
    for name, is_signed in _IS_SIGNED.items():
        if block is None:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            continue
        local = local_part(parameter)
        zero = int((levels_of_moments(is_signed=is_signed) == 0).nonzero())
        codes = torch.full_like(local, zero, dtype=torch.uint8)
        scales = local.new_zeros((*local.shape[:-1], local.shape[-1] // block), dtype=torch.float32)
        whole = (*parameter.shape[:-1], parameter.shape[-1] // block)
        state[name] = spread_like(codes, parameter)
        state[_scale(name)] = spread_like(scales, parameter, shape=whole)
    return state


def _scale(name: str) -> str:
    return f"{name}_scale"


def _read_moment(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns a moment in float32; the state itself if it has no scales."""
    values, scales = state[name], state.get(_scale(name))
    if scales is None:
        return values
    levels = _on_device(is_signed=_IS_SIGNED[name], device=values.device)[0]
    blocks = values.view(-1, values.shape[-1] // scales.shape[-1])
    moments: Tensor = _fused(_dequantized, blocks)(blocks, scales.view(-1, 1), levels)
    return moments.view(values.shape)


def _dequantized(blocks: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    return levels[blocks.int()] * scales


def _write_moment(state: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    if (scales := state.get(_scale(name))) is None:
        return
    is_signed = _IS_SIGNED[name]
    midpoints = _on_device(is_signed=is_signed, device=value.device)[1]
    blocks = value.view(-1, value.shape[-1] // scales.shape[-1])
    codes, new_scales = _fused(_quantized, blocks)(blocks, midpoints, is_signed=is_signed)
    state[name].copy_(codes.view(value.shape))
    scales.copy_(new_scales.view(scales.shape))


def _quantized(blocks: Tensor, midpoints: Tensor, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Returns the uint8 codes of the nearest levels of ``[N, block]`` values, and their ``[N]`` scales."""
    scales = blocks.abs().amax(-1)
    relative = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(relative, midpoints, right=True, out_int32=True)
    if not is_signed:
        # If a second moment were rounded to 0 and its first moment were not, the update would be very large.
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8), scales


def compile_for(parameters: Iterable[nn.Parameter]) -> None:
    """Compiles for the blocks of parameters on a GPU, so that no update waits for it."""
    sizes = {
        (parameter.device, block)
        for parameter in parameters
        if (block := block_of_moments(tuple(parameter.shape))) is not None
    }
    for device, block in sizes:
        value = torch.zeros(_COMPILED_BLOCKS, block, device=device)
        for name in _IS_SIGNED:
            scales = torch.zeros(_COMPILED_BLOCKS, 1, device=device)
            state = {name: torch.zeros_like(value, dtype=torch.uint8), _scale(name): scales}
            _write_moment(state, name, _read_moment(state, name))


def _fused(function: Any, blocks: Tensor) -> Any:
    """Returns a function of ``[N, block]`` numbers, compiled into few kernels on a GPU."""
    if not blocks.is_cuda:
        return function
    torch._dynamo.mark_static(blocks, 1)  # noqa: SLF001
    return _compiled(function)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


@cache
def _on_device(*, is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the values of the 8-bit type, ascending, and the midpoints between neighbours."""
    levels = levels_of_moments(is_signed=is_signed)
    return levels.to(device), ((levels[1:] + levels[:-1]) / 2).to(device)


def levels_of_moments(*, is_signed: bool) -> Tensor:
    """Returns the ``[256]`` float32 values of the 8-bit type, ascending: -1 to 1 if signed, else 0 to 1."""
    levels = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 1 << exponent if is_signed else 2 << exponent
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = 10.0 ** (exponent - _EXPONENTS + 1) * (edges[1:] + edges[:-1]) / 2
        levels += means.tolist()
        if is_signed:
            levels += (-means).tolist()
    return torch.tensor(sorted(levels), dtype=torch.float32)
