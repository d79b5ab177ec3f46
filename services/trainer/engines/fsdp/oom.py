"""Recovery from GPU memory exhaustion (OOM), within a process and across restarts of a worker.

A single process divides a micro-batch that exceeds memory, or leaves out a single sequence, and repeats the
update. With several processes the other ranks wait in a collective that cannot be repeated. The rank then
writes the size to a file and fails, and all ranks restart, as after any failure. Afterwards they divide
micro-batches of this size, or leave out sequences of this length, before they compute them.
"""

import gc
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from services.common.host import write_atomically
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.batch.step_plan import Bounds, bounds_of, cut, num_tokens
from services.trainer.collectives import Ranks
from services.trainer.engines.base import Micros, OomLimitError
from services.trainer.engines.fsdp.compiling import parts_of
from services.trainer.engines.fsdp.parallel import begin_micro_batch
from services.trainer.model.policy import Critic, Policy
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)


class OomLimits:
    """Micro-batch sizes that are known to exceed memory.

    Args:
        bounds: Token budget of a micro-batch, and limits known from earlier starts.
        is_alone: True if no other process waits for this one in a forward or backward pass.
        file: File in which this process records new limits; None if no other process would read it.
        memory: Configuration that recorded limits are valid for.
        was_recorded: True if the bounds come from recorded limits.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        is_alone: bool = True,
        file: Path | None = None,
        memory: str = "",
        was_recorded: bool = False,
    ) -> None:
        self.bounds = self._first = bounds
        self.is_alone = is_alone
        self._file = file
        self._memory = memory
        self._was_recorded = was_recorded

    @property
    def was_lowered(self) -> bool:
        """True if a micro-batch has exceeded memory since this process started."""
        return self.bounds != self._first

    def lower(self, bounds: Bounds) -> None:
        """Lowers the limits to exclude a size that exceeded memory."""
        self.bounds = self.bounds.intersection(bounds)

    def record_and_raise(self, bounds: Bounds, size: str, cause: str) -> None:
        """Records a size that exceeded memory, for the next start of all ranks; returns if there is no file.

        Args:
            bounds: Limits that exclude the micro-batch.
            size: Size of the micro-batch, for the message.

        Raises:
            OomLimitError: After the size is recorded.
        """
        if self._file is None:
            return
        if self._was_recorded:
            # The limits were recorded before, so halve them: restarts take time, and a run allows few.
            bounds = Bounds(max(1, bounds.max_tokens // 2), bounds.too_long)
        self.lower(bounds)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        sizes = {"max_tokens": self.bounds.max_tokens, "too_long": self.bounds.too_long}
        write_atomically(self._file, json.dumps({"memory": self._memory, **sizes}))
        is_one_sequence = bounds.too_long < Bounds().too_long
        change = (
            "leave out sequences of this length"
            if is_one_sequence
            else f"limit micro-batches to {bounds.max_tokens:,} tokens"
        )
        raise OomLimitError(size, cause, consequence=f"all ranks restart and {change}")


def load_oom_limits(settings: TrainerSettings, trainer: TrainerSpec, *, ranks: Ranks) -> OomLimits:
    """Reads the limits that a worker's processes recorded before they restarted. All ranks must call it.

    Args:
        settings: Settings of this process; the records are in the run's folder.
        trainer: Recorded limits are valid only for the same specification, except for its ``steps``.
    """
    if trainer.world_size == 1:
        return OomLimits(budget_of(trainer))
    memory, bounds = trainer.model_dump_json(exclude={"steps"}), budget_of(trainer)
    folder = settings.state_directory / "oom"
    for file in folder.glob(f"{settings.worker_id}-*.json"):
        recorded = json.loads(file.read_text(encoding="utf-8"))
        if recorded["memory"] == memory:
            bounds = bounds.intersection(Bounds(recorded["max_tokens"], recorded["too_long"]))
    # Files may appear late on a host, but ranks that share samples must plan with the same limits.
    negated_limits = torch.tensor([-bounds.max_tokens, -bounds.too_long])
    bounds = Bounds(*(-(ranks.everyone or ranks).max(negated_limits)).tolist())
    was_recorded = bounds != budget_of(trainer)
    if was_recorded:
        limits = {"max_tokens": bounds.max_tokens, "too_long": bounds.too_long}
        logger.warning("micro-batches are smaller than configured", extra=limits)
    file = folder / f"{settings.worker_id}-{settings.rank}.json"
    return OomLimits(bounds, is_alone=False, file=file, memory=memory, was_recorded=was_recorded)


def budget_of(trainer: TrainerSpec) -> Bounds:
    """Returns the micro-batch limits that a run configures."""
    return Bounds(max_tokens=trainer.tokens_per_micro_batch * trainer.context_parallel)


def unrecorded_limits(trainer: TrainerSpec) -> OomLimits:
    """Returns limits that last as long as this process and are not recorded."""
    return OomLimits(budget_of(trainer), is_alone=trainer.world_size == 1)


_T = TypeVar("_T")


class _TooLargeError(Exception):
    """The micro-batch with this number in the update does not fit into memory."""

    def __init__(self, number: int, cause: str) -> None:
        super().__init__(cause)
        self.number = number


@contextmanager
def catch_oom(number: int) -> Iterator[None]:
    """Converts an out-of-memory error in the block to the error for this micro-batch of the update."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _TooLargeError(number, str(error).partition("\n")[0]) from None


class OomRetry:
    """Repeats updates of a policy or critic with smaller micro-batches until all of them fit into memory.

    Args:
        oom_limits: Micro-batch sizes that are known to exceed memory.
    """

    def __init__(
        self, module: Policy | Critic, spec: RunSpec, *, device: torch.device, oom_limits: OomLimits
    ) -> None:
        self._module = module
        self._spec = spec
        self._device = device
        can_recover = not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")
        self._can_repeat = spec.trainer.world_size == 1 and can_recover
        self._oom_limits = oom_limits
        self.left_out: set[int] = set()
        """Positions of the sequences that did not fit even alone."""
        self.num_divided = 0
        """Micro-batches that were divided."""

    def begin(self) -> None:
        """Starts the passes of an update, or of a part of it."""
        self.left_out, self.num_divided = set(), 0

    def run_with_retry(
        self, attempt: Callable[[Micros], _T], samples: Samples, work: Micros, *, once: bool = False
    ) -> tuple[_T, Micros]:
        """Accumulates an update's gradients; returns ``attempt``'s result and the micro-batches that it used.

        Args:
            attempt: Accumulates the gradients of micro-batches, each inside :func:`catch_oom`.
            once: True if other gradients are accumulated already, which a repetition would lose.

        Raises:
            OomLimitError: If a micro-batch does not fit and the update cannot be repeated.
        """
        work = self._within_budget(samples, work)
        while True:
            try:
                return attempt(work), work
            except _TooLargeError as error:
                number, cause = error.number, str(error)
            # Here the error is out of scope, and so are the tensors that its frames held.
            self._recover()
            size = _described(samples, work[number])
            if once or not self._can_repeat or not work[number]:
                if work[number]:
                    self._oom_limits.record_and_raise(
                        self._bounds(samples, work[number]), size, cause
                    )
                raise OomLimitError(size, cause)
            logger.warning("micro-batch exceeded memory", extra={"size": size, "cause": cause})
            work = self._divided(samples, work, number)

    def _divided(self, samples: Samples, work: Micros, number: int) -> Micros:
        micro = work[number]
        bounds = self._bounds(samples, micro)
        if bounds.max_tokens == Bounds().max_tokens:
            self.left_out.update(micro)
            # A step without any work still has one update.
            return (*work[:number], *work[number + 1 :]) or ((),)
        self.num_divided += 1
        self._oom_limits.lower(bounds)
        # Other micro-batches of this size would fail as well.
        return self._within_budget(samples, work)

    def _bounds(self, samples: Samples, micro: Sequence[int]) -> Bounds:
        return bounds_of(samples.select(micro), shares=self._spec.shares_prefixes)

    def _within_budget(self, samples: Samples, work: Micros) -> Micros:
        """Divides micro-batches that are known to be too large before they fail."""
        if not self._oom_limits.was_lowered:
            return work
        max_tokens, shares = self._oom_limits.bounds.max_tokens, self._spec.shares_prefixes
        packs = (
            pack
            for micro in work
            if micro
            for pack in cut(samples, micro, max_tokens=max_tokens, shares=shares)
        )
        return tuple(packs) or ((),)

    def _recover(self) -> None:
        """Releases the memory of the failed pass and drops all gradients of the update."""
        self._module.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        if isinstance(self._module, FSDPModule) and self._can_repeat:
            root: Any = self._module
            root.reset_iter_state()
            # FSDP keeps gradients until an update's last micro-batch, so a micro-batch without work runs as
            # the last one.
            begin_micro_batch(root, is_last=True, spec=self._spec.trainer)
            scores = root(pack_samples(idle_samples(), self._device, shares_prefixes=False))
            torch.stack([half.sum() for half in parts_of(scores)]).sum().backward()
            self._module.zero_grad(set_to_none=True)


def _described(samples: Samples, micro: Sequence[int]) -> str:
    return f"{num_tokens(samples.select(micro)):,} tokens in {len(micro)} sequence(s)"
