"""Figures of the documentation are those of the results that it names."""

import json
import re
from collections import defaultdict
from typing import Any

import pytest

from tests.helpers.pages import ROOT
from tests.unit.test_repository import DOCUMENTS, named

RESULTS = ROOT / "bench" / "results"


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def section(page: str, after: str) -> str:
    """A document from some words on to its next heading, with single spaces."""
    text = (ROOT / page).read_text().partition(after)[2]
    assert text, f"{page} has no {after!r}"
    return re.sub(r"\s+", " ", re.split(r"^#", text, flags=re.MULTILINE)[0])


def rows(page: str, head: str) -> list[list[str]]:
    """Cells of the table below a head, without emphasis."""
    lines = (ROOT / page).read_text().partition(head)[2].splitlines()[2:]
    table = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), None)]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table]


def test_the_speed_of_the_whole():
    found = result("e2e-geometric.json")
    # What has no settings is a part of another one.
    runs = [found["variants"]["lag 4"]] + [
        run for run in found["cut_off"] if run["variant"].startswith("lag 4") and "settings" in run
    ]
    said = section("README.md", "**Speed of the whole.**")
    speeds = sorted(run["samples_per_s"] for run in runs)
    factors = sorted(run["over_synchronous"] for run in runs)
    peers = sorted(run["over_peer"] for run in runs)
    assert f"{speeds[0]:.0f} to {speeds[-1]:.0f} samples a second" in said
    assert f"{factors[0]:.1f} to {factors[-1]:.1f} times synchronous" in said
    assert f"{peers[0]:.1f} to {peers[-1]:.1f} times TRL" in said


def test_what_each_algorithm_learns():
    seeds: dict[str, dict[int, Any]] = defaultdict(dict)
    for run in result("learning.json"):
        seeds[run["variant"]][run["seed"]] = run
    table = rows("docs/algorithms.md", "| variant | seed 0 | seed 1 | seed 2 | lag | bound |")
    assert {row[0] for row in table} == set(seeds)
    for variant, *cells, lag, _ in table:
        for seed, cell in enumerate(cells):
            run = seeds[variant].get(seed)
            expected = "not run" if run is None else f"{run['greedy']:.2f} / {run['sampled']:.2f}"
            assert cell == expected.replace("0.", "."), f"{variant}, seed {seed}"
        lags = [run["staleness_mean"] for run in seeds[variant].values()]
        assert float(lag) == pytest.approx(sum(lags) / len(lags), abs=0.0051), variant


def test_the_trainer():
    said = section("docs/algorithms.md", "`bench/results/trainer.json` holds the last figures")
    one, two = result("trainer.json")
    assert f"{round(one['tokens_per_s'], -2):,.0f} tokens/s" in said
    assert f"MFU of {one['mfu']:.1%}".replace("%", " %") in said
    assert f"{one['speedup_over_padded']:.1f} times a padded step" in said
    assert f"{round(two['tokens_per_s'], -2):,.0f} with" in said
    assert f"{two['speedup_over_one_rank']:.2f} times one" in said
    most, mean = (one[f"logprob_packed_vs_float32_{which}"] for which in ("max", "mean"))
    assert f"({most:.2f} at most, {mean:.2f} on average)" in said


def test_shared_prefixes():
    shapes = result("trainer-prefixes.json")["shapes"]
    said = section("docs/algorithms.md", "`shared_token_fraction` says what")
    long_prompts, long_responses, nothing = (shape["speedup"] for shape in shapes.values())
    assert f"trains {long_prompts:.2f} times as many samples" in said
    assert f"{long_responses:.2f} times as many, and with nothing to share, {nothing:.2f}" in said


def test_shared_prefixes_beside_trl():
    shapes = result("trainer-peer.json")["shapes"].values()
    said = section("docs/algorithms.md", "`python -m bench.trainer.peer`")
    assert all(shape["agreement"]["agrees"] for shape in shapes)
    prompts, responses = shapes
    assert f"step takes {prompts['ours']['step_s']:.2f} s" in said
    assert f"TRL's takes {prompts['trl']['step_s']:.2f}" in said
    both = f"{responses['ours']['step_s']:.2f} where it takes {responses['trl']['step_s']:.2f}"
    assert both in said
    packed = [f"{shape['speedup_over_packed']:.2f}" for shape in shapes]
    assert f"it is {' and '.join(packed)} times as fast" in said


def test_routing_replay():
    table = rows("docs/mixtures.md", "| engine | without replay | with replay | experts differ |")
    said = {row[0]: row[1:] for row in table}
    for kind, device in (("gpu", "H200"), ("cpu", "CPU")):
        found = result(f"routing-{kind}.json")
        for name, row in said.items():
            if not name.endswith(device):
                continue
            engine = name.split("`")[1]
            without, with_replay = (found[f"{engine},{way}"] for way in ("compare", "replay"))
            key = "rollout_logprob_abs_diff"
            assert row[:2] == [f"{without[key]:.4f}", f"{with_replay[key]:.4f}"], name
            assert row[2].startswith(f"{100 * without['routing_differs']:.1f} %"), name
            assert with_replay[key] <= without[key] / 2, name


def test_training_a_mixture():
    found = result("trainer-mixtures.json")
    said = section("docs/mixtures.md", "## Computing")
    assert found["layers"] == 6
    assert f"an MFU of {100 * found['mfu']:.1f} %" in said


def test_what_gpus_hold():
    said = section("docs/planning.md", "## Memory")
    for way in result("trainer-memory.json")["ways"].values():
        assert way["predicted_gib"] == pytest.approx(way["peak_memory_gib"], rel=0.04)
    found = result("one-gpu.json")
    held, planned = found["peak_gb"], found["planned_gb"]
    assert f"{found['samples_per_s']:.0f} samples/s" in said
    assert f"{held['rollout']:.1f} GB of {planned['rollout']:.1f} planned" in said
    assert f"{found['trainer_allocated_gb']:.1f} GB of {planned['trainer']:.1f}" in said
    assert f"allocator held {held['trainer']:.1f}" in said


@pytest.mark.parametrize(("column", "gpus"), [(1, "1+1"), (3, "2+2")])
def test_the_weight_plane(column, gpus):
    found = result("weightsync.json")[f"qwen2.5-3b {gpus} NVIDIA H200"]
    measured, whole = found["rows"], found["end_to_end/shadow"]
    table = rows("docs/weight-sync.md", "| | 1 + 1 GPUs | bar | 2 + 2 GPUs (FSDP2 rows) | bar |")
    said = {row[0]: row[column] for row in table}
    ours, raw = measured["ours"], measured["raw"]
    decoding = measured["decoding"]
    slower = decoding["beside_ms"] / decoding["alone_ms"] - 1
    speed = ours["gb"] / raw["ms"] * 1000
    share = raw["ms"] / ours["transfer_ms"]
    expected = {
        "raw broadcast of all bytes, same run": f"{raw['ms']:.2f} ms, {speed:.0f} GB/s",
        "packed by concatenation": f"{measured['packed']['ms']:.2f} ms",
        "ours, verified": f"{ours['transfer_ms']:.2f} ms, {share * 100:.1f} %",
        "trainer blocked (copy and checksums)": f"{ours['trainer_blocked_ms']:.1f} ms",
        "pause of generation": f"{ours['stall_ms']:.1f} ms; {whole['stall_p50_ms']:.1f} ms",
        "shadow to live, put together from both sources": f"{ours['adopt_ms']:.1f} ms",
        "decode step slower during a transfer": (
            f"{slower * 100:.0f} % for {decoding['transfer_ms']:.0f} ms"
        ),
        "end to end through the services' parts, decoding, p50": f"{whole['total_p50_ms']:.0f} ms",
        "forming a group": f"{measured['form']['ms'] / 1000:.1f} s",
    }
    assert said.keys() == expected.keys()
    wrong = {name: cell for name, cell in said.items() if not cell.startswith(expected[name])}
    assert wrong == {}, {name: expected[name] for name in wrong}


def test_recovery_of_the_weight_plane():
    found = result("weightsync.json")
    nccl, gloo = found["recovery nccl 1+3, 1024 MB"], found["recovery gloo 1+3, 64 MB"]
    head = "| twenty random kills in a row, NCCL, 1 trainer and 3 rollouts, 1 GB | median | worst | bar |"
    said = [row[1:3] for row in rows("docs/weight-sync.md", head)]
    expected = [
        ["", nccl["max_s_SIGKILL"]],
        ["", nccl["max_s_SIGSTOP"]],
        [nccl["p50_s"], nccl["max_s"]],
        [gloo["p50_s"], gloo["max_s"]],
    ]
    assert said == [[f"{cell:.1f} s" if cell else "" for cell in row] for row in expected]


def test_every_result_that_a_document_names_is_there():
    """A pattern such as ``rollout-*.json`` names at least one."""
    missing = {
        f"{named(page)}: {name}"
        for page in DOCUMENTS
        for name in re.findall(r"bench/results/([\w.*-]+\.json)", page.read_text())
        if not list(RESULTS.glob(name))
    }
    assert missing == set()
