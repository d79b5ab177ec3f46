"""Tests of step records, which are built from events, and of the files and tables that show them."""

import io
import json
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.display import make_display, row_of
from services.cli.follow import summary_lines, write_report
from services.cli.step_log import StepLog

RUN = {
    "id": "run_1",
    "name": "task",
    "state": "SUCCEEDED",
    "state_reason": "Completed",
    "message": "",
    "summary": {
        "steps": 2,
        "heldout": {"greedy": 0.5, "sampled": None},
        "staleness": {"max": 1, "mean": 0.5, "bound": 1},
        "prompts": {"issued": 4, "consumed": 4, "dropped": 0, "quarantined": 0, "outstanding": 0},
        "weight_version": 2,
        "sync_ms": {"p50": 3.0, "p95": 4.0},
    },
}


def committed(step):
    data = {
        "step": step,
        "reward_mean": 0.25,
        "staleness_mean": 1.0,
        "staleness_max": 1.0,
        "response_tokens": 100.0,
        "seconds": 0.5,
        "trainer_wait_s": 0.2,
        "rollout_idle_s": 0.0,
        "ready_groups": 3,
        "running_groups": 1,
    }
    return "StepCommitted", {"time": "2026-01-01T00:00:00Z", "message": "", "data": data}


def published(version):
    return "WeightsPublished", {
        "message": "",
        "data": {"version": version, "sync_ms": 7.0, "stall_ms": 1.0},
    }


def validated(version):
    data = {"version": version, "greedy": 0.5, "sampled": 0.4, "num_samples": 8}
    return "Validated", {"message": "", "data": data}


def test_a_record_is_complete_once_its_weights_are_published(tmp_path):
    log = StepLog(tmp_path)
    assert list(log.process(*committed(1))) == []
    (record,) = log.process(*published(1))
    assert (record["step"], record["sync_ms"], record["weight_version"]) == (1, 7.0, 1)


def test_steps_without_a_publication_are_kept(tmp_path):
    log = StepLog(tmp_path)
    list(log.process(*committed(1)))
    (first,) = log.process(*committed(2))
    (second,) = log.process("end", RUN)
    assert (first["step"], second["step"]) == (1, 2)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_step_that_is_trained_again_replaces_the_lost_one(tmp_path, is_written):
    log = StepLog(tmp_path)
    for step in (1, 2, 3, 2, 3):
        for event in (committed(step), published(step)):
            list(log.process(*event))
        if is_written:
            log.write()
    assert len(log.records) == 3
    assert [record["step"] for record in log.records] == [1, 2, 3]


def test_the_initial_publication_is_no_step(tmp_path):
    log = StepLog(tmp_path)
    assert list(log.process(*published(0))) == []
    assert list(log.records) == []


def test_files_have_one_line_a_step_and_the_summary(tmp_path):
    (tmp_path / "run_1").mkdir()
    log = StepLog(tmp_path / "run_1")
    for step in (1, 2):
        for event in (committed(step), published(step), validated(step)):
            list(log.process(*event))
    path = write_report(tmp_path / "run_1", RUN, log, wall_seconds=1.5)
    lines = (tmp_path / "run_1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["heldout_greedy"] for line in lines] == [0.5, 0.5]
    summary = json.loads(path.read_text())
    assert (summary["state"], summary["wall_seconds"], summary["steps"]) == ("SUCCEEDED", 1.5, 2)
    assert (tmp_path / "run_1" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_row_shows_the_idle_side():
    _, event = committed(1)
    row = row_of({**event["data"], "sync_ms": 7.4}, {"version": 1, "greedy": 0.5, "sampled": None})
    assert row == (
        *("1", "0.250", "0.500/-", "1.0/1", "7", "200"),
        *("3+1", "trainer 0.2s"),
    )


@pytest.mark.parametrize(
    ("trainer_s", "rollouts_s", "side"),
    [(0.1, 7.0, "rollouts 7.0s"), (5.0, 4.0, "trainer 5.0s"), (7.8, 8.0, "both 7.8s")],
)
def test_the_idle_side_is_both_if_neither_waits_for_the_other(trainer_s, rollouts_s, side):
    _, event = committed(1)
    numbers = {"seconds": 8.0, "trainer_wait_s": trainer_s, "rollout_idle_s": rollouts_s}
    assert row_of({**event["data"], **numbers, "sync_ms": 7.4}, None)[-1] == side


def test_without_a_terminal_progress_is_plain_lines():
    out = io.StringIO()
    _, event = committed(1)
    with make_display("task", 2, Console(file=out, width=40)) as display:
        display.step({**event["data"], "sync_ms": 7.4}, None)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step    1/2  reward 0.250")


def test_without_a_terminal_a_start_is_a_line_when_something_changes_or_after_a_while():
    out = io.StringIO()
    with make_display("task", 2, Console(file=out, width=40)) as display:
        for second in range(70):
            activity = f"loads, {second} %" if second < 65 else "is ready"
            worker = {"worker_id": "trainer-0", "activity": activity, "state": "STARTING"}
            display.workers([worker], seconds=second)
        for second in range(40):
            display.saving(f"{second} MB are written", seconds=second)
    stages = [line.split(": ")[0] for line in out.getvalue().splitlines()]
    starts = ["starting, 0 s", "starting, 30 s", "starting, 60 s", "starting, 65 s"]
    assert stages == [*starts, "0 MB are written", "30 MB are written"]


def test_a_terminal_of_80_columns_shows_every_number_and_the_time_that_is_left():
    out = io.StringIO()
    _, event = committed(1)
    wide = {"step": 9999, "response_tokens": 49_382.5, "ready_groups": 512, "running_groups": 512}
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with make_display("task", 20_000, console) as display:
        display.step({**event["data"], **wide, "sync_ms": 1234.5}, None)
    text = out.getvalue()
    row = next(line for line in text.splitlines() if line.strip().startswith("9999"))
    assert row.split() == [
        *("9999", "0.250", "-/-", "1.0/1", "1234", "98,765", "512+512", "trainer", "0.2s"),
    ]
    assert "9999/20000, 1:23:20 h left" in text


def test_a_failed_run_shows_its_message_first(tmp_path):
    run = {
        **RUN,
        "state": "FAILED",
        "state_reason": "WorkerLost",
        "message": "trainer-0 ended",
        "summary": {},
    }
    assert summary_lines(run, tmp_path, StepLog(tmp_path), wall_seconds=3.0) == [
        "task FAILED after 3 s (WorkerLost)",
        "trainer-0 ended",
    ]


@pytest.mark.parametrize(
    ("sets", "lines"),
    [
        ({"a": {"greedy": 0.5, "sampled": 0.25, "pass@1": 0.25}}, []),
        (
            {"a": {"greedy": 0.5, "sampled": 0.25, "pass@1": 0.25, "pass@2": 0.5}},
            ["    a: greedy 0.500, sampled 0.250, pass@1 0.250, pass@2 0.500"],
        ),
        (
            {"a": {"greedy": 0.5}, "b": {"greedy": 1.0}},
            ["    a: greedy 0.500", "    b: greedy 1.000"],
        ),
    ],
)
def test_a_summary_has_the_scores_of_sets_that_say_more_than_the_total(tmp_path, sets, lines):
    heldout = {"greedy": 0.5, "sampled": 0.25, "sets": sets}
    summary = {**RUN["summary"], "heldout": heldout}
    printed_lines = summary_lines(
        {**RUN, "summary": summary}, tmp_path, StepLog(tmp_path), wall_seconds=1.0
    )
    assert [line for line in printed_lines if line.startswith("    ")] == lines


def test_a_record_file_grows_during_a_run_and_is_rewritten_after_a_rewind(
    tmp_path: Path,
) -> None:
    log, path = StepLog(tmp_path), tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 2, 3):
        list(log.process(*committed(step)))
        log.write()
    list(log.process("end", {}))
    log.write()
    log.write()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_a_record_file_of_an_earlier_command_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        log = StepLog(tmp_path)
        for step in (1, 2):
            for event in (committed(step), published(step)):
                list(log.process(*event))
            log.write()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_records_of_the_time_of_a_full_disk_are_written_once_it_has_space(tmp_path: Path) -> None:
    log, path, good = StepLog(tmp_path), tmp_path / "metrics.jsonl", tmp_path / "good"
    for step in (1, 2, 3, 4):
        list(log.process(*committed(step)))
        if step == 3:
            path.rename(good)
            path.symlink_to("/dev/full")
        log.write()
    path.unlink()
    good.rename(path)
    with path.open("a") as file:
        file.write('{"step": 3, "half a li')  # as much as the disk had space for
    list(log.process("end", {}))
    log.write()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_the_log_of_a_long_run_needs_no_more_memory_than_that_of_a_short_one(
    tmp_path: Path,
) -> None:
    log = StepLog(tmp_path)

    def held(begin: int, end: int) -> int:
        """Returns the bytes that are in use after further steps."""
        for step in range(begin, end):
            for event in (committed(step), published(step), validated(step)):
                list(log.process(*event))
            log.write()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = held(1, 200)
        assert held(200, 2_200) - first < 20_000
    finally:
        tracemalloc.stop()
    assert len(log.records) == len(log.heldout) == 2_199


@pytest.mark.parametrize(
    ("states", "reason", "expected"),
    [
        ([], "", "starting, 5 s: the workers are starting"),
        ([("loading", "loading the model")], "", "starting, 5 s: w-0 loading the model"),
        ([("READY", ""), ("loading", "")], "no step", "starting, 5 s: w-0 ready, w-1 loading"),
        ([("READY", "")], "", "first step, 5 s: all workers are ready"),
        ([("READY", "")], "no step for 60 s: 0 of 4", "first step, 5 s: no step for 60 s: 0 of 4"),
    ],
)
def test_the_reason_for_a_late_first_step_is_shown(states, reason, expected):
    out = io.StringIO()
    workers = [
        {"worker_id": f"w-{number}", "state": state, "activity": activity}
        for number, (state, activity) in enumerate(states)
    ]
    with make_display("task", 2, Console(file=out, width=100)) as display:
        display.workers(workers, seconds=5.0, reason=reason)
    assert out.getvalue().strip() == expected
