"""Tests of the check of which runs' files a specification may name."""

from functools import partial
from pathlib import Path

import pytest

from services.common.errors import NotFoundError
from services.common.runspec.loader import SpecError
from services.common.security.confinement import CodePolicy
from services.controller.manager.spec_policy import SpecPolicy
from services.extras.kubernetes.pod_rules import installed_pod_problems
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


async def test_what_the_launcher_cannot_place_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "topology").write_text("bundled")
    launcher_problems = partial(installed_pod_problems, tmp_path)
    policy = SpecPolicy(CodePolicy(), find, saved_at, launcher_problems)
    large = spec_with(trainer={"world_size": 8})  # and two rollouts, in one pod
    with pytest.raises(SpecError) as refused:
        await policy.check_for("default", large, "operator")
    (problem,) = refused.value.problems
    assert problem.startswith("trainer.world_size")
    policy.check(large, "operator", base=large)  # a change of other keys
    (tmp_path / "topology").write_text("separate")
    await policy.check_for("default", large, "operator")
