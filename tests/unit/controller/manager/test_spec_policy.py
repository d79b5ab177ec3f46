"""Runs whose files a specification may name."""

from pathlib import Path

import pytest

from services.common.errors import NotFoundError
from services.common.security.confinement import CodePolicy
from services.controller.manager.spec_policy import SpecPolicy
from tests.helpers.specs import spec_with

RUN = "run_" + "0" * 32
STARTING = spec_with(
    trainer={"checkpoint": {"start_from": f"/data/{RUN}/checkpoints/step-1"}},
    data={"train": {"source": "jsonl", "path": "/data/rows.jsonl"}},
)


async def find(run_id):
    raise NotFoundError("no such run", run_id=run_id)


async def saved_at(paths):
    return ()


async def test_a_single_user_may_start_from_a_run_of_another_state_directory() -> None:
    await SpecPolicy(CodePolicy(), find, saved_at).check_for("default", STARTING, "admin")


async def test_an_unknown_run_does_not_exist_for_a_project() -> None:
    policy = SpecPolicy(CodePolicy(roots=(Path("/data"),)), find, saved_at)
    with pytest.raises(NotFoundError):
        await policy.check_for("default", STARTING, "admin")
