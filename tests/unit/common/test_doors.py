"""Tests of doors, with packages that are installed in the test."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common import doors
from services.common.doors import OWN_PACKAGE, DoorError
from services.common.launchers import LAUNCHERS
from services.common.runspec import engines, rollout, trackers, trainer, weight_modes, workers
from services.common.runspec.data import SOURCES
from services.common.runspec.engines import EngineKind
from services.common.runspec.loader import parse_spec
from services.common.runspec.rollout import AGENTS, REWARDS, SANDBOXES, WORKFLOWS
from services.common.runspec.worker_kinds import worker_names
from tests.helpers.packages import install, install_from
from tests.helpers.pages import example
from tests.helpers.specs import changed

KINDS = """
from services.common.launchers import LauncherKind
from services.common.runspec.engines import EngineKind
from services.common.runspec.rollout import EnvironmentKind
from services.common.runspec.trackers import TrackerKind
from services.common.runspec.engines import TrainEngineKind
from services.common.runspec.trainer import OptimizerKind
from services.common.runspec.weight_modes import Transport, WeightMode
from services.common.runspec.workers import WorkerKind

ENGINE = EngineKind(adapter="theirs:build", arguments=frozenset())
TRAIN_ENGINE = TrainEngineKind(build="theirs:build")
TRANSPORT = Transport(opener="theirs:open", least_rate=1e6)
MODE = WeightMode(receiver="theirs:receive")
TRACKER = TrackerKind("json", "theirs:open_run")
LAUNCHER = LauncherKind(opener="theirs:open_workers")
OPTIMIZER = OptimizerKind(make="theirs:make")
ROLE = WorkerKind(tasks=("theirs",), serve="theirs:serve", adds=("their_rewards",))
ENVIRONMENT = EnvironmentKind(title="Theirs", opens="theirs:open_server", passes_sandbox=True)
"""
DOORS = {
    "rollout_engines": (engines.ENGINES, "ENGINE", {"rollout": {"engine": "theirs"}}),
    "train_engines": (engines.TRAIN_ENGINES, "TRAIN_ENGINE", {"trainer": {"engine": "theirs"}}),
    "weight_transports": (
        weight_modes.TRANSPORTS,
        "TRANSPORT",
        {"weight_sync": {"backend": "theirs"}},
    ),
    "launchers": (LAUNCHERS, "LAUNCHER", {}),
    "optimizers": (trainer.OPTIMIZERS, "OPTIMIZER", {"trainer": {"optimizer": {"kind": "theirs"}}}),
    "worker_roles": (
        workers.WORKERS,
        "ROLE",
        {
            "topology": {
                "task_groups": ["train", "theirs", "generate"],
                "ratios": [0.25, 0.25, 0.5],
                "gpus": 4,
            }
        },
    ),
    "weight_modes": (weight_modes.MODES, "MODE", {"weight_sync": {"mode": "theirs"}}),
    "trackers": (trackers.TRACKERS, "TRACKER", {"trackers": [{"kind": "theirs"}]}),
    "environments": (
        rollout.ENVIRONMENTS,
        "ENVIRONMENT",
        {
            "rollout": {
                "workflow": "environment",
                "workflow_arguments": {"environment": "theirs+http://games:80"},
                "sandbox": {"kind": "bubblewrap"},
            }
        },
    ),
}
REFERENCES = {
    "rewards": (REWARDS, {"rollout": {"rewards": [{"name": "theirs"}]}}),
    "workflows": (WORKFLOWS, {"rollout": {"workflow": "theirs"}}),
    "agents": (AGENTS, {}),
    "prompt_sources": (SOURCES, {"data": {"train": {"source": "theirs", "path": "any"}}}),
    "sandboxes": (
        SANDBOXES,
        {
            "rollout": {
                "workflow": "agent",
                "workflow_arguments": {"agent": "task:play"},
                "sandbox": {"kind": "theirs", "image": "debian"},
            }
        },
    ),
}


@pytest.mark.parametrize("group", DOORS)
def test_a_package_adds_a_kind_to_every_door(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, attribute, keys = DOORS[group]
    assert "theirs" not in door
    (tmp_path / f"kinds_{group}.py").write_text(KINDS)
    reference = f"kinds_{group}:{attribute}"
    install(tmp_path, monkeypatch, entry_points={f"slipstream.{group}": {"theirs": reference}})
    assert list(door)[-1] == "theirs"
    assert door.provider("theirs").package == "slipstream-test-package"
    parse_spec(changed(**keys))


@pytest.mark.parametrize("group", REFERENCES)
def test_a_package_adds_a_reference_to_every_door(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, keys = REFERENCES[group]
    install(tmp_path, monkeypatch, entry_points={f"slipstream.{group}": {"theirs": "theirs:make"}})
    assert door["theirs"] == "theirs:make"  # module ``theirs`` does not exist: it was not imported
    parse_spec(changed(**keys))


def test_the_reward_of_the_page_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example("adding.md", "brevity.py", tmp_path)
    install_from(example("adding.md", "brevity.toml", tmp_path), monkeypatch)
    assert REWARDS["brevity"] == "brevity:brevity"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("import torch_that_is_not_there", "ModuleNotFoundError"),
        ("KIND = 'text'", "is str"),
        ("", "AttributeError"),
    ],
)
def test_a_broken_package_is_named_and_stops_no_other_run(
    text: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"broken_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(text)
    install(
        tmp_path,
        monkeypatch,
        entry_points={"slipstream.rollout_engines": {"broken": f"{module}:KIND"}},
    )
    assert "broken" not in list(engines.ENGINES)
    assert engines.ENGINES["torch"].reports_masks
    with pytest.raises(DoorError) as error:
        engines.engine_kind("broken")
    for words in ("'broken'", "slipstream-test-package 1.2", cause):
        assert words in str(error.value)
    with pytest.raises(Exception, match="slipstream-test-package"):
        parse_spec(changed(rollout={"engine": "broken"}))


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("optimizers", {"trainer": {"optimizer": {"kind": "broken"}}}),
        ("worker_roles", DOORS["worker_roles"][2]),
    ],
)
def test_a_broken_optimizer_or_role_stops_runs_that_name_it_only(
    group: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_part.py").write_text("raise RuntimeError('no driver')")
    names = dict.fromkeys(("broken", "theirs"), "broken_part:KIND")
    install(tmp_path, monkeypatch, entry_points={f"slipstream.{group}": names})
    assert {role for role, _ in worker_names(parse_spec(changed()))} == {"trainer", "rollout"}
    with pytest.raises(Exception, match=r"slipstream-test-package 1\.2.*no driver"):
        parse_spec(changed(**keys))


def test_a_run_without_task_groups_imports_no_role_of_an_extra() -> None:
    code = (
        "import sys\n"
        "from services.common.runspec.worker_kinds import worker_names\n"
        "from tests.helpers.specs import spec_with\n"
        "worker_names(spec_with())\n"
        "print([name for name in sys.modules if name.startswith('services.extras')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_name_of_slipstream_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        entry_points={"slipstream.rewards": {"exact_match": "theirs:always_one"}},
    )
    assert REWARDS["exact_match"].startswith("services.")
    assert REWARDS.provider("exact_match").package == OWN_PACKAGE


def test_two_packages_with_one_name_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first-package", "second-package"):
        (tmp_path / name).mkdir()
        install(
            tmp_path / name,
            monkeypatch,
            name=name,
            entry_points={"slipstream.rewards": {"theirs": f"{name[:5]}:reward"}},
        )
    with pytest.raises(DoorError, match=r"first-package 1\.2.*second-package 1\.2"):
        REWARDS["theirs"]


def test_what_slipstream_offers_can_be_loaded() -> None:
    for door in (
        engines.ENGINES,
        engines.TRAIN_ENGINES,
        weight_modes.TRANSPORTS,
        weight_modes.MODES,
        trackers.TRACKERS,
        trainer.OPTIMIZERS,
        workers.WORKERS,
    ):
        assert [name for name in door if door[name]] == door.own_names()
    assert isinstance(engines.ENGINES["vllm"], EngineKind)


def test_an_installation_without_a_checkout_reads_its_own_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_CHECKOUT", tmp_path / "pyproject.toml")
    install(
        tmp_path,
        monkeypatch,
        name=OWN_PACKAGE,
        entry_points={"slipstream.rewards": {"exact_match": "services.somewhere:else_"}},
    )
    assert REWARDS["exact_match"] == "services.somewhere:else_"


def test_workers_are_placed_in_the_same_order_from_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel lists the entry points of a group in alphabetical order, a checkout as they are written."""
    topology = {
        "task_groups": ["train", "logp", "generate"],
        "ratios": [0.5, 0.25, 0.25],
        "gpus": 4,
    }
    spec = parse_spec(changed(topology=topology, trainer={"world_size": 2, "updates_per_step": 2}))
    names = worker_names(spec)
    assert [role for role, _ in names] == ["trainer", "rollout", "logp"]
    groups = dict(doors.providers())
    groups["slipstream.worker_roles"] = dict(sorted(groups["slipstream.worker_roles"].items()))
    monkeypatch.setattr(doors, "providers", lambda: groups)
    assert worker_names(spec) == names
