"""What a group that failed means for its prompt, and for its run."""

import logging

from services.controller.client import GroupFailure
from services.controller.rules.groups import Group
from services.controller.rules.ledger import Ledger
from services.controller.rules.prompts import PromptOrder
from services.controller.run.handout import GenerationError, Handout
from services.controller.run.requests import CurrentSpec
from services.controller.store.records import Note

logger = logging.getLogger(__name__)


class Failures:
    """Failures of prompts, and how many came one after the other.

    Args:
        spec: The run's specification, as it is now.
        ledger: States of all issued groups.
        order: Order of the prompts.
        handout: Hears of the first one.
    """

    def __init__(
        self, spec: CurrentSpec, *, ledger: Ledger, order: PromptOrder, handout: Handout
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._order = order
        self._handout = handout
        self._in_a_row: list[str] = []

    def blame(self, group: Group, failure: GroupFailure) -> None:
        """Count a failure of the prompt, which is tried again or quarantined."""
        logger.warning(
            "group failed",
            extra={"group": failure.group_id, "reason": failure.reason, "why": failure.message},
        )
        why = f"{self._order.mixture.name(group.row)}: {failure.reason}: {failure.message}"
        self._in_a_row.append(why)
        self._handout.first_failure = self._handout.first_failure or why
        if not failure.retryable:
            self._ledger.quarantine(group, failure.reason)
            self._order.quarantine(group.row)
        elif not self._ledger.retry(group, failure.reason):
            self._order.quarantine(group.row)

    def end_the_row(self) -> None:
        """A group succeeded."""
        self._in_a_row.clear()

    def check_that_some_succeed(self) -> None:
        """Raise a GenerationError if far more groups than a batch has failed one after the other.

        All that run may fail at once with an environment or a service that they share; they are tried again.
        """
        spec = self._spec.now
        limit = (4 + spec.algorithm.max_staleness) * spec.trainer.prompts_per_step
        if len(self._in_a_row) >= limit:
            raise GenerationError(
                f"{limit} groups failed in a row, the first one of {self._in_a_row[0]}"
            )


def failed(failure: GroupFailure) -> Note:
    """The event that tells of a failure."""
    return Note(
        "GroupFailed",
        f"{failure.group_id}: {failure.reason}: {failure.message}",
        {"group_id": failure.group_id, "reason": failure.reason},
    )
