"""Client libraries of agents, used as in their public examples, play five turns with a real engine.

Environment variables that each client reads set the endpoint's base URL and key; nothing else differs.
``run.sh`` provides an environment with all clients; without it, the clients that are installed here run.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.extras.agents.endpoint import Access, Endpoint
from services.extras.bubblewrap import bubblewrap
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.workflows.base import Episode, EpisodeLimits
from services.rollout.workflows.turns import token_ids
from tests.helpers.engines import installed
from tests.helpers.tool_policy import (
    ANSWER,
    MAX_TOKENS,
    NUM_CALLS,
    TASK,
    ToolPolicy,
    teach_policy,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

CLIENTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("SLIPSTREAM_CLIENTS_PYTHON", sys.executable)
# Low, so that replies that the tiny model has not learned are practically impossible.
TEMPERATURE = 0.25
TOLERANCE = 1e-4
LAST_TURN_OF_FIRST_VERSION = 2


class Updated:
    """Engine that records its results by context and receives the second weights between two turns."""

    def __init__(self, engine: Engine, policy: ToolPolicy) -> None:
        self.engine = engine
        self.policy = policy
        self.results: dict[tuple[int, ...], tuple[GenerationRequest, GenerationResult]] = {}

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await self.engine.generate(request)
        self.results[request.context_ids] = request, result
        if len(self.results) == LAST_TURN_OF_FIRST_VERSION:
            await adopt(self.engine, self.policy, 2)
        return result


async def adopt(engine: Engine, policy: ToolPolicy, version: int) -> None:
    await engine.adopt_weights(version, policy.weights[version - 1])


@pytest.fixture(scope="module")
def policy() -> ToolPolicy:
    return teach_policy()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch", *installed("vllm")])
async def engine(request: pytest.FixtureRequest, policy: ToolPolicy) -> AsyncIterator[Engine]:
    arguments = {"max_model_len": MAX_TOKENS, "kv_cache_memory_bytes": 64 << 20}
    rollout_engine = make_engine(
        request.param,
        EngineConfig(
            config=policy.config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_running=4,
            is_reproducible=True,
            arguments=arguments if request.param == "vllm" else {},
            vocab_size=policy.tokenizer.vocab_size,
            decode=policy.tokenizer.decode,
        ),
    )
    serving = asyncio.ensure_future(rollout_engine.run())
    ready = asyncio.ensure_future(rollout_engine.wait_ready())
    await asyncio.wait([ready, serving], timeout=300, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    assert ready.done()
    yield rollout_engine
    serving.cancel()
    await asyncio.wait([serving])


@lru_cache
def _has(package: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", find], check=False, timeout=60).returncode == 0


@asynccontextmanager
async def _served(episode: Episode) -> AsyncIterator[Access]:
    async with (
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=TEMPERATURE) as endpoint,
        endpoint.open(episode) as access,
    ):
        yield access


async def _play(client: str, access: Access) -> str:
    """Runs a client's program and returns the last line that it prints."""
    base_url, key = access.base_url, access.api_key
    settings = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        # Clients must not report to their vendors or look up the policy's price.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    # Without the engine's variables: vLLM preloads libraries, which commands in a sandbox cannot load.
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, str(CLIENTS / f"{client}.py"), TASK),
        env=inherited | settings,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(240):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    return output.decode().strip().splitlines()[-1]


def _episode(engine: Updated) -> Episode:
    return Episode(
        Prompt(token_ids=(5, 6), text=TASK, answer=None, row={}, data_source="test"),
        EpisodeLimits(
            seed=7,
            temperature=TEMPERATURE,
            max_response_tokens=MAX_TOKENS,
            max_tokens=MAX_TOKENS,
            stop_texts=(),
        ),
        engine=engine,  # type: ignore[arg-type]
        tokenizer=engine.policy.tokenizer,
        calls=CallPool(1),
        request_id="episode",
    )


def _forward(policy: ToolPolicy, version: int, context: tuple[int, ...], result: GenerationResult):
    """Returns the logprobs of sampled tokens, computed by a plain forward pass."""
    ids = torch.tensor([context + result.token_ids])
    with torch.no_grad():
        logits = policy.model(version)(ids).logits[0, len(context) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return logprobs.gather(1, ids[0, len(context) :, None])[:, 0]


@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("openai_chat", "openai"),
        ("openai_responses", "openai"),
        ("anthropic_messages", "anthropic"),
        ("anthropic_tool_runner", "anthropic"),
        ("openai_agents", "agents"),
        ("langgraph_agent", "langchain"),
        ("pydantic_agent", "pydantic_ai"),
        ("mini_swe_agent", "minisweagent"),
    ],
)
async def test_a_client_plays_five_turns_whose_tokens_a_replay_repeats(
    engine: Engine, policy: ToolPolicy, client: str, package: str
) -> None:
    if not _has(package):
        pytest.skip(f"{package} is not installed; make test-clients installs all clients")
    submits = client == "mini_swe_agent"  # its fifth call ends the episode without an answer
    if submits and not bubblewrap.is_usable():
        pytest.skip("needs bubblewrap")
    await adopt(engine, policy, 1)
    updated = Updated(engine, policy)
    episode = _episode(updated)
    async with _served(episode) as access:
        printed = await _play(client, access)
    replies = [episode.text(turn) for turn in episode.turns if turn.is_sampled]
    assert printed == ("Submitted" if submits else ANSWER), replies
    assert len(replies) == (NUM_CALLS if submits else NUM_CALLS + 1), replies

    assert episode.num_rewritten == 0
    (conversation,) = episode.conversations
    assert conversation == tuple(episode.turns)
    sampled = [index for index, turn in enumerate(conversation) if turn.is_sampled]
    assert len(sampled) == len(updated.results)
    # The policy encodes words as no tokenizer does, so that tokenizing replies again gives other tokens.
    ids = token_ids(conversation)
    text = policy.tokenizer.decode(ids, keeps_special=True)
    assert tuple(policy.tokenizer.encode(text)) != ids
    for number, index in enumerate(sampled, 1):
        turn, context = conversation[index], token_ids(conversation[:index])
        request, result = updated.results[context]
        version = 1 if number <= LAST_TURN_OF_FIRST_VERSION else 2
        assert turn.version_runs == result.version_runs == ((version, len(turn.token_ids)),)
        assert (turn.token_ids, turn.logprobs) == (result.token_ids, result.logprobs)
        if number in (1, LAST_TURN_OF_FIRST_VERSION + 1):
            await adopt(engine, policy, version)
        again = await engine.generate(replace(request, request_id=f"again{number}", on_tokens=None))
        assert again.token_ids == turn.token_ids
        assert again.version_runs == turn.version_runs
        got = torch.tensor(turn.logprobs)
        torch.testing.assert_close(got, torch.tensor(again.logprobs), atol=TOLERANCE, rtol=0)
        expected = _forward(policy, version, context, result)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        if number <= NUM_CALLS:  # the answer is equally likely under both versions
            other = _forward(policy, 3 - version, context, result)
            assert (got - other).abs().max() > 100 * TOLERANCE
