"""Sizes that are known not to fit into memory, over the restarts of a worker of several processes.

Where one of these runs out of memory the others wait for it in the middle of an exchange, which cannot begin
anew. It notes the size and fails, and so all of them start again, as after any loss; then they divide what is
as large, or leave it out, before they begin.
"""

import json
import logging
from pathlib import Path

import torch

from services.common.errors import InternalError
from services.common.spec.trainer import TrainerSpec
from services.trainer.batch.plan import Bounds
from services.trainer.collectives import Ranks
from services.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_REMEDY = (
    "lower trainer.tokens_per_micro_batch or rollout.max_response_tokens, or set "
    "trainer.activation_checkpointing, trainer.activation_offloading or trainer.context_parallel"
)


class OutgrownError(InternalError):
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


class Outgrown:
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
        raise OutgrownError(told, why, then=f"all ranks start again, and {then}")


def recall(settings: TrainerSettings, trainer: TrainerSpec, *, ranks: Ranks) -> Outgrown:
    """What the processes of a worker noted before they started again. All of them call it.

    Args:
        settings: Of this process; notes are in the run's folder.
        trainer: Notes hold while this stays as it is.
        ranks: Data-parallel ranks.
    """
    if trainer.world_size == 1:
        return Outgrown(budget_of(trainer))
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
    return Outgrown(bounds, is_alone=False, note=note, memory=memory, was_noted=was_noted)


def budget_of(trainer: TrainerSpec) -> Bounds:
    """The sizes that a run asks for."""
    return Bounds(max_tokens=trainer.tokens_per_micro_batch * trainer.context_parallel)


def outgrown_in(trainer: TrainerSpec) -> Outgrown:
    """What did not fit, as long as this process lives."""
    return Outgrown(budget_of(trainer), is_alone=trainer.world_size == 1)
