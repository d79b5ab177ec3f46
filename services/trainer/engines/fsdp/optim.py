"""AdamW (with moments on the device, in host memory or in 8 bits), Muon, and gradient clipping."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from services.common.models.quantization import PART_BYTES, block_of_moments
from services.common.runspec.trainer import OptimizerSpec
from services.trainer.collectives import local_part, spread_like

_PART_BYTES: Final = 1 << 29
"""Max bytes of moments that are copied together."""
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_IS_SIGNED: Final = {"exp_avg": True, "exp_avg_sq": False}
_PART_VALUES: Final = PART_BYTES // 8
"""Values whose two float32 moments are one part."""
_EXPONENTS: Final = 7
"""Number of exponents of the 8-bit type: powers of ten from ``10**-6`` to 1. Larger exponents have more
values.
"""


def update_parts(
    group: Mapping[str, Any],
    *,
    weights: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Updates weights, moments and steps in place with torch's fused AdamW.

    Args:
        group: Parameter group with the options of ``torch.optim.AdamW``.
        weights: Parts on this rank; the other lists have an entry for each, of its shape.
        steps: Number of updates before this one, scalars.
    """
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        first_moments,
        second_moments,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class HostAdamW(torch.optim.AdamW):
    """AdamW for parameters on a GPU, with its moments in host memory, which are copied part by part.

    While one part is updated, the next one is copied to the GPU and the last one back, so an update takes
    as long as the host link needs for both moments in one direction. The result equals that of moments on
    the GPU.

    Args:
        groups: Parameter groups, as in other optimizers.
        part_bytes: Bytes of moments in one part; up to two parts are on the device at a time.
        **options: Options of ``torch.optim.AdamW``.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, part_bytes: int = _PART_BYTES, **options: Any
    ) -> None:
        super().__init__(list(groups), fused=True, **options)
        self._part_bytes = part_bytes
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    **{moment: _host_zeros(parameter) for moment in _MOMENTS},
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns when the moments are back in host memory."""
        parts = list(self._parts())
        arriving = self._fetched(parts[0]) if parts else None
        leaving: _FetchedPart | None = None
        for following in [*parts[1:], None]:
            if arriving is None:
                return
            visit = arriving
            if leaving is not None:
                leaving.await_end()
                leaving = None  # frees its memory for the next part
            arriving = None if following is None else self._fetched(following)
            visit.await_end()
            self._update(visit)
            leaving = self._returned(visit)
        if leaving is not None and leaving.done is not None:
            leaving.done.synchronize()

    def _parts(self) -> Iterator["_HostPart"]:
        for group in self.param_groups:
            members: list[nn.Parameter] = []
            size = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                members.append(parameter)
                size += len(_MOMENTS) * local_part(parameter).nbytes
                if size >= self._part_bytes:
                    yield _HostPart(group, members)
                    members, size = [], 0
            if members:
                yield _HostPart(group, members)

    def _fetched(self, part: "_HostPart") -> "_FetchedPart":
        there = [local_part(self.state[p][name]) for name in _MOMENTS for p in part.parameters]
        device = local_part(part.parameters[0]).device
        here = [torch.empty_like(each, device=device) for each in there]
        return _FetchedPart(part, here, self._copied(here, there, device=device, leaving=False))

    def _returned(self, visit: "_FetchedPart") -> "_FetchedPart":
        part = visit.part
        there = [local_part(self.state[p][name]) for name in _MOMENTS for p in part.parameters]
        device = visit.moments[0].device
        done = self._copied(there, visit.moments, device=device, leaving=True)
        return _FetchedPart(part, visit.moments, done)

    def _update(self, visit: "_FetchedPart") -> None:
        parameters = visit.part.parameters
        count = len(parameters)
        update_parts(
            visit.part.group,
            weights=[local_part(parameter) for parameter in parameters],
            gradients=[
                local_part(parameter.grad) for parameter in parameters if parameter.grad is not None
            ],
            first_moments=visit.moments[:count],
            second_moments=visit.moments[count:],
            steps=[self.state[parameter]["step"] for parameter in parameters],
        )

    def _copied(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        *,
        device: torch.device,
        leaving: bool,
    ) -> torch.cuda.Event | None:
        """Copies on a separate stream: after all computation queued so far, concurrently with later work.

        Returns:
            The event at the end of the copies; None on a CPU.
        """
        stream = None
        if device.type == "cuda":
            if self._streams is None:
                self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            stream = self._streams[leaving]
            stream.wait_stream(torch.cuda.current_stream(device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()


@dataclass(frozen=True, slots=True)
class _HostPart:
    """Parameters that are updated together."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]


@dataclass(frozen=True, slots=True)
class _FetchedPart:
    """A part whose moments are on the device, or are being copied."""

    part: _HostPart
    moments: list[Tensor]
    """First moments of all parameters, then their second moments."""
    done: torch.cuda.Event | None
    """Recorded at the end of the copies; None on a CPU."""

    def await_end(self) -> None:
        """Makes later computation on the current stream wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream(self.moments[0].device).wait_event(self.done)


def _host_zeros(parameter: nn.Parameter) -> Tensor:
    local = local_part(parameter)
    zeros = torch.zeros(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    return spread_like(zeros, parameter)


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
                self.state[parameter] = _no_moments(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            part: list[_QuantizedRows] = []
            for rows in _rows_of(group["params"], self.state):
                part.append(rows)
                if sum(each.weight.numel() for each in part) >= _PART_VALUES:
                    _update_rows(part, group)
                    part = []
            _update_rows(part, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1


@dataclass(frozen=True, slots=True)
class _QuantizedRows:
    """Some rows of this rank's part of a parameter."""

    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    """The optimizer's state of these rows, and ``step`` before the update."""


def _rows_of(
    parameters: Iterable[nn.Parameter], states: Mapping[Tensor, Mapping[str, Tensor]]
) -> Iterator[_QuantizedRows]:
    """Yields the rows of parameters that have gradients, in blocks whose moments fit into a part."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad)
        state = {name: local_part(value) for name, value in states[parameter].items()}
        step = state.pop("step")
        if block_of_moments(tuple(parameter.shape)) is None:
            yield _QuantizedRows(weight, gradient, {**state, "step": step.clone()})
            continue
        size = max(1, _PART_VALUES * len(weight) // max(1, weight.numel()))
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            some = {name: value[rows] for name, value in state.items()}
            yield _QuantizedRows(weight[rows], gradient[rows], {**some, "step": step.clone()})


def _update_rows(part: list[_QuantizedRows], group: Mapping[str, Any]) -> None:
    moments = {name: [_read_moment(rows.state, name) for rows in part] for name in _IS_SIGNED}
    if not part:
        return
    update_parts(
        group,
        weights=[rows.weight for rows in part],
        gradients=[rows.gradient for rows in part],
        first_moments=moments["exp_avg"],
        second_moments=moments["exp_avg_sq"],
        steps=[rows.state["step"] for rows in part],
    )
    for name, values in moments.items():
        for rows, value in zip(part, values, strict=True):
            _write_moment(rows.state, name, value)


def _no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
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
    blocks = levels[values.int()].unflatten(-1, (scales.shape[-1], -1))
    moments: Tensor = (blocks * scales[..., None]).flatten(-2)
    return moments


def _write_moment(state: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    if (scales := state.get(_scale(name))) is None:
        return
    is_signed = _IS_SIGNED[name]
    midpoints = _on_device(is_signed=is_signed, device=value.device)[1]
    codes, found = _quantized(value, scales.shape[-1], midpoints, is_signed=is_signed)
    state[name].copy_(codes)
    scales.copy_(found)


def _quantized(
    values: Tensor, num_blocks: int, midpoints: Tensor, *, is_signed: bool
) -> tuple[Tensor, Tensor]:
    """Returns the uint8 codes of the nearest levels, and the ``[..., num_blocks]`` scales."""
    blocks = values.unflatten(-1, (num_blocks, -1))
    scales = blocks.abs().amax(-1)
    relative = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = torch.bucketize(relative, midpoints, right=True, out_int32=True)
    if not is_signed:
        # If a second moment were rounded to 0 and its first moment were not, the update would be very large.
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2), scales


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


def build_optimizer(
    module: nn.Module, spec: OptimizerSpec, *, in_host: bool = False
) -> torch.optim.AdamW:
    """Creates AdamW with one fused kernel, AdamW with moments in 8 bits, or Muon for matrices.

    The caller sets the learning rate before every update.

    Args:
        module: Module whose trainable parameters are updated; it must be on its device already.
        spec: Peak learning rate, betas and decay.
        in_host: True if the moments are kept in host memory.
    """
    # The fused kernel does not accept parameters of several meshes at once.
    by_group: dict[tuple[object, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            takes_muon = spec.kind == "muon" and _is_layer_matrix(name, parameter)
            key = mesh, decays(name, parameter), takes_muon
            by_group.setdefault(key, []).append(parameter)
    groups = [
        {
            "params": members,
            "weight_decay": spec.weight_decay if is_decayed else 0.0,
            "takes_muon": takes_muon,
        }
        for (_, is_decayed, takes_muon), members in by_group.items()
    ]
    options: dict[str, Any] = {
        "lr": spec.learning_rate,
        "betas": spec.betas,
    }
    if in_host:
        return HostAdamW(groups, **options)
    if spec.kind == "adamw_8bit":
        return AdamW8bit(groups, **options)
    if spec.kind == "muon":
        return MuonWithAdamW(groups, momentum=spec.momentum, fused=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


class MuonWithAdamW(torch.optim.AdamW):
    """Muon for the groups with ``takes_muon``, AdamW for the others.

    The momentum is sharded like its weight. For its update, each matrix is gathered and orthogonalized by
    ``torch.optim.Muon`` on every rank, which keeps its own part: the result does not depend on the sharding.

    Args:
        groups: Parameter groups with the key ``takes_muon``.
        **options: Options of ``torch.optim.AdamW``.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, momentum: float, **options: Any
    ) -> None:
        super().__init__(list(groups), **options)
        self._momentum = momentum
        for group in self.param_groups:
            for parameter in group["params"] if group["takes_muon"] else ():
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "momentum_buffer": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. All ranks must call it.

        Drops the gradients of parameters that Muon updates.
        """
        for group in self.param_groups:
            for parameter in group["params"] if group["takes_muon"] else ():
                if parameter.grad is not None:
                    self._orthogonal_step(parameter, group)
                    parameter.grad = None  # AdamW skips it
        super().step()

    def _orthogonal_step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local_part(parameter.grad)
        buffer = local_part(state["momentum_buffer"])
        buffer.lerp_(gradient, 1.0 - self._momentum)
        # Nesterov's momentum. The orthogonalization below is not elementwise and needs the whole matrix.
        ahead = spread_like(gradient.lerp(buffer, self._momentum), parameter)
        whole = ahead.full_tensor() if isinstance(ahead, DTensor) else ahead
        change = nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        torch.optim.Muon(
            [change],
            lr=group["lr"],
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        ).step()
        own = change.detach()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            same = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
            own = same.redistribute(placements=parameter.placements).to_local()
        weight = local_part(parameter.detach())
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(own)
        state["step"] += 1


def _is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Returns True for matrices of a model's layers, whose updates Muon orthogonalizes."""
    return parameter.ndim == 2 and ".layers." in name and decays(name, parameter)


def decays(name: str, parameter: Tensor) -> bool:
    """Returns True if weight decay applies to a parameter: to matrices, including embeddings.

    Norms, biases and other vectors do not decay, as in Hugging Face's ``Trainer`` and Megatron-LM. The
    biases of fused experts have two dimensions and are recognized by name.
    """
    return parameter.ndim > 1 and not name.endswith("bias")


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Computes the global norm of the gradients over all shards. All ranks must call it.

    Gradients are grouped by their sharding: one small reduction for each kind, instead of one for each
    parameter.

    Returns:
        Float32 scalar, the same on every rank.
    """
    local: dict[tuple[distributed.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            groups = tuple(
                gradient.device_mesh.get_group(dimension)
                for dimension, placement in enumerate(gradient.placements)
                if not isinstance(placement, Replicate)
            )
            local.setdefault(groups, []).append(gradient.to_local())
        else:
            local.setdefault((), []).append(gradient)
    total = torch.zeros(())
    for groups, gradients in local.items():
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])  # noqa: SLF001
        square = torch.stack(norms).square().sum()
        if groups and parameters[0].device.type != square.device.type:
            square = square.to(parameters[0].device)
        for group in groups:
            distributed.all_reduce(square, group=group)
        total = total.to(square.device) + square
    return total.sqrt()


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales all gradients down so that their global norm is at most ``max_norm``."""
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_part(each) for each in gradients]
    if shards:
        torch._foreach_mul_(shards, factor.to(shards[0].device))
