"""Tests of the check of which runs' files a specification may name."""

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


async def test_a_link_does_not_hide_the_run_whose_folder_it_names(tmp_path: Path) -> None:
    (tmp_path / RUN / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / RUN)
    linked = spec_with(
        trainer={"checkpoint": {"start_from": str(tmp_path / "mine" / "checkpoints" / "step-1")}},
        data={"train": {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}},
    )
    policy = SpecPolicy(CodePolicy(roots=(tmp_path,)), find, saved_at)
    with pytest.raises(NotFoundError):
        await policy.check_for("default", linked, "admin")
