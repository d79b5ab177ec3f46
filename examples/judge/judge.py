"""Serves a judge: a model, in the rollouts' engine, that decides whether an answer is correct.

Usage: python examples/judge/judge.py [--http 127.0.0.1:8811] [--grpc 127.0.0.1:8812]

It serves ``POST /score`` and ``slipstream.reward.v1.RewardService``. A run names it as the reward
``http://127.0.0.1:8811/score`` or ``grpc://127.0.0.1:8812``. The tiny model is trained here on examples of
the sort4 task. For a real judge change ``MODEL`` and ``question``.
"""

import argparse
import asyncio
import hashlib
import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.common.http.server import serve_http
from services.common.lifetime import wait_for_shutdown
from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.rpc.server import serve
from services.common.runspec.run import ModelSpec, WarmStartSpec
from services.rollout.engines.base import Engine, GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine
from services.trainer.model.warm_start import load_base_model
from slipstream.reward.v1 import reward_pb2 as pb
from slipstream.reward.v1 import reward_pb2_grpc

MODEL = ModelSpec(
    path="tiny:qwen2-0.4m",
    tokenizer="chars:0123456789=?yn",
    warm_start=WarmStartSpec(examples=f"{Path(__file__).resolve()}:examples", steps=1500),
)
_YES = "y"


def question(prompt: str, response: str) -> str:
    """Returns the judge's prompt.

    It contains only the response's digits, so that a response cannot instruct the judge.
    """
    digits = "".join(character for character in response if character in "0123456789")[:8]
    return f"{prompt}{digits}?"


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns correct and wrong answers with their verdicts."""
    rng = random.Random(seed)
    return [_example(rng) for _ in range(count)]


def _example(rng: random.Random) -> tuple[str, str]:
    digits = [rng.choice("0123456789") for _ in range(4)]
    answer = sorted(digits)
    if rng.random() < 0.5:
        answer = rng.choice((_swapped, _replaced, _shuffled, _shortened))(answer, rng)
    verdict = _YES if answer == sorted(digits) else "n"
    return question(f"{''.join(digits)}=", "".join(answer)), verdict


def _swapped(answer: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(answer) - 1)
    return [*answer[:place], answer[place + 1], answer[place], *answer[place + 2 :]]


def _replaced(answer: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(answer))
    return [*answer[:place], rng.choice("0123456789"), *answer[place + 1 :]]


def _shuffled(answer: list[str], rng: random.Random) -> list[str]:
    return rng.sample(answer, len(answer))


def _shortened(answer: list[str], rng: random.Random) -> list[str]:
    return answer[: rng.randrange(len(answer))]


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Scores over HTTP and gRPC with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    async def score(self, prompt: str, response: str) -> float:
        """Returns 1 if the judge answers yes, else 0."""
        result = await self._engine.generate(
            GenerationRequest(
                request_id=str(next(self._numbers)),
                context_ids=tuple(self._tokenizer.encode(question(prompt, response))),
                max_tokens=1,
                seed=0,
                temperature=0.0,
            )
        )
        return float(self._tokenizer.decode(result.token_ids) == _YES)

    async def http(self, request: Request) -> JSONResponse:
        """Answers ``POST /score``."""
        given: dict[str, Any] = await request.json()
        return JSONResponse({"score": await self.score(given["prompt"], given["response"])})

    async def ScoreResponse(  # noqa: N802
        self, request: pb.ScoreResponseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScoreResponseResponse:
        """Answers ``slipstream.reward.v1.RewardService``."""
        return pb.ScoreResponseResponse(score=await self.score(request.prompt, request.response))


def load() -> tuple[TorchEngine, Tokenizer]:
    """Loads the judge's model into an engine; the first start trains it for a minute or two."""
    tokenizer = load_tokenizer(MODEL)
    # The cache key must cover the whole file, not only the function of the examples.
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    model = load_base_model(
        MODEL,
        tokenizer,
        seed=0,
        device=torch.device("cpu"),
        cache=Path(tempfile.gettempdir()) / f"slipstream-judge-{digest}",
        progress=lambda _step, _total: None,
    )
    return TorchEngine(model, max_running=64), tokenizer


async def run(http: str, grpc_bind: str) -> None:
    """Serves until the process is asked to end."""
    engine, tokenizer = await asyncio.to_thread(load)
    judge = Judge(engine, tokenizer)
    app = Starlette(routes=[Route("/score", judge.http, methods=["POST"])])

    def register(server: grpc.aio.Server) -> None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(judge, server)

    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(engine.run())
        name = "slipstream.reward.v1.RewardService"
        async with (
            serve_http(http, app) as http_port,
            serve(grpc_bind, register, open_service=name) as grpc_port,
        ):
            sys.stdout.write(f"judge at http port {http_port}, gRPC port {grpc_port}\n")
            sys.stdout.flush()
            await wait_for_shutdown()
        decoding.cancel()


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", default="127.0.0.1:8811", help="host:port of POST /score")
    parser.add_argument("--grpc", default="127.0.0.1:8812", help="host:port of the RewardService")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(run(arguments.http, arguments.grpc))


if __name__ == "__main__":
    main()
