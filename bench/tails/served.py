"""One very long response through all services, with the torch engine on a CPU, while rollouts are killed."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.tails.task import CONTEXT_TOKENS, save_endless_model

_LOOK_S = 0.5


def specification(model: Path, *, tokens: int, versions: int) -> dict[str, Any]:
    """Returns a run whose first response is long while shorter ones produce new versions.

    Args:
        model: Folder of the model.
        tokens: Tokens of the long response.
        versions: Number of weight versions meanwhile.
    """
    # The long response has a rollout to itself; the others share the time that it takes.
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
    """Trains such a run, and kills the rollout with the long response at regular intervals of versions.

    A run that exceeds the limit is terminated with all services; another call with the folder
    continues it.

    Raises:
        AssertionError: If the run fails, or its ledger does not close.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, state, facts = folder / "tails.json", folder / "runs", folder / "facts.json"
    if not spec.exists():
        save_endless_model(folder / "model")
        document = specification(folder / "model", tokens=tokens, versions=versions)
        spec.write_text(json.dumps(document))
    content = {"kills": 0, "cuts": 0, "seconds": 0.0}
    if facts.exists():
        content = json.loads(facts.read_text())
    command = [sys.executable, "-m", "services.cli.main", "run", spec, "--state-directory", state]
    began = time.monotonic()
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while process.poll() is None and time.monotonic() - began < limit_s:
            due = (content["kills"] + 1) * versions // (kills + 1)
            if content["kills"] < kills and _step(state) >= due and (worker := _holder(state)):
                content["kills"] += _kill(process.pid, worker)
            time.sleep(_LOOK_S)
        is_finished = process.poll() is not None
        assert process.poll() in (None, 0), (folder / "output.txt").read_text()
    finally:
        _cut_off(process)
    content["seconds"] = round(content["seconds"] + time.monotonic() - began)
    content["cuts"] += not is_finished
    facts.write_text(json.dumps(content))
    return content | (_found(state) if is_finished else {"unfinished": True})


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
        **_ledger(state),
    }


def _ledger(state: Path) -> dict[str, int]:
    """Returns the final states of all prompts: if nothing was lost, each issued prompt was trained once."""
    trained = [
        sequence
        for (groups,) in _read(state, "SELECT groups_json FROM steps WHERE is_committed")
        for sequence, *_ in json.loads(groups)
    ]
    ((issued,),) = _read(state, "SELECT num_issued FROM ledgers")
    assert sorted(trained) == list(range(issued)), (trained, issued)
    ((losses,),) = _read(state, "SELECT count(*) FROM events WHERE type = 'WorkerLost'")
    return {"issued": issued, "trained": len(trained), "losses": losses}


def _step(state: Path) -> int:
    """Returns the newest committed step."""
    rows = _read(state, "SELECT max(step) FROM steps WHERE is_committed")
    return int(rows[0][0] or 0) if rows else 0


def _holder(state: Path) -> str:
    """Returns the rollout that generates the long response; empty between two attempts and at the end."""
    running = "sequence = 0 AND state IN ('leased', 'generating')"
    rows = _read(state, f"SELECT worker_id FROM prompts WHERE {running}")
    return str(rows[0][0]) if rows else ""


def _read(state: Path, statement: str) -> list[Any]:
    """Returns rows of the controller's database; none if it does not exist yet."""
    if not (database := state / "slipstream.db").exists():
        return []
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()
    return []


def _kill(root: int, worker_id: str) -> bool:
    """Kills a rollout, identified by the name of its log; returns True if it existed."""
    for child in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error, OSError):
            log = Path("/proc") / str(child.pid) / "fd" / "1"
            if "services.rollout" in child.cmdline() and log.readlink().stem == worker_id:
                child.kill()
                return True
    return False


def _cut_off(process: "subprocess.Popen[bytes]") -> None:
    """Kills a command and all its descendants at once, if it has not ended."""
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    for member in (*root.children(recursive=True), root):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
