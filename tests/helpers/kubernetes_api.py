"""Fake Kubernetes API for the pods of sandboxes: a pod is a process of this host.

The fake checks tokens, and serves watch, attach and exec (over WebSockets) as the real API does. The input of
a container ends with its first connection (``stdinOnce``).
"""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, STDOUT
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from services.rollout.sandbox.base import SandboxHosts

TOKEN = "token-of-the-rollout"
DENY_EGRESS = {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}


def _kill_all_in(folder: Path) -> None:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == folder:
                os.kill(int(path.name), signal.SIGKILL)


class KubernetesApi:
    """Fake API of one namespace.

    Attributes:
        pods: Pods by name, as manifests with their status.
        policies: Network policies.
        stuck: Reason why containers do not start; empty if they do.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods = {}
        self.policies = [DENY_EGRESS]
        self.stuck = ""
        self.processes = {}
        self.waiting = []
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def serving(self):
        """Serves the API until the block ends; yields a rollout's access to it."""
        (self.folder / "token").write_text(TOKEN)
        root = "/api/v1/namespaces/boxes/pods"
        app = Starlette(
            routes=[
                Route("/apis/networking.k8s.io/v1/namespaces/boxes/networkpolicies", self._listed),
                Route(root, self._create, methods=["POST"]),
                Route(root, self._watch, methods=["GET"]),
                Route(root, self._delete_ended, methods=["DELETE"]),
                Route(root + "/{name}", self._delete, methods=["DELETE"]),
                WebSocketRoute(root + "/{name}/attach", self._attach),
                WebSocketRoute(root + "/{name}/exec", self._execute),
            ]
        )
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        try:
            while not server.started:  # noqa: ASYNC110 -- uvicorn has no event
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield SandboxHosts(
                namespace="boxes", url=f"http://127.0.0.1:{port}", credentials=self.folder
            )
        finally:
            for name in [*self.processes]:
                await self._end(name)
            server.should_exit = server.force_exit = True
            await serving

    async def _listed(self, request: Request) -> JSONResponse:
        return self._refused(request) or JSONResponse({"items": self.policies})

    async def _create(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        pod = await request.json()
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        self.pods[name] = {**pod, "status": {"phase": "Pending"}}
        if self.stuck:
            await self._set(name, "Pending", {"waiting": {"reason": self.stuck, "message": "no"}})
            return JSONResponse(pod, 201)
        folder = self.folder / name
        folder.mkdir()
        process = await asyncio.create_subprocess_exec(
            *container["command"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        self.processes[name] = process
        self.waiting.append(asyncio.ensure_future(self._wait(name, process)))
        await self._set(name, "Running", {"running": {}})
        return JSONResponse(pod, 201)

    async def _wait(self, name: str, process) -> None:
        status = await process.wait()
        if name in self.pods:
            phase = "Failed" if status else "Succeeded"
            await self._set(name, phase, {"terminated": {"exitCode": status}})

    async def _set(self, name: str, phase: str, state) -> None:
        async with self.changed:
            self.pods[name]["status"] = {"phase": phase, "containerStatuses": [{"state": state}]}
            self.changed.notify_all()

    async def _watch(self, request: Request) -> StreamingResponse:
        if refused := self._refused(request):
            return refused
        name = request.query_params["fieldSelector"].removeprefix("metadata.name=")

        async def events():
            last_status = None
            while True:
                async with self.changed:
                    pod = self.pods.get(name, {})
                    if pod.get("status") == last_status:
                        await self.changed.wait()
                        continue
                last_status = pod.get("status")
                kind = "MODIFIED" if pod else "DELETED"
                yield json.dumps({"type": kind, "object": pod}) + "\n"

        return StreamingResponse(events())

    async def _delete_ended(self, request: Request) -> JSONResponse:
        assert "status.phase!=Running" in request.query_params["fieldSelector"]
        ended = ("Succeeded", "Failed")
        self.pods = {
            name: pod for name, pod in self.pods.items() if pod["status"]["phase"] not in ended
        }
        return self._refused(request) or JSONResponse({})

    async def _delete(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if refused := self._refused(request):
            return refused
        if name not in self.pods:
            return JSONResponse({"message": f'pods "{name}" not found'}, 404)
        await self._end(name)
        return JSONResponse({})

    async def _end(self, name: str) -> None:
        self.pods.pop(name, None)
        if process := self.processes.pop(name, None):
            _kill_all_in(self.folder / name)
            await process.wait()

    async def _attach(self, socket: WebSocket) -> None:
        await self._accept(socket)
        process = self.processes[socket.path_params["name"]]

        async def read() -> None:
            while chunk := await process.stdout.read(4096):
                await socket.send_bytes(b"\1" + chunk)

        reading = asyncio.ensure_future(read())
        try:
            while True:
                frame = await socket.receive_bytes()
                assert frame[0] == 0
                process.stdin.write(frame[1:])
        except WebSocketDisconnect:
            process.stdin.close()
            reading.cancel()

    async def _execute(self, socket: WebSocket) -> None:
        await self._accept(socket)
        name = socket.path_params["name"]
        process = await asyncio.create_subprocess_exec(
            *socket.query_params.getlist("command"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=self.folder / name,
        )

        async def write() -> None:
            with suppress(WebSocketDisconnect, ConnectionError):
                while True:
                    process.stdin.write((await socket.receive_bytes())[1:])

        writing = asyncio.ensure_future(write())
        while chunk := await process.stdout.read(4096):
            await socket.send_bytes(b"\1" + chunk)
        status = await process.wait()
        causes = [{"reason": "ExitCode", "message": str(status)}]
        ended = (
            {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            if status
            else {"status": "Success"}
        )
        await socket.send_bytes(b"\3" + json.dumps(ended).encode())
        writing.cancel()
        await socket.close()

    async def _accept(self, socket: WebSocket) -> None:
        assert socket.headers["authorization"] == f"Bearer {TOKEN}"
        await socket.accept("v4.channel.k8s.io")

    def _refused(self, request: Request) -> JSONResponse | None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"message": "Unauthorized"}, 401)
        return None
