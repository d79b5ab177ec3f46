"""Tests that the figures of layouts that were only computed are those of today's memory plan."""

import json
import subprocess
import sys

import pytest

from tests.helpers.cli import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results" / "trainer-layouts.json"
DOCUMENT = REPOSITORY / "docs" / "stages.md"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    file = tmp_path_factory.mktemp("layouts") / "layouts.json"
    command = (sys.executable, "-m", "bench.trainer.layouts", "--out", str(file))
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=600)
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_stored_figures_are_those_of_the_plan(planned):
    """``python -m bench.trainer.layouts`` writes them again."""
    assert json.loads(RESULTS.read_text(encoding="utf-8")) == planned


def test_the_document_has_a_row_for_each_layout(planned):
    rows = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for layout in planned["layouts"]:
        parts = layout["parts_gb"]
        state = parts["weights, float32"] + parts["optimizer"]
        gathered = sum(
            parts[name]
            for name in ("gradients", "gradients of a pass", "weights gathered for a forward pass")
        )
        cells = (
            layout["pipeline_parallel"],
            layout.get("tensor_parallel", 1),
            layout["expert_parallel"],
            *(
                f"{size:.1f} GB"
                for size in (layout["memory_gb"], state, gathered, parts["activations"])
            ),
            layout["micro_batches"],
            f"{100 * layout['bubble']:.1f} %",
            f"{layout['to_experts_gb_per_layer']:.2f} GB",
        )
        assert f"| {' | '.join(map(str, cells))} |" in rows


def test_the_document_has_the_plan_of_what_was_measured_on_two_gpus(planned):
    sizes = planned["two_gpus_gib"]
    cells = (f"{sizes[arm]:.1f} GiB" for arm in ("stages", "fsdp", "fsdp, compiled"))
    assert f"| the same, planned | {' | '.join(cells)} |" in DOCUMENT.read_text(encoding="utf-8")
