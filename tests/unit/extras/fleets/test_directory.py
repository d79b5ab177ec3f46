"""Fleets of an installation: their state, and specifications that name them."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidArgumentError, NotFoundError
from services.common.runspec.engines import ENGINES
from services.controller.fleets import NoFleets
from services.controller.schemas import FleetServerView
from services.extras.fleets.command import _rows
from services.extras.fleets.directory import FleetDirectory
from services.extras.fleets.labels import LOADING, Label
from tests.unit.extras.fleets.servers import TOKEN
from tests.unit.extras.fleets.sglang_servers import SglangFake
from tests.unit.extras.fleets.test_adapters import _attached, _body, _free_steps, _generate, _shared


def _directory(folder: Path, **fleets: Any) -> FleetDirectory:
    file = folder / "fleets.json"
    file.write_text(json.dumps(fleets))
    return FleetDirectory(file)


def _spec(**arguments: Any) -> dict[str, Any]:
    return {"name": "run", "rollout": {"engine": "vllm-server", "engine_arguments": arguments}}


async def test_a_fleet_shows_the_use_of_each_server_by_each_run(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    async with (
        _shared() as server,
        _attached(server, "run_a", 1.0, share=3.0) as first,
        _attached(server, "run_b", 2.0),
    ):
        _free_steps(server)
        await _generate(server, first, _body(6))
        entry = {"addresses": [server.address], "token_file": str(tmp_path / "token")}
        view = await _directory(tmp_path, shared=entry).view("shared")
    (state,) = view.servers
    assert state.is_healthy and state.max_adapters == 3
    usage = {run.run_id: (run.share, run.tokens, run.weight_version) for run in state.runs}
    assert usage == {"run_a": (3.0, 6, 0), "run_b": (1.0, 0, 0)}


async def test_an_sglang_server_is_shown_with_its_run_and_version(tmp_path: Path) -> None:
    server = SglangFake()
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.close)
        entry = {"addresses": [server.address]}
        (idle,) = (await _directory(tmp_path, own=entry).view("own")).servers
        server.sglang.label = str(Label(owner="run_a/rollout-0", session="s", version="3"))
        (used,) = (await _directory(tmp_path, own=entry).view("own")).servers
        server.sglang.label = str(Label(owner="run_a/rollout-0", session="s", version=LOADING))
        (loading,) = (await _directory(tmp_path, own=entry).view("own")).servers
    assert idle.is_healthy and idle.kv_capacity_tokens > 0
    states = [(state.exclusive_run, state.weight_version) for state in (idle, used, loading)]
    assert states == [(None, None), ("run_a", 3), ("run_a", None)]


async def test_servers_that_do_not_answer_or_refuse_the_token_are_shown_with_the_reason(
    tmp_path: Path,
) -> None:
    async with _shared() as server:
        addresses = [server.address, "http://127.0.0.1:1"]
        (view,) = await _directory(tmp_path, shared={"addresses": addresses}).views()
    refused, absent = view.servers
    assert not refused.is_healthy and "status 401" in refused.problem
    assert not absent.is_healthy and "ConnectError" in absent.problem


async def test_a_token_that_cannot_be_read_is_the_reason_that_is_shown(tmp_path: Path) -> None:
    entry = {"addresses": ["http://127.0.0.1:1"], "token_file": str(tmp_path / "missing")}
    (view,) = await _directory(tmp_path, shared=entry).views()
    (state,) = view.servers
    assert "cannot read the token_file of fleet 'shared' (FileNotFoundError)" in state.problem
    assert str(tmp_path) not in state.problem


@pytest.mark.parametrize(
    ("run", "version", "expected"),
    [("r", 3, "r"), (None, 3, "another project"), (None, None, "idle")],
)
def test_the_command_shows_a_server_that_another_project_uses_as_used(
    run: str | None, version: int | None, expected: str
) -> None:
    server = FleetServerView(
        address="http://a:1", is_healthy=True, exclusive_run=run, weight_version=version
    )
    ((_, cell, *_),) = _rows(server)
    assert cell == expected


async def test_a_specification_gets_the_servers_and_the_secret_of_its_fleet(tmp_path: Path) -> None:
    entry = {"addresses": ["http://a:8000"], "secret": "FLEET_TOKEN"}
    resolved = await _directory(tmp_path, shared=entry).resolve(_spec(fleet="shared", share=2))
    assert resolved["rollout"]["engine_arguments"] == {
        "addresses": ["http://a:8000"],
        "token": {"secret": "FLEET_TOKEN"},
        "share": 2,
    }
    other = _spec(addresses=["http://b:8000"])
    assert await _directory(tmp_path, shared=entry).resolve(other) == other


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"fleet": "other"}, "must be one of shared, got 'other'"),
        ({"fleet": ["shared"]}, "must be one of shared"),
        ({"fleet": "shared", "addresses": ["http://b:1"]}, "has fleet and addresses"),
        ({"fleet": "shared", "token": {"secret": "MINE"}}, "has fleet and token"),
    ],
)
async def test_a_specification_cannot_name_other_servers_than_those_of_a_fleet(
    tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    directory = _directory(tmp_path, shared={"addresses": ["http://a:8000"]})
    with pytest.raises(InvalidArgumentError, match=problem):
        await directory.resolve(_spec(**arguments))


async def test_without_fleets_a_name_is_refused_with_the_setting() -> None:
    with pytest.raises(InvalidArgumentError, match="SLIPSTREAM_CONTROLLER_FLEETS_FILE"):
        await NoFleets().resolve(_spec(fleet="shared"))
    with pytest.raises(NotFoundError):
        await NoFleets().view("shared")


async def test_a_file_with_a_wrong_address_or_key_is_refused(tmp_path: Path) -> None:
    for entry in ({"addresses": ["ftp://a"]}, {"addresses": []}, {"servers": ["http://a:1"]}):
        with pytest.raises(InvalidArgumentError, match=r"fleets\.json"):
            await _directory(tmp_path, shared=entry).views()


def test_validation_accepts_the_name_of_a_fleet_in_the_place_of_addresses() -> None:
    kind = ENGINES["vllm-server"]
    kind.check({"fleet": "shared"}, most_tokens=8)
    with pytest.raises(ValueError, match="must be the name of a fleet"):
        kind.check({"fleet": 3}, most_tokens=8)
