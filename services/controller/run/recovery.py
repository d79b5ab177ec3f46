"""Where a run stands, rebuilt from the database, its workers and the transferqueue.

The same path serves a new run, a run whose worker died, and a run whose controller died:

    the trainer has fewer steps than the database   -> rewind: later steps and all in flight are made anew
    a group is stored                               -> ready, whatever the ledger last knew of it
    a group is with a rollout that lives            -> handed to it again, which it takes as a repetition
    a group is with a rollout that died             -> generated again
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from services.common.clock import Clock
from services.common.errors import FailedPreconditionError
from services.common.fields import partition_id
from services.common.spec.run import RunSpec
from services.controller.run.assembly import (
    Assembly,
    create_partitions,
    drop_partitions,
    training_fields,
)
from services.controller.run.evaluation import Evaluator
from services.controller.run.generation import Generation
from services.controller.run.handout import Handout
from services.controller.run.journal import Journal, Recovered
from services.controller.run.ledger import Ledger
from services.controller.run.progress import Progress
from services.controller.run.prompts import PromptOrder
from services.controller.run.scores import Evaluation
from services.controller.run.stored import StoredGroups
from services.controller.run.validation import BegunEvaluation
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A run that can go on."""

    parts: Assembly
    ledger: Ledger
    generation: Generation
    evaluator: Evaluator
    progress: Progress
    begun: int | None
    """The step that the trainer was asked for and that is not committed."""
    step: int
    """The last committed step."""
    version_offset: int
    """What weight versions are above their steps."""
    published: int
    """The newest published weight version; -1 before the first."""

    def summary(self) -> dict[str, object]:
        """What the run has achieved so far."""
        return self.progress.summary(self.ledger.counts(), self.ledger.reasons())


async def restore(
    run_id: str,
    spec: RunSpec,
    parts: Assembly,
    *,
    journal: Journal,
    queue: TransferQueueClient,
    clock: Clock,
    lost_workers: Collection[str],
    on_evaluation: Callable[[BegunEvaluation | Evaluation], Awaitable[None]],
) -> Restored:
    """Rebuild everything that the loop keeps in memory.

    Args:
        run_id: The run.
        spec: Its specification.
        parts: Its workers.
        journal: Its record.
        queue: Holds its samples.
        clock: For stalls.
        lost_workers: Rollouts that died since the loop was entered before.
        on_evaluation: Hears of evaluations that begin and end.

    Raises:
        FailedPreconditionError: If trainer and database are not of the same run.
    """
    recovered = await journal.load()
    if parts.trained < recovered.step:
        recovered = await _rewind(run_id, spec, parts, recovered, journal=journal, queue=queue)
    _check_same_run(parts, recovered)
    ledger = Ledger.restore(
        recovered.ledger, max_attempts=spec.rollout.max_attempts, now=clock.monotonic()
    )
    progress = Progress(spec.algorithm.max_staleness)
    progress.restore(recovered.run.summary, steps=recovered.step, syncs_ms=recovered.syncs_ms)
    order = PromptOrder(
        parts.num_train_rows,
        seed=spec.seed,
        shuffle=spec.data.shuffle,
        position=recovered.ledger.position,
        quarantined=recovered.quarantined_rows,
        returned=recovered.ledger.returned,
    )
    stored = StoredGroups(
        queue,
        partition_id(run_id, "train"),
        group_size=spec.samples_per_group,
        required_fields=training_fields(spec),
    )
    generation = Generation(
        spec,
        ledger=ledger,
        order=order,
        journal=journal,
        replicas=parts.replicas,
        stored=stored,
        handout=Handout(
            spec,
            run_id,
            ledger=ledger,
            order=order,
            journal=journal,
            replicas=parts.replicas,
            stored=stored,
            clock=clock,
        ),
    )
    evaluator = Evaluator(spec, run_id, parts, queue=queue, tell=on_evaluation)
    await evaluator.restore(recovered.evaluated, recovered.begun_evaluation)
    await generation.restore(lost_workers, is_queue_empty=parts.is_queue_empty)
    return Restored(
        parts=parts,
        ledger=ledger,
        generation=generation,
        evaluator=evaluator,
        progress=progress,
        begun=recovered.begun.step if recovered.begun is not None else None,
        step=recovered.step,
        version_offset=recovered.version_offset,
        published=recovered.run.weight_version,
    )


async def _rewind(
    run_id: str,
    spec: RunSpec,
    parts: Assembly,
    recovered: Recovered,
    *,
    journal: Journal,
    queue: TransferQueueClient,
) -> Recovered:
    """Go back to the step that the trainer has; everything made by later weights is made anew."""
    step = parts.trained
    await parts.replicas.cancel([group.group_id for group in recovered.ledger.groups])
    await drop_partitions(queue, run_id)
    await create_partitions(queue, run_id, spec)
    message = f"the trainer lost what it trained after step {step}; training goes on from there"
    await journal.rewind(step, version=recovered.run.weight_version + 1, message=message)
    logger.warning("run rewound", extra={"run": run_id, "step": step})
    return await journal.load()


def _check_same_run(parts: Assembly, recovered: Recovered) -> None:
    known = recovered.step if recovered.begun is None else recovered.begun.step
    if parts.trained > known:
        raise FailedPreconditionError(
            f"the trainer has trained step {parts.trained}, but the database knows of {known} only: they are "
            "not of the same run, or the database is an older copy"
        )
