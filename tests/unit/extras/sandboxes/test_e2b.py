"""Sandboxes hosted by E2B, tested with its SDK and a stub of its API."""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from services.common.runspec.rollout import SandboxSpec
from services.rollout.failures import CallError
from services.rollout.sandbox.base import SandboxError
from services.rollout.sandbox.pool import SandboxPool

pytest.importorskip("e2b", reason="needs the extra e2b")
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

KEY = "e2b_0123456789abcdef"


class Hosted(process_connect.Process):
    """Stub of E2B's API with room for one sandbox, whose home is a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = None
        self.lifetimes = []

    @asynccontextmanager
    async def serving(self, monkeypatch):
        processes = process_connect.ProcessASGIApplication(self)
        app = Starlette(
            routes=[
                Route("/v2/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.list_sandboxes),
                Route("/sandboxes/{id}", self.kill, methods=["DELETE"]),
                Route("/sandboxes/{id}/timeout", self.prolong, methods=["POST"]),
                Route("/health", self.health),
                Route("/files", self.write, methods=["POST"]),
                Mount("/", processes),
            ]
        )
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 -- uvicorn has no event
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        monkeypatch.setenv("E2B_API_URL", url)
        monkeypatch.setenv("E2B_SANDBOX_URL", url)
        monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await serving

    async def create(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no such key"}, 401)
        if self.started is not None:
            return JSONResponse({"code": 429, "message": "too many sandboxes"}, 429)
        self.started = await request.json()
        sandbox = {
            "templateID": self.started["templateID"],
            "sandboxID": "box",
            "clientID": "c",
            "envdVersion": "0.6.2",
        }
        return JSONResponse(sandbox, 201)

    async def list_sandboxes(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no such key"}, 401)
        return JSONResponse([])

    async def kill(self, request: Request) -> Response:
        self.started = None
        return Response(status_code=204)

    async def prolong(self, request: Request) -> Response:
        self.lifetimes.append((await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        return Response(status_code=204 if self.started else 502)

    async def write(self, request: Request) -> Response:
        path = Path(request.query_params["path"])
        if request.headers["content-type"].startswith("multipart"):
            form = await request.form()
            content = await form["file"].read()
        else:
            content = await request.body()
        await asyncio.to_thread(path.write_bytes, content)
        return JSONResponse([{"name": path.name, "path": str(path), "type": "file"}])

    async def start(self, request, ctx):
        """Runs a process as envd does."""
        del ctx
        process = await asyncio.create_subprocess_exec(
            request.process.cmd,
            *request.process.args,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=self.folder,
            start_new_session=True,
        )
        event = process_pb.ProcessEvent
        try:
            begun = event.StartEvent(pid=process.pid)
            yield process_pb.StartResponse(event=event(event=Oneof("start", begun)))
            while chunk := await process.stdout.read(1 << 16):
                data = event.DataEvent(output=Oneof("stdout", chunk))
                yield process_pb.StartResponse(event=event(event=Oneof("data", data)))
            ended = event.EndEvent(exit_code=await process.wait(), exited=True)
            yield process_pb.StartResponse(event=event(event=Oneof("end", ended)))
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def hosted_pool(tmp_path, monkeypatch, *, key: str = KEY, **spec):
    hosted = Hosted(tmp_path)
    async with hosted.serving(monkeypatch):
        arguments = {"api_key": key}
        yield SandboxPool(SandboxSpec(kind="e2b", arguments=arguments, **spec)), hosted


async def test_a_hosted_sandbox_runs_commands_and_keeps_every_byte(tmp_path, monkeypatch) -> None:
    content = bytes(range(256)) * 999
    async with hosted_pool(tmp_path, monkeypatch, image="coder") as (pool, hosted):
        await pool.prepare()
        async with pool.open({}) as box:
            assert hosted.started["templateID"] == "coder"
            assert hosted.started["allow_internet_access"] is False
            assert hosted.started["timeout"] > 0
            result = await box.run("pwd; printf '\\377'; echo err >&2; exit 3")
            assert result.output == f"{tmp_path}\n".encode() + b"\xfferr\n"
            assert (result.exit_status, result.limit) == (3, "")
            assert (await box.run("cat", stdin=b"given")).text == "given"
            assert (await box.run("true \0")).exit_status == 126
            await box.write("deep/it's a file", content)
            assert await box.read("deep/it's a file") == content
            snapshot = await box.snapshot()
            await box.run("rm -r deep; touch other")
            await box.restore(snapshot)
            assert (await box.run("ls")).text == "deep\n"
            with pytest.raises(SandboxError, match="No such file"):
                await box.read("missing")
            result = await box.run(f": {'x' * 200_000}\nexit 4\n")
            assert (result.text, result.exit_status) == ("", 4)
        assert hosted.started is None


async def test_time_and_output_of_a_command_are_limited(tmp_path, monkeypatch) -> None:
    async with (
        hosted_pool(tmp_path, monkeypatch, output_bytes=1000) as (pool, hosted),
        pool.open({}) as box,
    ):
        slow = await box.run("sleep 60", timeout_s=0.2)
        assert (slow.limit, slow.exit_status) == ("time", 137)
        long = await box.run("yes | head -c 100000")
        assert (len(long.output), long.is_truncated, long.exit_status) == (1000, True, 0)
        assert not hosted.lifetimes
        box._sandbox._renewed_at -= 3000
        await box.run("true")
        assert hosted.lifetimes == [hosted.started["timeout"]]


async def test_what_prevents_a_start_is_reported(tmp_path, monkeypatch) -> None:
    async with hosted_pool(tmp_path, monkeypatch, key="e2b_other") as (pool, _):
        with pytest.raises(ValueError, match="api_key"):
            await pool.prepare()
        with pytest.raises(CallError, match="no such key"):
            async with pool.open({}):
                pass
