"""Tests of ``slipstream plan``: predictions, recommendations, and reports of missing data."""

import json

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.extras.planner.memory import gpu_bytes
from tests.helpers.specs import changed


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "run.json"
    document = changed(
        rollout={"replicas": 1, "max_response_tokens": 64},
        trainer={"steps": 9},
    )
    file.write_text(json.dumps(document))
    return str(file)


def called(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_plan_prints_keys_and_the_source_of_its_rates(spec):
    result = called(spec, "--gpus", "3", "--gpu-memory", "80GB")
    assert result.exit_code == 0, result.output
    for words in (
        "rollout.replicas: ",
        "algorithm.max_staleness: ",
        "H200",
        "KV cache",
        "--from RUN",
    ):
        assert words in result.output


def test_json_has_the_same_for_a_program(spec, tmp_path):
    rates = tmp_path / "rates.yaml"
    rates.write_text("train_tokens_per_s: 1234\ngpu_switch_s: 0.001\n")
    result = called(spec, "--gpus", "3", "--json", "--rates", str(rates))
    plan = json.loads(result.stdout)
    assert plan["rates"]["train_tokens_per_s"] == 1234
    assert not plan["is_measured"]
    keys = plan["recommended"]["keys"]
    assert [keys[name] for name in ("trainer.world_size", "rollout.replicas")] == [2, 3]
    ways = {
        (split["keys"]["topology.placement"], split["keys"]["algorithm.max_staleness"])
        for split in plan["splits"]
    }
    free = {(name, bound) for name in ("disaggregated", "mixed") for bound in (0, 1, 2, 4)}
    assert ways == free | {("colocated", 0), ("colocated", 1)}
    assert plan["now"]["keys"]["rollout.replicas"] == 1


def test_workers_with_their_own_gpus_are_planned_too(spec):
    topology = "{task_groups: [train, ref_logp, generate], ratios: [0.5, 0.25, 0.25], gpus: 4}"
    arguments = ("--set", f"topology={topology}", "--set", "algorithm.kl.coefficient=0.1")
    arguments += ("--gpus", "3", "--gpu-memory", "80GB")
    text, document = called(spec, *arguments), called(spec, *arguments, "--json")
    assert "each of the ref_logp's 1 GPU(s)" in text.output
    parts = json.loads(document.stdout)["memory"]["ref_logp"]
    assert parts["weights, frozen"] > 0


def test_a_gpu_switch_moves_the_state_that_does_not_fit_next_to_the_engines(spec):
    def gpu_switch_s(*arguments):
        plan = json.loads(called(spec, "--gpus", "2", "--json", *arguments).stdout)

        return plan["rates"]["gpu_switch_s"]

    large = ("--set", "model.path=tiny:qwen2-3m", "--set", "rollout.max_running_samples=4096")
    long = ("--set", "rollout.max_response_tokens=400", "--set", "data.max_prompt_tokens=100")
    assert gpu_switch_s("--gpu-memory", "141GB") == gpu_switch_s() == 0.01
    assert gpu_switch_s("--gpu-memory", "9GB", *large, *long) > 0.41


def test_lags_stay_below_the_one_that_is_given(spec):
    plan = json.loads(called(spec, "--max-staleness", "0", "--json").stdout)
    assert plan["recommended"]["keys"]["algorithm.max_staleness"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--gpu-memory", "many"], "such as 141GB"),
        (["--gpu-memory", "1GB"], "does not fit"),
        (["--rates", "missing.yaml"], "missing.yaml"),
        (["--rates", "/dev/null"], "/dev/null"),
    ],
)
def test_what_cannot_be_planned_is_refused(spec, arguments, words):
    result = called(spec, *arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141e9), ("80 gib", 80 * 2**30), ("24", 24e9), ("0.08TB", 80e9)]
)
def test_memory_is_read_in_usual_units(text, size):
    assert gpu_bytes(text) == size


def test_a_run_that_is_measured_in_epochs_is_planned_and_one_that_samples_nothing_is_not(spec):
    epochs = called(spec, "--set", "trainer.steps=null", "--set", "data.epochs=2", "--json")
    assert (
        json.loads(epochs.stdout)["recommended"]
        == json.loads(called(spec, "--json").stdout)["recommended"]
    )
    sft = called(spec, "--set", "algorithm=sft", "--set", "rollout.rewards=[]")
    assert sft.exit_code == 2
    assert "trainer.world_size" in sft.output
