"""Fleets that an administrator configures in a file: names, servers and tokens.

::

    {"shared": {"addresses": ["http://vllm-0:8000"], "secret": "FLEET_TOKEN",
                "token_file": "/run/secrets/fleet-token"}}

Runs name a fleet; the controller replaces the name by the addresses and the name of the secret. It asks the
servers for their state with the token of ``token_file``, which no run sees.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.common.errors import InvalidArgumentError, NotFoundError
from services.controller.fleets import named_fleet
from services.controller.schemas import FleetRunView, FleetServerView, FleetView
from services.extras.fleets.kind import is_server_address
from services.extras.fleets.labels import Label
from services.extras.fleets.protocol import STATE

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 3.0
_FRESH_S: Final = 2.0
"""Seconds for which an answer of a server serves further questions."""
_MAX_STATE_BYTES: Final = 1 << 20


class FleetEntry(BaseModel):
    """Servers of one fleet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    addresses: list[str] = Field(min_length=1)
    """``http://HOST:PORT`` or ``https://HOST:PORT`` of each server."""
    secret: str = ""
    """Name of the secret with the servers' token, as specifications name it; empty for none."""
    token_file: Path | None = None
    """File with that token, for the controller."""


_ENTRIES: Final = TypeAdapter(dict[str, FleetEntry])


class FleetDirectory:
    """Reads the file at each question, so that a change needs no restart.

    Args:
        file: JSON object of :class:`FleetEntry` by name.
        transport: Replaces the network in tests.
    """

    def __init__(self, file: Path, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._file = file
        self._transport = transport
        self._states: dict[str, tuple[float, FleetServerView]] = {}

    async def views(self) -> list[FleetView]:
        """Returns all fleets by name, with the state of each server.

        Raises:
            InvalidArgumentError: If the file cannot be read.
        """
        entries = await asyncio.to_thread(self._entries)
        requests = [self._view(name, entry) for name, entry in sorted(entries.items())]
        return list(await asyncio.gather(*requests))

    async def view(self, name: str) -> FleetView:
        """Returns one fleet.

        Raises:
            NotFoundError: If there is none of this name.
        """
        entries = await asyncio.to_thread(self._entries)
        if name not in entries:
            raise NotFoundError(
                f"no fleet {name!r}; there are {', '.join(sorted(entries)) or 'none'}"
            )
        return await self._view(name, entries[name])

    async def resolve(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a specification in which a fleet's name is replaced by its servers.

        Raises:
            InvalidArgumentError: If it names an unknown fleet, or servers besides the fleet.
        """
        name = named_fleet(spec)
        if name is None:
            return spec
        key = "rollout.engine_arguments"
        entries = await asyncio.to_thread(self._entries)
        if not isinstance(name, str) or name not in entries:
            raise InvalidArgumentError(
                f"{key}.fleet must be one of {', '.join(sorted(entries)) or 'no fleet'}, got {name!r}"
            )
        arguments = {
            argument: value
            for argument, value in spec["rollout"]["engine_arguments"].items()
            if argument != "fleet"
        }
        if conflicts := sorted({"addresses", "token"} & arguments.keys()):
            raise InvalidArgumentError(
                f"{key} has fleet and {', '.join(conflicts)}, which the fleet determines; remove one of them"
            )
        entry = entries[name]
        arguments["addresses"] = list(entry.addresses)
        if entry.secret:
            arguments["token"] = {"secret": entry.secret}
        return {**spec, "rollout": {**spec["rollout"], "engine_arguments": arguments}}

    def _entries(self) -> dict[str, FleetEntry]:
        try:
            entries = _ENTRIES.validate_json(self._file.read_bytes())
        except (OSError, ValidationError) as error:
            raise InvalidArgumentError(
                f"the fleets in {self._file} cannot be read: {error}"
            ) from error
        for name, entry in entries.items():
            if wrong := [address for address in entry.addresses if not is_server_address(address)]:
                raise InvalidArgumentError(
                    f"fleet {name!r} in {self._file} has the addresses {wrong}, expected http://HOST:PORT or "
                    "https://HOST:PORT"
                )
        return entries

    async def _view(self, name: str, entry: FleetEntry) -> FleetView:
        token = ""
        if entry.token_file is not None:
            try:
                token = (await asyncio.to_thread(entry.token_file.read_text)).strip()
            except (OSError, UnicodeDecodeError) as error:
                logger.warning("a token is not readable", extra={"fleet": name, "why": str(error)})
                problem = (
                    f"the controller cannot read the token_file of fleet {name!r} "
                    f"({type(error).__name__}); an administrator must correct it"
                )
                servers = [
                    FleetServerView(address=entry_address, problem=problem)
                    for entry_address in entry.addresses
                ]
                return FleetView(name=name, servers=servers)
        async with httpx.AsyncClient(
            transport=self._transport, timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False
        ) as client:
            requests = [self._server(client, address, token) for address in entry.addresses]
            return FleetView(name=name, servers=list(await asyncio.gather(*requests)))

    async def _server(self, client: httpx.AsyncClient, address: str, token: str) -> FleetServerView:
        now = asyncio.get_running_loop().time()
        asked_at, view = self._states.get(address, (0.0, None))
        if view is not None and now - asked_at < _FRESH_S:
            return view
        view = await _ask(client, address, token)
        self._states[address] = now, view
        return view


async def _ask(client: httpx.AsyncClient, address: str, token: str) -> FleetServerView:
    """Returns the state of a server, or why it has none."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(path: str) -> tuple[int, bytes]:
        url = address.rstrip("/") + path
        async with client.stream("GET", url, headers=headers) as answer:
            return answer.status_code, await _content(answer)

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, content = await get(STATE)
            if status == 404:
                return await _ask_sglang(address, get)
        if status != 200:
            return _refused(address, status, content)
        return _read(address, json.loads(content))
    except TimeoutError:
        return FleetServerView(address=address, problem=f"no answer within {_TIMEOUT_S:.0f} s")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        return FleetServerView(address=address, problem=f"{type(error).__name__}: {error}"[:300])


async def _ask_sglang(
    address: str, get: Callable[[str], Awaitable[tuple[int, bytes]]]
) -> FleetServerView:
    """Returns the state of an SGLang server, in which no part of Slipstream runs."""
    answers = []
    for path in ("/model_info", "/server_info"):
        status, content = await get(path)
        if status != 200:
            return _refused(address, status, content)
        answers.append(json.loads(content))
    model, engine = answers
    label = Label.parse(model["weight_version"])
    version = None if label is None else label.version
    return FleetServerView(
        address=address,
        is_healthy=True,
        exclusive_run=None if label is None else label.owner.partition("/")[0],
        weight_version=int(version) if version is not None and version.isdigit() else None,
        kv_capacity_tokens=int(engine["max_total_num_tokens"]),
        max_model_len=int(engine["max_req_input_len"]),
    )


def _refused(address: str, status: int, content: bytes) -> FleetServerView:
    text = content[:200].decode(errors="replace")
    return FleetServerView(address=address, problem=f"status {status}: {text}")


async def _content(answer: httpx.Response) -> bytes:
    """Reads an answer. Raises ValueError if it is too long for a state."""
    content = bytearray()
    async for chunk in answer.aiter_bytes():
        content += chunk
        if len(content) > _MAX_STATE_BYTES:
            raise ValueError(f"its state has more than {_MAX_STATE_BYTES} bytes")
    return bytes(content)


def _read(address: str, state: Mapping[str, Any]) -> FleetServerView:
    engine = state["engine"]
    runs = [
        FleetRunView(
            run_id=row["run"],
            share=row["share"],
            weight_version=row["version"],
            adapters=row["adapters"],
            tokens=row["tokens"],
            requests=row["requests"],
            running=row["running"],
            waiting=row["waiting"],
        )
        for row in state.get("runs", [])
    ]
    owner = state["owner"]
    return FleetServerView(
        address=address,
        is_healthy=True,
        exclusive_run=None if owner is None else str(owner).partition("/")[0],
        weight_version=state["version"],
        max_adapters=int(engine.get("max_adapters", 0)),
        kv_capacity_tokens=int(engine["kv_capacity_tokens"]),
        max_model_len=int(engine["max_model_len"]),
        runs=runs,
    )
