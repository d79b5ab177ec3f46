"""Records and replays an asynchronous run with kills: python -m tests.faults.replay [--smoke].

Bars: every version has the recorded digest; with another loss, training differs from step 1 on; 200 responses
are regenerated token by token; recording, with the thread that writes, takes at most 2 % of a step.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.training import Training
from tests.helpers.cli import REPOSITORY, slipstream
from tests.helpers.plumbing import write_plumbing

_RESULT = REPOSITORY / "bench" / "results" / "replay.json"
_MAX_RECORD_FRACTION = 0.02
_SETTINGS = (
    "record=full",
    "algorithm.max_staleness=4",
    "rollout.partial_rollout=true",
    "rollout.replicas=2",
    "rollout.max_response_tokens=60",
    "rollout.group_size=8",
    "trainer.world_size=2",
    "trainer.checkpoint.every=10",
    "trainer.checkpoint.keep=100",
    "rollout.reproducible=batch_invariant",
    "limits.max_restarts=50",
)
_OTHER_LOSS = ("algorithm.loss=gspo", "algorithm.aggregation=seq-mean-token-mean")
"""Without this aggregation, GSPO has the same gradient in the first step, where all ratios are exactly 1."""
_SAMPLED = ((37, 38, 39, 40), (97, 98, 99, 100))
"""Steps whose responses are regenerated, grouped by command."""
_LEAST_RESPONSES = 200
_VICTIMS = ("trainer-0", "rollout-0", "controller")


def record(folder: Path, steps: int) -> tuple[Path, dict[str, Any]]:
    """Trains with three kills; returns the state directory and measurements of the recording."""
    state = folder / "runs"
    training = Training(write_plumbing(folder), state, f"trainer.steps={steps}", *_SETTINGS)
    begin = time.monotonic()
    training.start()
    try:
        for number, victim in enumerate(_VICTIMS, start=1):
            training.until_step(number * steps // (len(_VICTIMS) + 1))
            training.kill(victim)
        code = training.wait()
    finally:
        training.close()
    assert code == 0, training.output[-4000:]
    (metrics,) = state.glob("run_*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    (record,) = state.glob("run_*/checkpoints/record")
    size = sum(file.stat().st_size for file in record.rglob("*.safetensors"))
    return state, {
        "killed": _VICTIMS,
        "run_s": time.monotonic() - begin,
        "starts": [start["step"] for start in json.loads((record / "run.json").read_text())],
        "record_bytes_per_step": size / (steps + 1),
        **_cost(rows),
        "staleness_mean": statistics.mean(row["staleness_mean"] for row in rows),
    }


def _cost(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    recording = [row["seconds_record"] for row in rows]
    writing = [row["record_thread_s"] for row in rows]
    whole = [row["seconds_total"] for row in rows]
    return {
        "step_s": statistics.median(whole),
        "record_s": statistics.median(recording),
        "record_fraction": sum(recording) / sum(whole),
        "record_thread_cpu_s": statistics.median(writing),
        "record_fraction_with_thread": (sum(recording) + sum(writing)) / sum(whole),
    }


def replay(state: Path, *arguments: str) -> tuple[list[dict[str, Any]], str, float]:
    """Replays the run; returns its steps without the start, the last message, and the duration in seconds."""
    begin = time.monotonic()
    command = ("replay", "plumbing", "--json", "--state-directory", state)
    result = slipstream(*command, *arguments, timeout=3600)
    assert result.code in (0, 1), result.out + result.err
    steps = [json.loads(line) for line in result.out.splitlines()]
    return steps[1:], result.err.strip().splitlines()[-1], time.monotonic() - begin


def regenerate(state: Path, sampled: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Regenerates the responses of some steps; returns the numbers of all and of equal ones, and seconds."""
    begin = time.monotonic()
    differences: list[str] = []
    for steps in sampled:
        options = [argument for step in steps for argument in ("--sample", str(step))]
        command = ("replay", "plumbing", "--json", "--state-directory", state, *options)
        result = slipstream(*command, timeout=3600)
        assert result.code in (0, 1), result.out + result.err
        differences += [json.loads(line)["difference"] for line in result.out.splitlines()]
    return {
        "responses": len(differences),
        "equal_responses": differences.count(""),
        "regenerate_s": time.monotonic() - begin,
    }


def main() -> None:
    """Runs the benchmark, prints its figures and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few steps; writes no result")
    parser.add_argument("--folder", type=Path, help="where the run stays; default: nowhere")
    arguments = parser.parse_args()
    is_smoke = arguments.smoke
    num_steps = 12 if is_smoke else 100
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        state, figures = record(folder, num_steps)
        print(json.dumps(figures, indent=1), flush=True)
        figures |= regenerate(state, [[2], [num_steps]] if is_smoke else _SAMPLED)
        steps, _, seconds = replay(state)
        equal = sum(not step["tensors"] for step in steps)
        options = [argument for setting in _OTHER_LOSS for argument in ("--set", setting)]
        changed_steps, message, _ = replay(state, *options, "--to", "3")
    parted = next(step["step"] for step in changed_steps if step["tensors"])
    figures |= {
        "steps": num_steps,
        "equal_versions": equal,
        "replay_s": seconds,
        "other_loss": _OTHER_LOSS,
        "parts_with_other_loss_at_step": parted,
        "message": message,
    }
    bars = {
        "all versions are equal": equal == num_steps == len(steps),
        "another loss parts at step 1": parted == 1 and message.endswith("step 1"),
        "recording takes at most 2 % of a step": figures["record_fraction_with_thread"]
        <= _MAX_RECORD_FRACTION,
        "200 responses are equal": _LEAST_RESPONSES
        <= figures["responses"]
        == figures["equal_responses"],
    }
    figures["bars"] = bars
    print(json.dumps(figures, indent=1))
    if not is_smoke:
        _RESULT.write_text(f"{json.dumps(figures, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
