"""Has groups of a synchronous step trained as they finish, while its others are still generated.

a group is finished    -> the trainer adds its gradients to those of the step
the last one is there  -> the step is trained as ever, for which little is left to do
"""

import time
from dataclasses import dataclass

from services.controller.rules.groups import Group, GroupState
from services.controller.rules.ledger import Ledger
from services.controller.run.generation import Generation
from services.controller.run.waits import Waits
from services.trainer.client import TrainerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyGroups:
    """Of one run. Nothing is written down: a trainer that lost them trains the whole step."""

    trainer: TrainerClient
    ledger: Ledger
    generation: Generation
    waits: Waits
    """Hears how long the trainer was not idle."""

    async def accumulate(self, step: int, *, weight_version: int, timeout_s: float) -> None:
        """Send the groups of a step as they finish, until this is cancelled.

        All that are there when the trainer is free go together, so that it works in few large pieces.
        """
        sent: set[tuple[str, int]] = set()

        def due() -> list[Group]:
            ready = self.ledger.in_state(GroupState.READY)
            gate = self.generation.gate
            if len(ready) >= gate.groups_per_step:
                return []
            return [
                group
                for group in ready
                if (group.group_id, group.attempt) not in sent
                and not gate.is_stale(group.oldest_version, trainer_version=weight_version)
            ]

        while True:
            await self.generation.until(lambda: bool(due()))
            groups, begin = due(), time.perf_counter()
            sent |= {(group.group_id, group.attempt) for group in groups}
            try:
                await self.trainer.accumulate(
                    step,
                    self.generation.stored.meta(groups),
                    weight_version=weight_version,
                    timeout_s=timeout_s,
                )
            finally:
                self.waits.worked(time.perf_counter() - begin)
