"""Process groups, small collectives over data-parallel ranks, and the parts of sharded tensors.

One rank needs no process group.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)

_SHARED = (NotFoundError, UnavailableError, DeadlineExceededError)
"""Failures that mean the same on every rank: samples were released, or the transferqueue is unreachable."""


DEVIATIONS: Final[Mapping[str, str]] = {"reward_mean": "reward_std"}
"""Names of standard deviations, by the mean of the same values."""

_MAX_PAUSE = timedelta(hours=24)
"""Max time between two commands of rank 0, after which the other ranks give up."""


def join_processes(*, device: torch.device, rank: int, world_size: int) -> None:
    """Initializes torch's default process group: Gloo for CPU tensors and, on GPUs, NCCL for GPU tensors.

    Several processes find each other through the environment of ``torchrun``.
    """
    distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=distributed.HashStore() if world_size == 1 else None,  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_MAX_PAUSE,
    )


def abort_processes() -> None:
    """Aborts all process groups of this process, so that NCCL operations in its other threads fail at once.

    Gloo has no abort: when this process ends, its connections close and fail on the other ranks. Safe to
    repeat.
    """
    if distributed.is_initialized():
        distributed.distributed_c10d._abort_process_group()  # noqa: SLF001 -- there is no public name


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks, each of which trains its own samples."""

    rank: int = 0
    """This process's rank."""
    size: int = 1
    """Number of ranks."""
    group: distributed.ProcessGroup | None = None
    """Process group that reduces CPU tensors; None for a single rank."""
    everyone: "Ranks | None" = None
    """These ranks and all others that hold the same samples; None if there are no others."""
    is_first_of_peers: bool = True
    """True if this process is the first of those that hold the same samples."""

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks on the device of ``values``.

        All ranks must call it in the same order.
        """
        return self._reduce(values, distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum over ranks on the device of ``values``.

        All ranks must call it in the same order.
        """
        return self._reduce(values, distributed.ReduceOp.MAX)

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in their order. All ranks must call it in the same order."""
        texts = [text] * self.size
        if self.size > 1:
            distributed.all_gather_object(texts, text, group=self.group)
        return texts

    @contextmanager
    def fail_together(self, doing: str) -> Iterator[None]:
        """Guards work that each rank does alone: fails on all ranks if it fails on one.

        Without it, the ranks that succeeded would enter the next collective alone.

        Args:
            doing: Description of the work, for the message on ranks that succeeded.

        Raises:
            NotFoundError: If another rank failed because its samples were released.
            UnavailableError: If another rank failed because its connection broke.
            DeadlineExceededError: If another rank failed because it did not reach the transferqueue.
            DataLossError: If another rank failed for another reason. A failure of this rank is raised
                unchanged.
        """
        failure: ServiceError | ValueError | None = None
        try:
            yield
        except (ServiceError, ValueError) as error:
            failure = error
        flags = [failure is not None, *(isinstance(failure, kind) for kind in _SHARED)]
        everyone = self.everyone or self
        failures, *shared = everyone.sum(torch.tensor(flags, dtype=torch.int64)).tolist()
        if not failures:
            return
        causes = everyone.gather("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        kinds = [kind for kind, count in zip(_SHARED, shared, strict=True) if count == failures]
        kind = kinds[0] if kinds else DataLossError
        raise kind(f"another rank could not {doing}: {next(filter(None, causes))}")

    def _reduce(self, values: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        carried = values.detach().to("cpu", copy=True)
        distributed.all_reduce(carried, operation, group=self.group)
        return carried.to(values.device)


class MetricTotals:
    """Accumulates means, standard deviations and maxima over micro-batches, then reduces them over ranks.

    Standard deviations come from squared distances from the mean: the difference of a mean of squares and a
    squared mean would be mere rounding if all values are large and nearly equal.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._squares: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds the elements of ``values`` (any shape) that ``mask`` selects to the mean ``name``.

        The mean ``reward_mean`` also gives a standard deviation, ``reward_std`` (:data:`DEVIATIONS`).
        """
        total = torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64)
        count = mask.sum(dtype=torch.float64)
        if name in DEVIATIONS:
            distance = torch.where(mask, values.detach().double() - total / count.clamp(min=1), 0.0)
            squares = distance.square().sum()
            self._add_squares(name, total, count, squares)
        if name in self._sums:
            known_total, known_count = self._sums[name]
            total, count = known_total + total, known_count + count
        self._sums[name] = (total, count)

    @torch.no_grad()
    def max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds the elements of ``values`` that ``mask`` selects to the maximum ``name``, at least 0."""
        masked = torch.where(mask, values.detach(), 0.0).to(torch.float64)
        highest = masked.max() if masked.numel() else masked.new_zeros(())
        if name in self._maxima:
            highest = torch.maximum(highest, self._maxima[name])
        self._maxima[name] = highest

    def merge(self, totals: "MetricTotals") -> None:
        """Adds the totals of another instance."""
        for name, squares in totals._squares.items():  # noqa: SLF001 -- of the same class
            self._add_squares(name, *totals._sums[name], squares)  # noqa: SLF001
        for name, (total, count) in totals._sums.items():  # noqa: SLF001
            known_total, known_count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = known_total + total, known_count + count
        for name, highest in totals._maxima.items():  # noqa: SLF001
            maximum = self._maxima.get(name, highest)
            self._maxima[name] = torch.maximum(maximum, highest)

    def _add_squares(self, name: str, total: Tensor, count: Tensor, squares: Tensor) -> None:
        """Adds squared distances from the mean of further values, before their sum is added."""
        if name in self._squares:
            known_total, known_count = self._sums[name]
            apart = total / count.clamp(min=1) - known_total / known_count.clamp(min=1)
            between = apart.square() * count * known_count / (count + known_count).clamp(min=1)
            squares = self._squares[name] + squares + between
        self._squares[name] = squares

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Returns all values over all ranks. All ranks must have accumulated the same names."""
        names, tops = sorted(self._sums), sorted(self._maxima)
        means: dict[str, float] = {}
        maxima: list[float] = []
        if names:
            pairs = torch.stack([torch.stack(self._sums[name]).cpu() for name in names])
            totals, counts = ranks.sum(pairs).unbind(1)
            averages = totals / counts.clamp(min=1)
            means = dict(zip(names, averages.tolist(), strict=True))
            means |= self._deviations(names, averages, counts, ranks)
        if tops:
            maxima = ranks.max(torch.stack([self._maxima[name].cpu() for name in tops])).tolist()
        return {**means, **dict(zip(tops, maxima, strict=True))}

    def _deviations(
        self, names: Sequence[str], averages: Tensor, counts: Tensor, ranks: Ranks
    ) -> dict[str, float]:
        """Returns the standard deviations over all ranks, of the values as a whole population."""
        spread = [name for name in names if name in self._squares]
        if not spread:
            return {}
        spread_indices = [names.index(name) for name in spread]
        totals, size = torch.stack([torch.stack(self._sums[name]).cpu() for name in spread]).unbind(
            1
        )
        squares = torch.stack([self._squares[name].cpu() for name in spread])
        squares = squares + size * (totals / size.clamp(min=1) - averages[spread_indices]).square()
        variances = ranks.sum(squares) / counts[spread_indices].clamp(min=1)
        deviations = [DEVIATIONS[name] for name in spread]
        return dict(zip(deviations, variances.sqrt().tolist(), strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part that this rank holds of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(local: Tensor, tensor: Tensor, *, shape: Sequence[int] | None = None) -> Tensor:
    """Wraps ``local`` as this rank's part of a tensor that is sharded like ``tensor``.

    Returns ``local`` itself if ``tensor`` is not sharded.

    Args:
        local: This rank's part, on any device.
        tensor: Tensor that defines the sharding.
        shape: Shape of the whole; None for that of ``tensor``.
    """
    if not isinstance(tensor, DTensor):
        return local
    full_tensor = tensor if shape is None else torch.empty(shape, device="meta")
    # ``DTensor.from_local`` would move memory of the host to the mesh's devices.
    meta = TensorMeta(full_tensor.shape, full_tensor.stride(), local.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, meta)
    return DTensor(local, spec, requires_grad=False)
