"""What users ask of runs that train."""

import json

import pytest

from services.common.errors import FailedPreconditionError
from services.common.spec.loader import parse_spec
from services.controller.rules.run_state import RunEvent
from services.controller.store.records import Submission
from services.controller.store.runs import InvalidTransitionError, RunStore
from tests.helpers.rest import SPEC


async def test_an_evaluation_needs_a_run_that_trains_and_prompts_to_evaluate_with(
    manager, database
):
    run, _ = await manager.create(Submission(spec=parse_spec(json.dumps(SPEC))))
    with pytest.raises(InvalidTransitionError):
        await manager.drivers.evaluate(run)
    running, _ = RunStore(database).apply(run.run_id, RunEvent.READY, reason="Test")
    with pytest.raises(FailedPreconditionError, match=r"data\.heldout"):
        await manager.drivers.evaluate(running)
