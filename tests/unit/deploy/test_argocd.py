"""Health of RLRun objects, as Argo CD computes it from the script that the documentation installs."""

from pathlib import Path
from typing import Any

import pytest
from lupa import LuaRuntime

SCRIPT = Path(__file__).parents[3] / "deploy" / "argocd" / "rlrun-health.lua"


def health(status: dict[str, Any] | None, generation: int = 1) -> tuple[str, str]:
    """Returns the status and the message of an object's health."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    body: dict[str, Any] = {"metadata": {"name": "sort4", "generation": generation}}
    if status is not None:
        body["status"] = {"observedGeneration": 1, **status}
    lua.globals().obj = lua.table_from(body, recursive=True)
    result = lua.execute(SCRIPT.read_text())
    return result.status, result.message


def condition(type_: str, status: str) -> dict[str, str]:
    return {"type": type_, "status": status, "reason": "Why", "message": f"why {type_}"}


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        *((phase, "Progressing") for phase in ("Queued", "Starting", "Recovering", "Cancelling")),
        *((phase, "Healthy") for phase in ("Running", "Succeeded")),
        *((phase, "Suspended") for phase in ("Paused", "Suspended", "Cancelled")),
        *((phase, "Degraded") for phase in ("Failed", "Rejected", "Lost")),
        ("Deleted", "Missing"),
    ],
)
def test_each_phase_has_a_health(phase: str, expected: str) -> None:
    assert health({"phase": phase, "message": "m"}) == (expected, "m")


def test_an_object_that_no_controller_has_seen_is_progressing() -> None:
    assert health(None)[0] == "Progressing"
    assert health({"phase": "Succeeded"}, generation=2)[0] == "Progressing"


def test_a_refused_edit_and_a_run_that_trains_nothing_are_reported() -> None:
    refused = {"phase": "Running", "conditions": [condition("SpecRejected", "True")]}
    assert health(refused) == ("Degraded", "why SpecRejected")
    still = {"phase": "Running", "conditions": [condition("Progressing", "False")]}
    assert health(still) == ("Progressing", "why Progressing")
    trains = {"phase": "Running", "conditions": [condition("Progressing", "True")]}
    assert health(trains)[0] == "Healthy"
