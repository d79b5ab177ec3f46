"""The engine of docs/adding.md meets the contract of engines."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from services.common.runspec.loader import parse_spec
from services.rollout.engines.base import Engine
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig
from tests.contract import test_engine_contract, test_engine_weights
from tests.contract.engines import decode, model_config
from tests.helpers.engines import running
from tests.helpers.packages import install_from
from tests.helpers.pages import example
from tests.helpers.specs import changed

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

_NEEDS_A_PREFIX_CACHE = {
    "test_prefixes_that_were_computed_before_are_counted",
    "test_what_follows_a_response_finds_what_was_computed_again_for_it",
}


def _contract(module: ModuleType) -> dict[str, Callable[..., Any]]:
    tests = {name: function for name, function in vars(module).items() if name.startswith("test_")}
    return {name: function for name, function in tests.items() if name not in _NEEDS_A_PREFIX_CACHE}


CONTRACT = _contract(test_engine_contract) | _contract(test_engine_weights)


@pytest.fixture
def open_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractAsyncContextManager[Engine]]:
    """Installs the engine as the page does; returns a function that opens it."""
    for name in ("plain.py", "plain_kind.py"):
        example("adding.md", name, tmp_path)
    install_from(example("adding.md", "plain.toml", tmp_path), monkeypatch)

    @asynccontextmanager
    async def opened(*, tied: bool = True) -> AsyncIterator[Engine]:
        engine_config = EngineConfig(
            config=model_config(tied=tied),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_running=8,
            decode=decode,
        )
        engine = make_engine("plain", engine_config)
        async with running(engine):
            yield engine

    return opened


@pytest.mark.parametrize("name", CONTRACT)
async def test_the_engine_of_the_page_keeps_the_contract(
    name: str, open_plain: Callable[..., Any]
) -> None:
    takes_tied = "tied" in inspect.signature(CONTRACT[name]).parameters
    for tied in (True, False) if takes_tied else (True,):
        await CONTRACT[name](open_plain, **({"tied": tied} if takes_tied else {}))


async def test_a_specification_may_name_the_engine_of_the_page(
    open_plain: Callable[..., Any],
) -> None:
    assert parse_spec(changed(rollout={"engine": "plain"})).rollout.engine == "plain"
