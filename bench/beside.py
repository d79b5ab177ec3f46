"""Measures how much a trainer and a decoding engine slow each other down on one GPU, and what helps.

``python -m bench.beside [--smoke] [--json FILE]`` measures the product's own training step and vLLM through
the product's adapter, in two processes on one GPU: each alone, both at once, and both with each of the knobs:

- ``engine N``: at most N running requests in the engine while the trainer works;
- ``priority``: the trainer's pass in a stream of high priority;
- ``green N``: the trainer's pass in a green context of N percent of the multiprocessors;
- ``MPS``: a Multi-Process Service; ``MPS, engine N %``: and the engine's share of the multiprocessors.

A knob that this machine does not have, or that does not fit into the time, is reported with the reason. Bar:
forward and backward beside decoding take at most 1.35 times as long as alone.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from typing import Any

import torch

from bench.e2e.shapes import TAIL, Shape, smoke
from bench.mps import SHARE, MpsUnavailableError, serving_mps
from bench.report import GrowingReport, device_name
from services.common.task_group import TaskGroup

RESULTS = Path(__file__).parent / "results" / "beside.json"
BAR = 1.35
_ROUNDS = 3
_SETTLE_S = 2.0
"""Seconds until the number of running requests has changed, and contexts have their usual length."""
_ANSWER_S = 120.0
_SEQUENCES, _TOKENS = 48, 8192
_PROMPT_TOKENS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any machine")
    parser.add_argument("--running", type=int, default=256, help="requests that the engine decodes")
    parser.add_argument("--limit-s", type=float, default=150.0, help="no measurement begins later")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    parser.add_argument("--part", choices=("engine", "trainer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = smoke(TAIL) if arguments.smoke else TAIL
    if arguments.part == "engine":
        asyncio.run(_serve_engine(shape, arguments.running))
    elif arguments.part == "trainer":
        _serve_trainer(shape, is_smoke=arguments.smoke)
    else:
        _measure(arguments)


def _measure(arguments: argparse.Namespace) -> None:
    begin = time.monotonic()
    report = GrowingReport(
        None if arguments.smoke else arguments.json,
        {"device": device_name(), "bar": BAR, "running": arguments.running},
    )
    remaining_s: Callable[[], float] = lambda: arguments.limit_s - (time.monotonic() - begin)  # noqa: E731
    facts: dict[str, Any] = {}
    knobs: dict[str, Any] = {}
    with _both(arguments, {}) as (engine, trainer):
        facts["start_s"] = round(time.monotonic() - begin, 1)
        facts["trainer alone"] = trainer.ask("step", rounds=_ROUNDS)
        facts["engine alone"] = _decoding(engine, arguments.running)
        report.add(facts)
        alone_s = facts["trainer alone"]["forward_backward_s"]
        for name, running, pass_in in _knobs(arguments.running):
            knobs[name] = _beside(engine, trainer, running, pass_in, alone_s, remaining_s)
            report.add({"beside": knobs})
    for name, share in (("MPS", None), ("MPS, engine 40 %", 40)):
        knobs[name] = _with_mps(arguments, share, alone_s, remaining_s)
        report.add({"beside": knobs})
    report.finish({"seconds": round(time.monotonic() - begin, 1)})


def _knobs(running: int) -> list[tuple[str, int, str]]:
    """Returns name, running requests and way of the trainer's pass for each knob of one pair of processes."""
    return [
        ("no knob", running, "usual"),
        ("priority", running, "priority"),
        (f"engine {running // 2}", running // 2, "usual"),
        (f"engine {running // 4}", running // 4, "usual"),
        ("green 75", running, "green 75"),
    ]


def _beside(
    engine: "_Process",
    trainer: "_Process",
    running: int,
    pass_in: str,
    alone_s: float,
    remaining_s: Callable[[], float],
) -> dict[str, Any]:
    """Returns seconds and rates while both work, or why there are none."""
    if remaining_s() < 2 * _SETTLE_S:
        return {"not_measured": "out of time"}
    try:
        engine.ask("run", number=running)
        time.sleep(_SETTLE_S)
        engine.ask("mark")
        step = trainer.ask("step", rounds=_ROUNDS, way=pass_in)
        rate = engine.ask("rate")["tokens_per_s"]
    except _PartFailedError as error:
        return {"not_available": str(error)}
    finally:
        with suppress(_PartFailedError):
            engine.ask("run", number=0)
    ratio = step["forward_backward_s"] / alone_s
    return {
        **step,
        "over_alone": round(ratio, 3),
        "engine_tokens_per_s": rate,
        "running": running,
        "meets_bar": ratio <= BAR,
    }


def _decoding(engine: "_Process", running: int) -> dict[str, Any]:
    engine.ask("run", number=running)
    time.sleep(_SETTLE_S)
    engine.ask("mark")
    time.sleep(2 * _SETTLE_S)
    rate = engine.ask("rate")
    engine.ask("run", number=0)
    return {**rate, "running": running}


def _with_mps(
    arguments: argparse.Namespace,
    share: int | None,
    alone_s: float,
    remaining_s: Callable[[], float],
) -> dict[str, Any]:
    """Starts both parts again under a Multi-Process Service; returns the result, or why there is none."""
    if arguments.smoke or not torch.cuda.is_available():
        return {"not_available": "no GPU"}
    if remaining_s() < 30:
        return {"not_measured": "out of time"}
    try:
        with serving_mps() as environment:
            of_engine = {} if share is None else {SHARE: str(share)}
            with _both(arguments, environment, of_engine) as (engine, trainer):
                decoding = _decoding(engine, arguments.running)
                figures = _beside(engine, trainer, arguments.running, "usual", alone_s, remaining_s)
                return {**figures, "engine_alone_tokens_per_s": decoding["tokens_per_s"]}
    except (MpsUnavailableError, _PartFailedError) as error:
        return {"not_available": str(error)}


class _PartFailedError(RuntimeError):
    """A part cannot do what it was asked for; the message has its reason."""


class _Process:
    """One side in a separate process, which answers one line for each line that it gets."""

    def __init__(
        self, arguments: argparse.Namespace, name: str, further: Mapping[str, str]
    ) -> None:
        command = [sys.executable, "-m", "bench.beside", "--part", name]
        command += ["--running", str(arguments.running), *(["--smoke"] if arguments.smoke else [])]
        environment = {
            **os.environ,  # noqa: TID251 -- its child inherits it
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            **further,
        }
        self._name = name
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._lines.put(line[1:])
        self._lines.put(json.dumps({"failed": "its process ended"}))

    def answer(self) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            _PartFailedError: If the part failed, or does not answer in time.
        """
        try:
            content: dict[str, Any] = json.loads(self._lines.get(timeout=_ANSWER_S))
        except Empty:
            raise _PartFailedError(f"{self._name}: no answer within {_ANSWER_S:.0f} s") from None
        if "failed" in content:
            raise _PartFailedError(f"{self._name}: {content['failed']}")
        return content

    def ask(self, question: str, **values: Any) -> dict[str, Any]:
        """Sends a request; returns its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"what": question, **values}) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Ends the process; it ends its own children when its input ends."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _both(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    of_engine: Mapping[str, str] | None = None,
) -> Iterator[tuple[_Process, _Process]]:
    """Yields an engine and a trainer that are ready; both start at the same time."""
    engine = _Process(arguments, "engine", {**environment, **(of_engine or {})})
    trainer = _Process(arguments, "trainer", environment)
    try:
        engine.answer()
        trainer.answer()
        yield engine, trainer
    finally:
        trainer.end()
        engine.end()


def _say(answer: Mapping[str, Any]) -> None:
    print("@" + json.dumps(answer), flush=True)


# The engine


async def _serve_engine(shape: Shape, max_running: int) -> None:
    from bench.rollout.driven import make_config, opened, random_weights
    from services.rollout.engines.base import GenerationRequest

    # Fits on the GPU together with the trainer, and holds every response.
    kv_bytes = 24 << 30
    # vLLM refuses to start if less than this share of the GPU is free.
    arguments = {"kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": 0.3}
    arguments = arguments if shape.engine == "vllm" else {}
    engine_config = make_config(
        shape.config(),
        dtype=getattr(torch, shape.dtype),
        max_running=max_running,
        arguments=arguments,
    )
    async with opened(shape.engine, engine_config) as engine, TaskGroup() as group:
        await engine.adopt_weights(1, random_weights(engine, engine_config))
        tasks: list[asyncio.Task[None]] = []

        async def decode(number: int) -> None:
            for count in range(1_000_000):
                prompt = tuple((37 * number + index) % 250 + 2 for index in range(_PROMPT_TOKENS))
                request = GenerationRequest(
                    request_id=f"{id(tasks)}.{number}.{count}",
                    context_ids=prompt[: shape.mean_response_tokens],
                    max_tokens=shape.mean_response_tokens,
                    seed=number,
                )
                await engine.generate(request)

        marked, since = 0, time.perf_counter()
        _say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            content = json.loads(line)
            if content["what"] == "run":
                for task in tasks[content["number"] :]:
                    task.cancel()
                await asyncio.gather(*tasks[content["number"] :], return_exceptions=True)
                tasks = tasks[: content["number"]]
                tasks += [
                    group.create_task(decode(number))
                    for number in range(len(tasks), content["number"])
                ]
                _say({"running": len(tasks)})
            elif content["what"] == "mark":
                marked, since = engine.stats().tokens_total, time.perf_counter()
                _say({})
            else:
                num_tokens = engine.stats().tokens_total - marked
                _say({"tokens_per_s": round(num_tokens / (time.perf_counter() - since), 1)})
        for task in tasks:
            task.cancel()


# The trainer


def _serve_trainer(shape: Shape, *, is_smoke: bool) -> None:
    from bench.trainer.__main__ import Launch, prepare
    from bench.trainer.timing import timed
    from bench.trainer.workload import Scale, smoke_scale

    device = torch.device("cpu" if is_smoke or not torch.cuda.is_available() else "cuda:0")
    is_gpu = device.type == "cuda"
    mean, longest = shape.mean_response_tokens, shape.max_response_tokens
    scale = (
        Scale(shape.config(), _SEQUENCES, mean // 4, longest, _TOKENS, 2, 3)
        if is_gpu
        else replace(smoke_scale(), num_sequences=8)
    )
    trainer = {"dtype": "bfloat16" if is_gpu else "float32", "compile": is_gpu}
    work, *_ = prepare(scale, trainer, device, Launch())
    timed(work, 0, device)
    _say({"ready": True})
    for line in sys.stdin:
        content = json.loads(line)
        try:
            _say(_timed_steps(work, content["rounds"], content.get("way", "usual"), device))
        except Exception as error:  # noqa: BLE001 -- it is the answer
            _say({"failed": f"{type(error).__name__}: {error}"[:300]})


def _timed_steps(
    work: Callable[[], Any], rounds: int, way: str, device: torch.device
) -> dict[str, Any]:
    passes, steps = [], []
    with _way(way, device):
        for _ in range(rounds):
            begin = time.perf_counter()
            metrics = work().metrics
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            steps.append(time.perf_counter() - begin)
            passes.append(metrics["seconds_forward_backward"])
    return {"forward_backward_s": round(median(passes), 4), "step_s": round(median(steps), 4)}


@contextmanager
def _green(share: int, device: torch.device) -> Iterator[None]:
    from torch.cuda.green_contexts import GreenContext

    index = device.index or 0
    count = torch.cuda.get_device_properties(index).multi_processor_count
    context: Any = GreenContext.create(num_sms=share * count // 100, device_id=index)
    context.set_context()
    try:
        yield
    finally:
        context.pop_context()


def _way(way: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context of the trainer's pass."""
    if way == "usual":
        return nullcontext()
    if device.type != "cuda":
        raise RuntimeError("no GPU")
    if way == "priority":
        return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))
    return _green(int(way.removeprefix("green ")), device)


if __name__ == "__main__":
    main()
