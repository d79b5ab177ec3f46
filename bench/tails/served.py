"""One very long response through all services, with the torch engine on a CPU, while rollouts are killed."""

import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.tails.task import CONTEXT_TOKENS, save_endless_model
from tests.faults.training import Training
from tests.helpers.ledger_check import check_run

_LOOK_S = 0.5


def specification(model: Path, *, tokens: int, versions: int) -> dict[str, Any]:
    """A run whose first response has so many tokens, while so many versions come from shorter ones."""
    # The long one has a rollout to itself; the others share the time that it takes.
    rows = {"long": tokens, "short": max(8, tokens // versions), "count": versions + 8}
    data = {"source": "python", "path": "bench.tails.task:rows", "arguments": rows}
    return {
        "name": "tails",
        "model": {"path": str(model), "tokenizer": "bytes"},
        "data": {"train": data, "shuffle": False, "max_prompt_tokens": 16},
        "rollout": {
            "engine": "torch",
            "replicas": 2,
            "group_size": 1,
            "max_running_samples": 1,
            "max_response_tokens": min(2 * tokens, CONTEXT_TOKENS - 16),
            "kv_policy": "keep",
            "workflow": "bench.tails.task:AsLongAsAsked",
            "rewards": [{"name": "exact_match"}],
        },
        "algorithm": {
            "advantage": "uniform",
            "loss": "reinforce",
            "min_group_size": 1,
            "max_staleness": versions,
            "stale_wait_timeout_s": 36_000,
        },
        "trainer": {
            "steps": versions + 4,
            "prompts_per_step": 1,
            "tokens_per_micro_batch": CONTEXT_TOKENS,
            "optimizer": {"learning_rate": 1e-6},
            "checkpoint": {"every": 1},
        },
        "validation": {"every": 0, "before_train": False, "at_end": False},
        "limits": {"max_restarts": 100},
    }


def measure(
    folder: Path, *, tokens: int, versions: int, kills: int, limit_s: float
) -> dict[str, Any]:
    """Train such a run, and kill whoever generates the long response, at equal distances in versions.

    A run that takes longer is cut off, all services at once; another call with the folder goes on with it.

    Raises:
        AssertionError: If the run fails, or its ledger does not close.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, state, facts = folder / "tails.json", folder / "runs", folder / "facts.json"
    if not spec.exists():
        save_endless_model(folder / "model")
        document = specification(folder / "model", tokens=tokens, versions=versions)
        spec.write_text(json.dumps(document))
    known = {"kills": 0, "cuts": 0, "seconds": 0.0}
    if facts.exists():
        known = json.loads(facts.read_text())
    began, training = time.monotonic(), Training(spec, state)
    training.start()
    try:
        while training.process.poll() is None and time.monotonic() - began < limit_s:
            due = (known["kills"] + 1) * versions // (kills + 1)
            if known["kills"] < kills and training.step() >= due and (worker := _holder(state)):
                training.kill(worker)
                known["kills"] += 1
                told = f"killed {worker} behind step {training.step()}"
                print(told, file=sys.stderr, flush=True)
            time.sleep(_LOOK_S)
        is_finished = training.process.poll() is not None
        assert training.process.poll() in (None, 0), training.output
    finally:
        training.close()
    known["seconds"] = round(known["seconds"] + time.monotonic() - began)
    known["cuts"] += not is_finished
    facts.write_text(json.dumps(known))
    return known | (_found(state) if is_finished else {"unfinished": True})


def _found(state: Path) -> dict[str, Any]:
    steps = [
        json.loads(line)
        for path in state.glob("run_*/metrics.jsonl")
        for line in path.read_text().splitlines()
    ]
    longest = max(steps, key=lambda step: float(step["response_length_max"]))
    return {
        "tokens": int(longest["response_length_max"]),
        "versions": 1 + int(longest["staleness_max"]),
        "trained_s": round(longest["seconds_total"], 1),
        **check_run(state),
    }


def _holder(state: Path) -> str:
    """Who generates the long response now; nobody between two attempts and in the end."""
    if not (database := state / "slipstream.db").exists():
        return ""
    statement = (
        "SELECT worker_id FROM prompts WHERE sequence = 0 AND state IN ('leased', 'generating')"
    )
    try:
        with closing(sqlite3.connect(database)) as connection:
            found = connection.execute(statement).fetchone()
    except sqlite3.OperationalError:
        return ""
    return found[0] if found else ""
