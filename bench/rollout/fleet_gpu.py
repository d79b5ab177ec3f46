"""A run that attaches to a vLLM server against the same run with its own engine, on one GPU or two.

``python -m bench.rollout.fleet_gpu [--gpus 2] [--smoke] [--json FILE]``: 1.3 billion parameters at lag 1,
geometric lengths, ten steps of each arm, one after the other. Own engine and server have equal slots and an
equal KV cache. Bars: samples/s of the arm ``server, direct`` at least .97 of the own engine's, and the median
of the weight sync at most 1.2 times as long.

    own              engine of the run, ``weight_sync.mode: shadow``
    server, direct   ``weight_sync.mode: servers``: the trainer sends to the server's workers
    server           ``weight_sync.mode: cpu_async``: through host memory, and over HTTP to the server
    own, cpu_async   separates the way through host memory from the server itself

On one GPU, weights travel by handles of CUDA's memory. With ``--gpus 2`` the trainer has the first GPU, and
the engine or server the second one; they travel over NCCL.

Each arm is written as soon as it ends. Arms of an earlier call with the same file stay in it, so that each
call can measure one of them. An arm whose server starts later than ``--start-s``, or whose run lasts longer
than ``--arm-s``, ends with the reason, and with the ends of the logs of its server and its services.

With ``--smoke`` a tiny model trains on a CPU; name the arm ``own`` where vLLM is not installed.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.e2e.shapes import SHAPES, Shape, smoke
from bench.e2e.timeline import facts
from bench.gpu_memory import watched_memory
from bench.report import GrowingReport, device_name, read_json
from bench.whole_run import run_for
from services.extras.fleets.local import TOKEN, LocalVllm
from services.extras.fleets.protocol import STATE

RESULTS = Path(__file__).parents[1] / "results" / "fleet-gpu.json"
OWN, HOST, SERVER, DIRECT = "own", "own, cpu_async", "server", "server, direct"
ARMS = (OWN, DIRECT, SERVER, HOST)
LEAST_SHARE, MOST_SYNC = 0.97, 1.2
_FIRST = 3
_SLOTS = 256
_KV_BYTES = 16 << 30
_CONTEXT = 2048
# Weights, activations, graphs and KV cache of 1.3 B parameters, of 141 GB; vLLM checks it before it starts.
_GPU_SHARE = 0.2
_LOG_LINES = 12
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "arms", nargs="*", default=[OWN, DIRECT, SERVER, HOST], help="; ".join(ARMS)
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and the own arm, on a CPU"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=560.0, help="no arm begins later")
    parser.add_argument("--start-s", type=float, default=150.0, help="longest start of a server")
    parser.add_argument("--arm-s", type=float, default=280.0, help="longest time of an arm's run")
    parser.add_argument("--set", action="append", default=[], help="further settings of all arms")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    arguments = parser.parse_args()
    # Ended from outside, it must end its server and its run, which would keep the GPU's memory.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shape = SHAPES["geometric"]
    if arguments.smoke:
        shape = smoke(shape)
    begin = time.monotonic()
    setup = {
        "device": device_name(),
        "gpus": arguments.gpus,
        "slots": _SLOTS,
        "kv_bytes": _KV_BYTES,
    }
    out = arguments.json
    if arguments.smoke and out == RESULTS:
        out = None
    report = GrowingReport(out, setup)
    arms = _earlier_arms(out, setup)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape.save_model(folder / "model")
        spec = folder / "spec.json"
        spec.write_text(json.dumps(shape.spec(folder / "model", steps=10_000)))
        for arm in arguments.arms:
            if time.monotonic() - begin > arguments.limit_s:
                arms[arm] = {"not_measured": "out of time"}
            else:
                arms[arm] = {"failed": "the benchmark was ended from outside"}
                try:
                    arms[arm] = _arm(
                        arm,
                        shape,
                        folder,
                        spec,
                        steps=arguments.steps,
                        further=arguments.set,
                        gpus=arguments.gpus,
                        start_s=arguments.start_s,
                        arm_s=arguments.arm_s,
                    )
                except KeyboardInterrupt:
                    report.add({"arms": arms, "bars": bars(arms)})
                    raise
            report.add({"arms": arms, "bars": bars(arms)})
    report.finish({"bars": bars(arms), "seconds": round(time.monotonic() - begin, 1)})


def bars(arms: dict[str, Any]) -> dict[str, Any]:
    """Compares each arm with a server with the own engine's arm; the bars are those of the direct one."""
    own_arm = arms.get(OWN, {})
    compared: dict[str, Any] = {}
    for name in (DIRECT, SERVER):
        arm = arms.get(name, {})
        if "samples_per_s" not in own_arm or "samples_per_s" not in arm:
            continue
        share = arm["samples_per_s"] / own_arm["samples_per_s"]
        sync = arm["sync_ms"]["p50"] / own_arm["sync_ms"]["p50"]
        compared[name] = {
            "samples_per_s_over_own": round(share, 3),
            f"at least {LEAST_SHARE}": share >= LEAST_SHARE,
            "sync_p50_over_own": round(sync, 3),
            f"at most {MOST_SYNC}": sync <= MOST_SYNC,
        }
    return compared


def _earlier_arms(out: Path | None, setup: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arms of an earlier call with the same setup."""
    earlier = read_json(out)
    if any(earlier.get(name) != value for name, value in setup.items()):
        return {}
    arms: dict[str, Any] = earlier.get("arms", {})
    return arms


@contextmanager
def _visible(gpus: str | None) -> Iterator[None]:
    """Shows some GPUs only to the processes that start while the block runs; None for all."""
    before = os.environ.get(_VISIBLE)  # noqa: TID251 -- CUDA's own variable
    if gpus is not None:
        os.environ[_VISIBLE] = gpus  # noqa: TID251
    try:
        yield
    finally:
        if gpus is not None:
            os.environ.pop(_VISIBLE)  # noqa: TID251
            if before is not None:
                os.environ[_VISIBLE] = before  # noqa: TID251


def _arm(
    arm: str,
    shape: Shape,
    folder: Path,
    spec: Path,
    *,
    steps: int,
    further: Sequence[str],
    gpus: int,
    start_s: float,
    arm_s: float,
) -> dict[str, Any]:
    """Trains one arm; a failure is its result, so that the other arms are measured."""
    state = folder / arm.replace(", ", "-")
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            has_server, is_divided = arm in (SERVER, DIRECT), gpus > 1
            with _visible("1" if has_server and is_divided else None):
                server = _server(arm, shape, folder, stack, start_s)
                settings = [*_settings(arm, shape, server), *further]
            server_s = round(time.monotonic() - began, 1)
            stack.enter_context(_visible("0" if has_server and is_divided else None))
            peaks = stack.enter_context(watched_memory())
            run = run_for(steps, state, settings, spec=spec, timeout_s=arm_s)
            return {
                "settings": settings,
                "server_start_s": server_s,
                **facts(run, first=_FIRST),
                **_loads(server),
                "logprob_difference": max(step["rollout_logprob_abs_diff"] for step in run.steps),
                "peak_gb": dict(peaks),
            }
    except (RuntimeError, SystemExit) as error:
        logs = [*folder.glob("server-*.log"), *state.glob("run_*/logs/*")]
        ends = {str(log.relative_to(folder)): _end_of(log) for log in logs if log.is_file()}
        return {"failed": str(error)[-3000:], "logs": ends}


def _end_of(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]


def _server(
    arm: str, shape: Shape, folder: Path, stack: ExitStack, start_s: float
) -> LocalVllm | None:
    """Starts the server of an arm; returns None for an arm without one."""
    if arm not in (SERVER, DIRECT):
        return None
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "FLEET_TOKEN").write_text(TOKEN)
    os.environ["SLIPSTREAM_ROLLOUT_SECRETS_DIRECTORY"] = str(secrets)  # noqa: TID251 -- of the run
    os.environ["SLIPSTREAM_ROLLOUT_REWARD_HOSTS"] = '["127.0.0.1"]'  # noqa: TID251
    of_gpu = (
        *("--kv-cache-memory-bytes", str(_KV_BYTES)),
        *("--gpu-memory-utilization", str(_GPU_SHARE)),
    )
    server = LocalVllm(
        folder,
        shape.config(),
        *("--dtype", shape.dtype, "--max-model-len", str(_CONTEXT)),
        *("--max-num-seqs", str(_SLOTS)),
        *(of_gpu if shape.engine == "vllm" else ("--max-num-batched-tokens", str(_CONTEXT))),
    )
    stack.callback(server.kill)
    server.start()
    server.wait(start_s)
    return server


def _settings(arm: str, shape: Shape, server: LocalVllm | None) -> list[str]:
    """Returns the settings of an arm."""
    common = ["algorithm.max_staleness=1", f"rollout.max_running_samples={_SLOTS}"]
    if arm == HOST:
        common.append("weight_sync.mode=cpu_async")
    if server is None:
        if shape.engine == "vllm":
            common += [
                f"rollout.engine_arguments.kv_cache_memory_bytes={_KV_BYTES}",
                f"rollout.engine_arguments.max_model_len={_CONTEXT}",
            ]
        return common
    return [
        *common,
        "rollout.engine=vllm-server",
        f"rollout.engine_arguments.addresses={json.dumps([server.address])}",
        'rollout.engine_arguments.token={"secret": "FLEET_TOKEN"}',
        f"rollout.engine_arguments.max_model_len={_CONTEXT}",
        "rollout.replicas=1",
        f"weight_sync.mode={'servers' if arm == DIRECT else 'cpu_async'}",
    ]


def _loads(server: LocalVllm | None) -> dict[str, Any]:
    """Returns the median of each phase of a server's loads, without the first ones."""
    if server is None:
        return {}
    try:
        answer = httpx.get(
            f"{server.address}{STATE}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=10,
            trust_env=False,
        )
        loads = answer.raise_for_status().json()["loads_ms"][_FIRST - 1 :]
    except httpx.HTTPError as error:
        return {"loads_ms": str(error)}  # the arm was measured nevertheless
    names = sorted({name for load in loads for name in load})
    return {"loads_ms": {name: median(load.get(name, 0.0) for load in loads) for name in names}}


if __name__ == "__main__":
    main()
