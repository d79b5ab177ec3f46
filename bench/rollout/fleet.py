"""Trains sort4 at lag 1 with a run that is attached to two servers of vLLM or SGLang on the CPU.

Usage: PYTHON -m bench.rollout.fleet [--engine vllm-server] [--seeds 0 1 2] [--steps 50] [--kill] [--out FILE]

``PYTHON`` is that of an environment with the engine's CPU build; see ``tests/engines/run.sh``. With
``--kill``, one server is killed and started again, again and again, while each run trains. Runs of
other seeds stay in an earlier result of the same setup.

Bars: held-out greedy >= 0.9, and no run ends before its last step.
"""

import argparse
import json
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import report_to
from bench.whole_run import REPOSITORY, whole_run
from services.common.models.loading import load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.engines import ENGINES
from services.common.runspec.loader import load_spec
from services.extras.fleets.local import (
    TOKEN,
    LocalServer,
    LocalSglang,
    LocalVllm,
    import_few_models,
    local_servers,
)

_SPEC = REPOSITORY / "examples" / "sort4.yaml"
_GREEDY = 0.9
_MAX_TOKENS = 64
_KINDS: Mapping[str, tuple[type[LocalServer], Sequence[str]]] = {
    "vllm-server": (
        LocalVllm,
        ("--max-model-len", str(_MAX_TOKENS), "--max-num-batched-tokens", "2048"),
    ),
    "sglang-server": (LocalSglang, ()),
}
"""Class and options of each engine's servers."""
_FIRST_KILL_S, _NEXT_KILL_S = 8.0, (5.0, 15.0)


def overrides(servers: Sequence[LocalServer], *, seed: int, steps: int) -> list[str]:
    """Returns the overrides of sort4 for a run that attaches to servers."""
    addresses = json.dumps([server.address for server in servers])
    return [
        f"seed={seed}",
        f"trainer.steps={steps}",
        f"rollout.engine={servers[0].engine}",
        f"rollout.engine_arguments.addresses={addresses}",
        'rollout.engine_arguments.token={"secret": "FLEET_TOKEN"}',
        f"rollout.engine_arguments.{ENGINES[servers[0].engine].length_argument}={_MAX_TOKENS}",
        "rollout.replicas=1",
        "weight_sync.mode=cpu_async",
    ]


@contextmanager
def killing(servers: Sequence[LocalServer], seed: int) -> Iterator[list[float]]:
    """Kills one of the servers and starts it again, at random times; yields the pauses before.

    Raises:
        RuntimeError: At the end of the block, if a server did not come back.
    """
    kills: list[float] = []
    end = threading.Event()
    draws = random.Random(seed)

    def kill() -> None:
        pause_s = _FIRST_KILL_S
        while not end.wait(pause_s):
            server = draws.choice(servers)
            server.kill()
            kills.append(round(pause_s, 1))
            server.start()
            server.wait()
            pause_s = draws.uniform(*_NEXT_KILL_S)

    with ThreadPoolExecutor(max_workers=1) as pool:
        killer = pool.submit(kill)
        try:
            yield kills
        finally:
            end.set()
        killer.result()


def train(
    servers: Sequence[LocalServer], folder: Path, *, seed: int, steps: int, kills: bool
) -> dict[str, Any]:
    """Trains one run; returns its scores, and the events of its servers."""
    settings = overrides(servers, seed=seed, steps=steps)
    if kills:
        with killing(servers[:1], seed) as times:
            run = whole_run(folder, settings)
    else:
        times, run = [], whole_run(folder, settings)
    return {
        "seed": seed,
        "greedy": round(run.summary["heldout"]["greedy"], 3),
        "sampled": round(run.summary["heldout"]["sampled"], 3),
        "staleness": run.summary["staleness"],
        "prompts": run.summary["prompts"],
        "kills": len(times),
        "sync_ms": run.summary["sync_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=_KINDS, default="vllm-server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kill", action="store_true", help="kill and restart one server meanwhile")
    parser.add_argument("--out", type=Path, default=Path("bench/results/fleet.json"))
    arguments = parser.parse_args()
    import_few_models()
    spec = load_spec(_SPEC)
    config = load_config(spec.model, load_tokenizer(spec.model))
    setup = {
        "engine": arguments.engine,
        "servers": 2,
        "steps": arguments.steps,
        "kills": arguments.kill,
    }
    runs = _runs_of_other_seeds(arguments.out, setup, arguments.seeds)
    with tempfile.TemporaryDirectory() as name:
        secrets = Path(name, "secrets")
        secrets.mkdir()
        (secrets / "FLEET_TOKEN").write_text(TOKEN)
        os.environ["SLIPSTREAM_ROLLOUT_SECRETS_DIRECTORY"] = str(secrets)
        os.environ["SLIPSTREAM_ROLLOUT_REWARD_HOSTS"] = '["127.0.0.1"]'
        kind, options = _KINDS[arguments.engine]
        with local_servers(kind, config, 2, "--dtype", spec.trainer.dtype, *options) as servers:
            for seed in arguments.seeds:
                folder = Path(name, f"seed{seed}")
                run = train(servers, folder, seed=seed, steps=arguments.steps, kills=arguments.kill)
                runs = sorted([*runs, run], key=lambda run: int(run["seed"]))
                meets_bars = all(run["greedy"] >= _GREEDY for run in runs)
                report_to(arguments.out, {**setup, "meets_bars": meets_bars, "runs": runs})


def _runs_of_other_seeds(
    out: Path, setup: Mapping[str, Any], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the runs of an earlier result with the same setup, which a slow host measures seed by seed."""
    if not out.exists():
        return []
    earlier = json.loads(out.read_text(encoding="utf-8"))
    if any(earlier[name] != value for name, value in setup.items()):
        return []
    return [run for run in earlier["runs"] if run["seed"] not in seeds]


if __name__ == "__main__":
    main()
