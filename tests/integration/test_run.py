"""`slipstream run` and `slipstream up`: exits, errors, message sizes."""

import json
import re
import signal
import time
import urllib.request
from collections import Counter

import pytest

from tests.helpers.cli import SORT4, assert_all_gone, descendants, slipstream, started, train
from tests.helpers.ports import free_port
from tests.helpers.system import running_system

pytestmark = pytest.mark.timeout(300)

# Far above the usual duration, for busy machines.
ENDS_WITHIN_S = 60.0


def test_ctrl_c_pauses_the_run_and_twice_cancels_it(plumbing, tmp_path):
    arguments = ("run", plumbing, "--state-directory", tmp_path)
    arguments = (*arguments, "--set", "trainer.checkpoint.every=1")
    endless = (*arguments, "--set", "trainer.steps=100000")
    with started(*endless, until=r"step +2/") as (process, _):
        children = descendants(process)
        assert {name.split("-")[0] for name in children} >= {
            "controller",
            "transferqueue",
            "rollout",
            "trainer",
        }
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 130
        assert "Ctrl-C again cancels" in out
        assert "the same command resumes it" in out
        assert_all_gone(children)
    resumes = r"was paused after step ([2-9]|\d\d+); resuming it"
    with started(*endless, until=resumes) as (process, _):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # between two key presses
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 130
    if "cancelled" in out:  # the run may have paused before the second signal
        result = slipstream(*arguments, "--set", "trainer.steps=8", "--resume")
        assert "ended CANCELLED after step" in result.out
        assert result.code == 0, result.out + result.err


def test_a_lost_terminal_and_a_killed_command_pause_the_run(plumbing, tmp_path):
    endless = ("run", plumbing, "--state-directory", tmp_path, "--set", "trainer.steps=100000")
    every = ("--set", "trainer.checkpoint.every=1")
    with started(*endless, *every, until=r"step +3/") as (process, _):
        children = descendants(process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(ENDS_WITHIN_S) == 130
        assert_all_gone(children)
    with started(*endless, *every, until=r"was paused after step \d+; resuming it") as (process, _):
        children = descendants(process)
        process.kill()
        process.wait(ENDS_WITHIN_S)
        assert_all_gone(children)
    with started(*endless, *every, until=r"was (paused|interrupted) after step ([3-9]|\d\d+)"):
        pass


@pytest.mark.parametrize(
    "is_interrupted",
    [
        pytest.param(True, id="Ctrl-C"),
        pytest.param(False, id="reader alone", marks=pytest.mark.nightly),
    ],
)
def test_the_end_of_the_process_that_reads_the_output_pauses_the_run(
    plumbing, tmp_path, is_interrupted
):
    endless = ("run", plumbing, "--state-directory", tmp_path, "--set", "trainer.steps=100000")
    with started(*endless, until=r"step +3/") as (process, _):
        children = descendants(process)
        process.stdout.close()  # `tee` gets Ctrl-C, too, and is often the first to end
        if is_interrupted:
            process.send_signal(signal.SIGINT)
        assert process.wait(ENDS_WITHIN_S) == 130
        assert_all_gone(children)
    there = ("--json", "--state-directory", tmp_path)
    assert json.loads(slipstream("list", *there).out)["state"] == "PAUSED"
    saved = json.loads(slipstream("checkpoints", *there).out)
    assert saved["state"] == "READY"
    assert saved["step"] >= 3


@pytest.mark.parametrize(
    "service", [pytest.param("trainer", marks=pytest.mark.nightly), "transferqueue"]
)
def test_a_killed_service_ends_the_run_with_a_message(plumbing, tmp_path, service):
    arguments = (
        *("run", plumbing, "--state-directory", tmp_path / "runs", "--set", "trainer.steps=100000"),
        *("--set", "limits.max_restarts=0"),
    )
    with started(*arguments, until=r"step +2/") as (process, lines):
        children = descendants(process)
        victim = next(child for name, child in children.items() if name.startswith(service))
        victim.kill()
        out, _ = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 1
        assert re.search(rf"{service}\S* exited with", "".join(lines) + out), out
        assert_all_gone(children)


def cut_off(process) -> None:
    """Kills a command and all its descendants at once, as a power failure does."""
    process.send_signal(signal.SIGSTOP)
    for child in descendants(process).values():
        child.kill()
    process.kill()
    process.communicate(timeout=ENDS_WITHIN_S)


@pytest.mark.nightly
def test_an_interrupted_run_resumes_unless_its_specification_changed(plumbing, tmp_path):
    settings = ("trainer.steps=8", "trainer.checkpoint.every=2")
    changed_command = (
        "run",
        plumbing,
        "--state-directory",
        tmp_path,
        "--set",
        "trainer.steps=100000",
    )
    with started(*changed_command, until=r"step +2/") as (process, _):
        cut_off(process)
    same = (
        *changed_command[:4],
        *(argument for setting in settings for argument in ("--set", setting)),
    )
    with started(*same, until=r"step +3/") as (process, lines):
        assert "another specification; cancelling it" in "".join(lines)
        cut_off(process)
    result = train(plumbing, tmp_path, *settings)
    assert result.code == 0, result.out + result.err
    assert re.search(r"was interrupted after step \d; resuming it", result.out)
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 8


def test_problems_are_reported_together_before_anything_starts(tmp_path):
    result = train(
        SORT4,
        tmp_path / "runs",
        "rollout.engine=vllm",
        "data.train.path=sort4.py:missing",
        "model.path=tiny:unknown",
    )
    assert result.code == 2
    assert "sort4.py has no 'missing'" in result.err
    assert "tiny:qwen2-0.4m" in result.err
    assert "vllm is not installed" in result.err
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(plumbing, system, tmp_path):
    port = system.url.rpartition(":")[2]
    result = slipstream("run", plumbing, "--port", port, "--state-directory", tmp_path / "runs")
    assert result.code != 0
    assert f"127.0.0.1:{port}" in result.err
    assert "another port" in result.err


def test_runs_are_submitted_watched_listed_and_cancelled(plumbing, tmp_path):
    state = tmp_path / "runs"
    with started("up", "--port", "0", "--state-directory", state, until="controller at http") as (
        process,
        _,
    ):
        url = json.loads((state / "up.json").read_text())["url"]
        run_id = slipstream("submit", plumbing, "--url", url).out.strip()
        watched = slipstream("watch", run_id, "--url", url, "--state-directory", state)
        assert watched.code == 0, watched.out + watched.err
        assert json.loads((state / run_id / "summary.json").read_text())["steps"] == 3
        assert len((state / run_id / "metrics.jsonl").read_text().splitlines()) == 3
        assert (state / run_id / "curves.png").stat().st_size > 10_000

        result = slipstream("samples", run_id, "--url", url, "--best", "--json", "--limit", "2")
        contents = [json.loads(line) for line in result.out.splitlines()]
        assert contents[0]["reward"] >= contents[1]["reward"]
        exported = tmp_path / "samples.jsonl"
        slipstream("samples", run_id, "--url", url, "--step", "3", "--export", exported)
        lines = [json.loads(line) for line in exported.read_text().splitlines()]
        assert {line["step"] for line in lines} == {3} and all(line["tokens"] for line in lines)

        second = slipstream(
            "submit", plumbing, "--url", url, "--set", "trainer.steps=100000"
        ).out.strip()
        assert second in slipstream("list", "--url", url).out
        assert "CANCEL" in slipstream("cancel", second, "--url", url).out
        output = slipstream("watch", second, "--url", url, "--state-directory", state)
        assert output.code == 1
        assert json.loads(slipstream("get", second, "--url", url).out)["state"] == "CANCELLED"
        children = descendants(process)
        process.terminate()
        process.wait(ENDS_WITHIN_S)
        assert_all_gone(children)


def message_sizes(port: int) -> tuple[Counter[str], Counter[str], float]:
    """Returns bytes and counts of messages by method and direction, and the count up to 1 MiB."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    pattern = r"slipstream_grpc_message_bytes_(\w+)\{(.*?)\} (\S+)"
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    small = 0.0
    for kind, labels, value in re.findall(pattern, text):
        if kind == "sum":
            sums[labels] = float(value)
        elif kind == "count":
            counts[labels] = float(value)
        elif kind == "bucket" and 'le="1.048576e+06"' in labels:
            small += float(value)
    return sums, counts, small


@pytest.mark.nightly
def test_the_controllers_messages_stay_small_whatever_the_response_length(
    plumbing, tmp_path, monkeypatch
):
    means = {}
    port = free_port()
    monkeypatch.setenv("SLIPSTREAM_CONTROLLER_METRICS_PORT", str(port))
    last_sums, number = Counter(), Counter()
    with running_system(tmp_path / "runs") as system:
        for tokens in (4, 400):
            assert system.train(plumbing, f"rollout.max_response_tokens={tokens}").code == 0
            sums, counts, small = message_sizes(port)
            more = counts - number
            means[tokens] = {key: (sums[key] - last_sums[key]) / more[key] for key in more}
            last_sums, number = sums, counts
    assert counts.total() > 40
    assert small == counts.total(), "a message is larger than 1 MiB"
    watched = [key for key in means[4] if "WatchBatches" in key and "received" in key]
    trained = [key for key in means[4] if "TrainStep" in key and "sent" in key]
    assert watched and trained
    for key in watched + trained:
        # Lengths and offsets are variable-length integers: 100 times the response adds a byte or two to each.
        assert means[400][key] <= 1.3 * means[4][key], key
