"""AdamW whose moments are in host memory, in float32 or in 8 bits."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.extras.optimizers.eight_bit import (
    QuantizedRows,
    compile_for,
    count_update,
    no_moments,
    parts_of,
    update_rows,
)
from services.extras.optimizers.parts import update_parts
from services.trainer.collectives import local_part, spread_like

_PART_BYTES: Final = 1 << 29
"""Max bytes of moments that are copied together."""
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


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

    _max_leaving = 1
    """Parts that are copied back at a time."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, part_bytes: int = _PART_BYTES, **options: Any
    ) -> None:
        super().__init__(list(groups), fused=True, **options)
        self._part_bytes = part_bytes
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._begun(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns when the moments are back in host memory."""
        parts = list(self._parts())
        arriving = self._fetched(parts[0]) if parts else None
        leaving: deque[_FetchedPart] = deque()
        for following in [*parts[1:], None]:
            if arriving is None:
                return
            visit = arriving
            if len(leaving) == self._max_leaving:
                leaving.popleft().await_end()  # its memory is free for the next part
            arriving = None if following is None else self._fetched(following)
            visit.await_end()
            self._update(visit)
            leaving.append(self._returned(visit))
        for visit in leaving:
            if visit.copies_end is not None:
                visit.copies_end.synchronize()

    def _begun(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state of a parameter before its first update."""
        moments = {moment: _host_zeros(parameter) for moment in _MOMENTS}
        return {"step": torch.zeros((), device=parameter.device), **moments}

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
                    yield self._part(group, members)
                    members, size = [], 0
            if members:
                yield self._part(group, members)

    def _part(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> "_HostPart":
        states = [local_part(self.state[p][name]) for name in _MOMENTS for p in parameters]
        return _HostPart(group, parameters, states, local_part(parameters[0]).device)

    def _fetched(self, part: "_HostPart") -> "_FetchedPart":
        here = [torch.empty_like(tensor, device=part.device) for tensor in part.states]
        return _FetchedPart(part, here, self._copied(here, part, leaving=False))

    def _returned(self, visit: "_FetchedPart") -> "_FetchedPart":
        copies_end = self._copied(visit.moments, visit.part, leaving=True)
        return _FetchedPart(visit.part, visit.moments, copies_end)

    def _update(self, visit: "_FetchedPart") -> None:
        parameters = visit.part.members
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
        self, here: Sequence[Tensor], part: "_HostPart", *, leaving: bool
    ) -> torch.cuda.Event | None:
        """Copies on a separate stream: after all computation queued so far, concurrently with later work.

        Returns:
            The event at the end of the copies; None on a CPU.
        """
        device, stream = part.device, None
        if device.type == "cuda":
            if self._streams is None:
                self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            stream = self._streams[leaving]
            stream.wait_stream(torch.cuda.current_stream(device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for tensor, state in zip(here, part.states, strict=True):
                if leaving:
                    state.copy_(tensor, non_blocking=True)
                else:
                    tensor.copy_(state, non_blocking=True)
        return None if stream is None else stream.record_event()


class HostAdamW8bit(HostAdamW):
    """AdamW with moments in 8 bits, which are in host memory; the result equals that of ``AdamW8bit``.

    Args:
        groups: Parameter groups, as in other optimizers.
        **options: Options of ``torch.optim.AdamW``.
    """

    # Parts are small, and their updates take about as long as the copies.
    _max_leaving = 3

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            compile_for(group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns when the moments are back in host memory."""
        super().step(closure)
        for group in self.param_groups:
            count_update(group, self.state)

    def _begun(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = no_moments(parameter)
        return {n: v if n == "step" else _on_host(v, parameter) for n, v in state.items()}

    def _parts(self) -> Iterator["_HostPart"]:
        for group in self.param_groups:
            for rows in parts_of(group, self.state):
                states = [row.state[name] for row in rows for name in _moments_in(row)]
                yield _HostPart(group, rows, states, rows[0].weight.device)

    def _update(self, visit: "_FetchedPart") -> None:
        moments = iter(visit.moments)
        here = [
            replace(row, state={**row.state, **{n: next(moments) for n in _moments_in(row)}})
            for row in visit.part.members
        ]
        update_rows(here, visit.part.group)


def _moments_in(rows: QuantizedRows) -> list[str]:
    return [name for name in rows.state if name != "step"]


@dataclass(frozen=True, slots=True)
class _HostPart:
    """Weights that are updated together."""

    group: dict[str, Any]
    members: list[Any]
    """Their parameters, or rows of them."""
    states: list[Tensor]
    """Their moments in host memory."""
    device: torch.device
    """Device of the weights."""


@dataclass(frozen=True, slots=True)
class _FetchedPart:
    """A part whose moments are on the device, or are being copied."""

    part: _HostPart
    moments: list[Tensor]
    """First moments of all parameters, then their second moments."""
    copies_end: torch.cuda.Event | None
    """Recorded at the end of the copies; None on a CPU."""

    def await_end(self) -> None:
        """Makes later computation on the current stream wait for the copies."""
        if self.copies_end is not None:
            torch.cuda.current_stream(self.part.device).wait_event(self.copies_end)


def _host_zeros(parameter: nn.Parameter) -> Tensor:
    local = local_part(parameter)
    zeros = torch.zeros(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    return spread_like(zeros, parameter)


def _on_host(state: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns a state of a parameter in host memory, which is pinned if the state is on a GPU."""
    local = local_part(state)
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda).copy_(local)
    return spread_like(copy, parameter, shape=state.shape)
