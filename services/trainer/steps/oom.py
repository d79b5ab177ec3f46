"""Sizes that are known not to fit into memory, over the restarts of a worker of several processes.

Where one of these runs out of memory the others wait for it in the middle of an exchange, which cannot begin
anew. It notes the size and fails, and so all of them start again, as after any loss; then they divide what is
as large, or leave it out, before they begin.
"""

import gc
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from services.common.errors import InternalError
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.plan import Bounds, bounds_of, cut, num_tokens
from services.trainer.batch.samples import BatchFacts, Samples, idle_samples, pack_samples
from services.trainer.collectives import Ranks
from services.trainer.model.compiling import parts_of
from services.trainer.model.parallel import begin_micro_batch
from services.trainer.model.policy import Critic, Policy
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_REMEDY = (
    "lower trainer.tokens_per_micro_batch or rollout.max_response_tokens, or set "
    "trainer.activation_checkpointing, trainer.activation_offloading or trainer.context_parallel"
)


class OomLimitError(InternalError):
    """A micro-batch does not fit into memory, and what it is a part of cannot begin anew.

    Args:
        told: The micro-batch.
        why: What the device says.
        then: What follows.
    """

    reason = "OUT_OF_MEMORY"

    def __init__(
        self, told: str, why: str, *, then: str = "what it is a part of cannot go on without it"
    ) -> None:
        super().__init__(
            f"a micro-batch of {told} does not fit into memory: {why}; {then}; {_REMEDY}"
        )


class OomLimits:
    """What did not fit into memory so far.

    Args:
        bounds: The budget of a micro-batch, and what is known before.
        is_alone: Whether no other process waits for this one in a pass.
        note: File of this process for what it learns; None if nobody would read it.
        memory: What a note holds for.
        was_noted: Whether the bounds are of notes.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        is_alone: bool = True,
        note: Path | None = None,
        memory: str = "",
        was_noted: bool = False,
    ) -> None:
        self.bounds = self._first = bounds
        self.is_alone = is_alone
        self._note = note
        self._memory = memory
        self._was_noted = was_noted

    @property
    def has_learned(self) -> bool:
        """Whether anything did not fit since this process began."""
        return self.bounds != self._first

    def learn(self, bounds: Bounds) -> None:
        """Keep what did not fit."""
        self.bounds = self.bounds.within(bounds)

    def give_up(self, bounds: Bounds, told: str, why: str) -> None:
        """Note what did not fit, for the next start of all ranks; returns if there is nowhere to note it.

        Args:
            bounds: Of what did not fit.
            told: What that was.
            why: What the device says.

        Raises:
            OutgrownError: Once it is noted.
        """
        if self._note is None:
            return
        if self._was_noted:
            # Each start takes time, and a run may have few of them in a row.
            bounds = Bounds(max(1, bounds.max_tokens // 2), bounds.too_long)
        self.learn(bounds)
        self._note.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._note.with_suffix(".unfinished")
        sizes = {"max_tokens": self.bounds.max_tokens, "too_long": self.bounds.too_long}
        unfinished.write_text(json.dumps({"memory": self._memory, **sizes}), encoding="utf-8")
        unfinished.rename(self._note)
        whole = bounds.too_long < Bounds().too_long
        then = (
            "leave out what is as long" if whole else f"take at most {bounds.max_tokens:,} tokens"
        )
        raise OomLimitError(told, why, then=f"all ranks start again, and {then}")


def recall(settings: TrainerSettings, trainer: TrainerSpec, *, ranks: Ranks) -> OomLimits:
    """What the processes of a worker noted before they started again. All of them call it.

    Args:
        settings: Of this process; notes are in the run's folder.
        trainer: Notes hold while this stays as it is.
        ranks: Data-parallel ranks.
    """
    if trainer.world_size == 1:
        return OomLimits(budget_of(trainer))
    memory, bounds = trainer.model_dump_json(exclude={"steps"}), budget_of(trainer)
    folder = settings.state_directory / "outgrown"
    for file in folder.glob(f"{settings.worker_id}-*.json"):
        noted = json.loads(file.read_text(encoding="utf-8"))
        if noted["memory"] == memory:
            bounds = bounds.within(Bounds(noted["max_tokens"], noted["too_long"]))
    # Files may come late to a host, and ranks that share samples must plan the same.
    mine = torch.tensor([-bounds.max_tokens, -bounds.too_long])
    bounds = Bounds(*(-(ranks.everyone or ranks).max(mine)).tolist())
    was_noted = bounds != budget_of(trainer)
    if was_noted:
        known = {"max_tokens": bounds.max_tokens, "too_long": bounds.too_long}
        logger.warning("micro-batches are smaller than asked for", extra=known)
    note = folder / f"{settings.worker_id}-{settings.rank}.json"
    return OomLimits(bounds, is_alone=False, note=note, memory=memory, was_noted=was_noted)


def budget_of(trainer: TrainerSpec) -> Bounds:
    """The sizes that a run asks for."""
    return Bounds(max_tokens=trainer.tokens_per_micro_batch * trainer.context_parallel)


def oom_in(trainer: TrainerSpec) -> OomLimits:
    """What did not fit, as long as this process lives."""
    return OomLimits(budget_of(trainer), is_alone=trainer.world_size == 1)


Micros = tuple[tuple[int, ...], ...]
"""Micro-batches of an update, each of positions in a rank's sequences."""
_T = TypeVar("_T")


class _TooLargeError(Exception):
    """A micro-batch, by its number, does not fit."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


@contextmanager
def fitting(number: int) -> Iterator[None]:
    """Around the passes of a micro-batch, by its number in the update."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _TooLargeError(number, str(error).partition("\n")[0]) from None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a step left out."""

    num_sequences: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    """By key of their sample."""

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.num_sequences + other.num_sequences, {**self.tokens, **other.tokens})


class Fitting:
    """Begins updates of a policy or critic anew until all of their micro-batches fit.

    Args:
        module: Is trained.
        spec: The run.
        device: Of its passes.
        oom_limits: What did not fit before.
    """

    def __init__(
        self,
        module: Policy | Critic,
        spec: RunSpec,
        *,
        device: torch.device,
        oom_limits: OomLimits,
    ) -> None:
        self._module = module
        self._spec = spec
        self._device = device
        can_recover = not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")
        self._can_begin_anew = spec.trainer.world_size == 1 and can_recover
        self._oom_limits = oom_limits
        self.left_out: set[int] = set()
        """Positions of the sequences that the step leaves out."""
        self._num_divided = 0

    def begin(self, left_out: Collection[int] = ()) -> None:
        """A step begins, or a part of it, for which its plan leaves some sequences out."""
        self.left_out, self._num_divided = set(left_out), 0

    def metrics(self) -> dict[str, float]:
        """Of the step."""
        return {"divided_micro_batches": float(self._num_divided)}

    def left_out_of(self, samples: Samples, cohort: BatchFacts, ranks: Ranks) -> LeftOut:
        """What the step left out on all ranks, each of which calls it."""
        counts = torch.zeros(len(cohort.keys), 2, dtype=torch.int64)
        for position in self.left_out:
            tokens = num_tokens(samples.select([position]))
            counts[int(samples.rows[position])] += torch.tensor([1, tokens])
        counts = ranks.sum(counts)
        tokens_of = dict(zip(cohort.keys, counts[:, 1].tolist(), strict=True))
        return LeftOut(
            int(counts[:, 0].sum()), {k: count for k, count in tokens_of.items() if count}
        )

    def kept(self, samples: Samples) -> Samples:
        """Samples whose loss has no token that the step left out."""
        trains = torch.ones(len(samples.rows), dtype=torch.bool)
        trains[list(self.left_out)] = False
        mask = samples.tokens["loss_mask"] & samples.segments.spread(trains)
        return samples.with_tokens(loss_mask=mask)

    def fitted(
        self, attempt: Callable[[Micros], _T], samples: Samples, work: Micros, *, once: bool = False
    ) -> tuple[_T, Micros]:
        """Add up an update's gradients; returns what ``attempt`` does, and the work that it did.

        Args:
            attempt: Adds up the gradients of some micro-batches, each of them inside of :func:`fitting`.
            samples: What positions are of.
            work: The micro-batches, as planned.
            once: Whether other gradients are there already, which would be lost.

        Raises:
            OutgrownError: If one does not fit, and neither the update nor the process can begin anew.
        """
        work = self._within_budget(samples, work)
        while True:
            try:
                return attempt(work), work
            except _TooLargeError as error:
                number, why = error.number, str(error)
            # The error is forgotten by now, and with it all that its frames held.
            self._recover()
            told = _described(samples, work[number])
            if once or not self._can_begin_anew or not work[number]:
                if work[number]:
                    self._oom_limits.give_up(self._bounds(samples, work[number]), told, why)
                raise OomLimitError(told, why)
            logger.warning("micro-batch outgrew memory", extra={"holds": told, "why": why})
            work = self._smaller(samples, work, number)

    def _smaller(self, samples: Samples, work: Micros, number: int) -> Micros:
        micro = work[number]
        bounds = self._bounds(samples, micro)
        if bounds.max_tokens == Bounds().max_tokens:
            self.left_out.update(micro)
            # A step without any work still has its one update.
            return (*work[:number], *work[number + 1 :]) or ((),)
        self._num_divided += 1
        self._oom_limits.learn(bounds)
        # Others of its size would fail as well.
        return self._within_budget(samples, work)

    def _bounds(self, samples: Samples, micro: Sequence[int]) -> Bounds:
        return bounds_of(samples.select(micro), shares=self._spec.shares_prefixes)

    def _within_budget(self, samples: Samples, work: Micros) -> Micros:
        """Micro-batches that are known to be too large are divided before they fail."""
        if not self._oom_limits.has_learned:
            return work
        most, shares = self._oom_limits.bounds.max_tokens, self._spec.shares_prefixes
        parts = (
            part
            for micro in work
            if micro
            for part in cut(samples, micro, max_tokens=most, shares=shares)
        )
        return tuple(parts) or ((),)

    def _recover(self) -> None:
        """Forget the passes that broke, and all gradients of the update."""
        self._module.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(self._module, FSDPModule) and self._can_begin_anew:
            root: Any = self._module
            root.reset_iter_state()
            # It has gradients that wait for an update's last micro-batch: here it is, without a token.
            begin_micro_batch(root, is_last=True, spec=self._spec.trainer)
            scores = root(pack_samples(idle_samples(), self._device, shares_prefixes=False))
            torch.stack([each.sum() for each in parts_of(scores)]).sum().backward()
            self._module.zero_grad(set_to_none=True)


def _described(samples: Samples, micro: Sequence[int]) -> str:
    return f"{num_tokens(samples.select(micro)):,} tokens in {len(micro)} sequence(s)"
