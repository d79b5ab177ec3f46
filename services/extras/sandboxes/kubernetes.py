"""Sandboxes in pods of a Kubernetes namespace that has no other pods and no egress.

The first process of a pod waits for the end of its standard input, a connection from this process. So a
pod's container ends when this process ends, however it ends. The ended pod uses no CPU and no memory, and the
next rollout deletes it.
"""

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlencode

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from services.common.http.connections import ReusedConnections
from services.common.runspec.rollout import IMAGE, SandboxSpec
from services.extras.sandboxes.exec_sandbox import ExecSandbox
from services.rollout.sandbox.base import (
    ANSWER_GRACE_S,
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    WORK_FOLDER,
    SandboxError,
    SandboxHosts,
)

LABEL: Final = "slipstream.dev/sandbox"
"""Label of the pods."""
_CONTAINER = "sandbox"
_REQUEST_TIMEOUT_S = 30.0
# Each frame begins with the number of its stream.
_PROTOCOL: Any = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
# A pod whose container waits for one of these reasons does not start without intervention.
_STUCK = frozenset(
    (
        *("CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull"),
        *("ImagePullBackOff", "InvalidImageName", "RunContainerError"),
    )
)
# The timeout ends the pod of a rollout that was killed before it connected.
_FIRST_PROCESS = (
    f"timeout -s KILL {START_TIMEOUT_S:.0f} head -c 1 > /dev/null || exit 1; "
    f'[ "$PWD" = / ] && cd {WORK_FOLDER}; pwd; cat > /dev/null; :'
)
"""Script of a pod's first process: waits for a connection, prints the working folder, waits for its end."""


class Pods:
    """Starts pods; the image needs ``sh``, ``head``, ``timeout``, ``base64`` and ``tar``.

    Args:
        hosts: Has the namespace and the API of the pods.
    """

    def __init__(self, spec: SandboxSpec, hosts: SandboxHosts) -> None:
        self._spec = spec
        self._hosts = hosts
        self._api = _Api(hosts)

    @property
    def max_starts(self) -> int:
        """Max simultaneous starts; the nodes do the work."""
        return self._spec.max_running

    async def prepare(self) -> None:
        """Checks the namespace and deletes ended pods in it.

        Raises:
            SandboxError: If the API cannot be reached, or the namespace does not deny egress.
        """
        namespace = self._hosts.namespace
        if not namespace:
            raise SandboxError(
                "rollout.sandbox.kind 'kubernetes' needs a namespace for its pods; set sandboxes.enabled in "
                "the chart, or SLIPSTREAM_ROLLOUT_SANDBOX_NAMESPACE"
            )
        policies = await self._api.call("GET", "networkpolicies", group="networking.k8s.io/v1")
        if not any(_denies_egress(policy["spec"]) for policy in policies["items"]):
            raise SandboxError(
                "rollout.sandbox.kind 'kubernetes': no network policy denies the egress of all pods in "
                f"namespace {namespace!r}; set sandboxes.enabled in the chart, or create a policy with "
                "podSelector: {}, policyTypes: [Egress] and no egress rule"
            )
        end_states = "status.phase!=Running,status.phase!=Pending,status.phase!=Unknown"
        await self._api.call(
            "DELETE", "pods", labelSelector=f"{LABEL}=true", fieldSelector=end_states
        )

    async def start(self, image: str) -> "Pod":
        """Starts a pod. Raises SandboxError."""
        if IMAGE.fullmatch(image) is None:
            raise SandboxError(f"expected the name of an image, got {image!r:.200}")
        pod = Pod(self._api, f"slipstream-sandbox-{secrets.token_hex(8)}")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._api.call("POST", "pods", body=self._manifest(pod.name, image))
                await pod.wait_ready()
        except TimeoutError as error:
            await pod.end()
            raise SandboxError(
                f"image {image!r} did not start within {START_TIMEOUT_S:g} s: {pod.state}"
            ) from error
        except BaseException:
            # The error of the start is the one to report.
            with suppress(SandboxError):
                await pod.end()
            raise
        return pod

    async def close(self) -> None:
        """Closes the connections to the API."""
        await self._api.close()

    def _manifest(self, name: str, image: str) -> dict[str, Any]:
        spec = self._spec
        limits = {
            "cpu": f"{spec.cpus:g}",
            "memory": str(spec.memory_bytes),
            "ephemeral-storage": str(spec.disk_bytes),
        }
        runtime = self._hosts.runtime_class
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LABEL: "true"}},
            "spec": {
                **({"runtimeClassName": runtime} if runtime else {}),
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "volumes": [{"name": "work", "emptyDir": {"sizeLimit": str(spec.disk_bytes)}}],
                "containers": [
                    {
                        "name": _CONTAINER,
                        "image": image,
                        "command": ["sh", "-c", _FIRST_PROCESS],
                        "stdin": True,
                        "stdinOnce": True,  # the input ends with the first connection
                        "resources": {"limits": limits},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": [{"name": "work", "mountPath": WORK_FOLDER}],
                    }
                ],
            },
        }


class Pod(ExecSandbox):
    """One pod.

    Attributes:
        state: Why the container does not run yet.
    """

    # The API takes a command as a part of the URL.
    max_command_bytes = 4 << 10

    def __init__(self, api: "_Api", name: str) -> None:
        super().__init__()
        self.name = name
        self.state = "the pod was not scheduled"
        self._api = api
        self._folder = ""
        self._connection: ClientConnection | None = None

    async def wait_ready(self) -> None:
        """Waits until commands can run. Raises SandboxError."""
        async with aclosing(self._api.watch(self.name)) as changes:
            async for status in changes:
                if self._runs(status):
                    break
        self._connection = await self._api.connect(
            self.name, "attach", stdin="true", stdout="true", container=_CONTAINER
        )
        await self._connection.send(bytes((_STDIN,)) + b"\n")
        output = b""
        while not output.endswith(b"\n"):
            stream, chunk = await _frame(self._connection)
            if stream == _STATUS:
                raise SandboxError(f"the pod's first process ended: {chunk[:500]!r}")
            output += chunk
        self._folder = output.decode().strip()

    async def _run(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> tuple[int, bytes, bool]:
        stdin_source = f"head -c {len(stdin)} |" if stdin else "</dev/null"
        # Without the redirection, this shell would write a message about a killed command to the output.
        limited = f"timeout -s KILL {timeout_s:g}"
        script = f'exec 3>&2 2>/dev/null; cd "$1" && {stdin_source} {limited} sh -c "$0" 2>&3 3>&-'
        async with (
            asyncio.timeout(timeout_s + ANSWER_GRACE_S),
            self._executing("sh", "-c", script, command, self._folder) as connection,
        ):
            result, _ = await asyncio.gather(
                _read(connection, output_bytes), _write(connection, stdin)
            )
            return result

    async def _end(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        async with asyncio.timeout(END_TIMEOUT_S):
            await self._api.call("DELETE", f"pods/{self.name}", is_optional=True)

    def _runs(self, status: Mapping[str, Any]) -> bool:
        """Returns True if the container runs. Raises SandboxError if it will not."""
        containers = status.get("containerStatuses") or [{}]
        state = containers[0].get("state", {})
        if "running" in state:
            return True
        waiting = state.get("waiting", {})
        unscheduled = (condition.get("message") for condition in status.get("conditions", ()))
        message = (
            waiting.get("message") or waiting.get("reason") or next(filter(None, unscheduled), "")
        )
        self.state = message or self.state
        if waiting.get("reason") in _STUCK or status.get("phase") in ("Failed", "Succeeded"):
            termination = state.get("terminated", {})
            reason = (
                message
                or termination.get("message")
                or termination.get("reason")
                or status.get("message")
            )
            raise SandboxError(f"the sandbox's pod does not start: {reason}")
        return False

    @asynccontextmanager
    async def _executing(self, *command: str) -> AsyncIterator[ClientConnection]:
        streams = {"stdin": "true", "stdout": "true", "stderr": "true"}
        connection = await self._api.connect(
            self.name, "exec", *command, container=_CONTAINER, **streams
        )
        try:
            yield connection
        finally:
            await connection.close()


class _Api:
    """Client of the Kubernetes API for the pods of one namespace."""

    def __init__(self, hosts: SandboxHosts) -> None:
        self._hosts = hosts
        self._tls: ssl.SSLContext | None = None
        authority = hosts.credentials / "ca.crt"
        if hosts.url.startswith("https:") and authority.exists():
            self._tls = ssl.create_default_context(cafile=str(authority))
        self._client = httpx.AsyncClient(
            base_url=hosts.url,
            transport=ReusedConnections(verify=self._tls),
            timeout=_REQUEST_TIMEOUT_S,
            trust_env=False,
        )

    async def call(
        self,
        method: str,
        name: str,
        *,
        group: str = "v1",
        body: Mapping[str, Any] | None = None,
        is_optional: bool = False,
        **query: str,
    ) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Args:
            name: Kind of the objects, or kind and name of one.
            is_optional: True to accept status 404, if the object does not exist.

        Raises:
            SandboxError: If the API refuses the request or does not answer.
        """
        request: dict[str, Any] = {"json": body} if body is not None else {}
        try:
            response = await self._client.request(
                method, self._path(name, group), params=query, headers=self._headers(), **request
            )
        except httpx.HTTPError as error:
            raise SandboxError(f"the Kubernetes API did not answer: {error!r}") from error
        if response.is_success or (is_optional and response.status_code == 404):
            return dict(response.json())
        raise _refusal(response.status_code, response.text)

    async def watch(self, pod: str) -> AsyncGenerator[Mapping[str, Any]]:
        """Yields the status of a pod now and after each change, without end. Raises SandboxError."""
        query = {"watch": "1", "fieldSelector": f"metadata.name={pod}"}
        while True:
            try:
                async with self._client.stream(
                    "GET", self._path("pods"), params=query, headers=self._headers(), timeout=None
                ) as response:
                    if not response.is_success:
                        raise _refusal(
                            response.status_code, (await response.aread()).decode(errors="replace")
                        )
                    async for line in response.aiter_lines():
                        event = json.loads(line)
                        if event["type"] in ("ADDED", "MODIFIED"):
                            yield event["object"].get("status", {})
                        elif event["type"] == "DELETED":
                            raise SandboxError("the sandbox's pod was deleted")
            except httpx.HTTPError as error:
                raise SandboxError(f"the Kubernetes API did not answer: {error!r}") from error

    async def connect(self, pod: str, action: str, *command: str, **query: str) -> ClientConnection:
        """Opens a WebSocket with the streams of a pod's first process (``attach``) or a new one (``exec``).

        Raises:
            SandboxError: If the API refuses the connection or does not answer.
        """
        query_text = urlencode([*query.items(), *(("command", argument) for argument in command)])
        address = self._hosts.url.replace("http", "ws", 1) + self._path(f"pods/{pod}/{action}")
        try:
            return await connect(
                f"{address}?{query_text}",
                ssl=self._tls,
                additional_headers=self._headers(),
                subprotocols=[_PROTOCOL],
                open_timeout=_REQUEST_TIMEOUT_S,
                max_size=None,
                proxy=None,
            )
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace")
            raise _refusal(error.response.status_code, body) from error
        except (InvalidHandshake, OSError) as error:
            raise SandboxError(f"the Kubernetes API did not connect: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()

    def _path(self, name: str, group: str = "v1") -> str:
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        return f"{root}/namespaces/{self._hosts.namespace}/{name}"

    def _headers(self) -> dict[str, str]:
        # Kubernetes rotates the token, so it is read again for each request.
        try:
            token = (self._hosts.credentials / "token").read_text(encoding="ascii").strip()
        except OSError as error:
            raise SandboxError(
                f"rollout.sandbox.kind 'kubernetes' needs a token of the Kubernetes API: {error}; set "
                "sandboxes.enabled in the chart, or SLIPSTREAM_ROLLOUT_KUBERNETES_CREDENTIALS"
            ) from error
        return {"Authorization": f"Bearer {token}"}


async def _read(connection: ClientConnection, max_bytes: int) -> tuple[int, bytes, bool]:
    """Reads all output; returns the exit status, the first bytes, and True if there were more."""
    output, is_truncated = bytearray(), False
    while True:
        stream, chunk = await _frame(connection)
        if stream == _STATUS:
            break
        room = max_bytes - len(output)
        is_truncated |= len(chunk) > room
        output += chunk[:room]
    await connection.close()  # the process may not have read all of its input
    return _exit_status(chunk), bytes(output), is_truncated


async def _write(connection: ClientConnection, content: bytes) -> None:
    with suppress(ConnectionClosed):  # the reader reports it
        for begin in range(0, len(content), 1 << 16):
            await connection.send(bytes((_STDIN,)) + content[begin : begin + (1 << 16)])


async def _frame(connection: ClientConnection) -> tuple[int, bytes]:
    """Returns the number of a stream and its next bytes. Raises SandboxError if the connection ends."""
    try:
        frame = await connection.recv(decode=False)
    except ConnectionClosed as error:
        raise SandboxError(
            f"the connection to the sandbox's pod ended ({error}); if the pod was evicted or killed, raise "
            "rollout.sandbox.memory_bytes or disk_bytes, or lower max_running"
        ) from error
    return (frame[0], frame[1:]) if frame else (_STDERR, b"")


def _exit_status(status: bytes) -> int:
    """Returns the exit status from the status object that ends a process's streams. Raises SandboxError."""
    verdict = json.loads(status)
    if verdict.get("status") == "Success":
        return 0
    causes = (verdict.get("details") or {}).get("causes") or ()
    codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
    if not codes:
        raise SandboxError(f"the sandbox's pod cannot run the command: {verdict.get('message')}")
    return int(codes[0])


def _denies_egress(policy: Mapping[str, Any]) -> bool:
    selector = policy.get("podSelector") or {}
    is_for_all = not selector.get("matchLabels") and not selector.get("matchExpressions")
    return is_for_all and "Egress" in policy.get("policyTypes", ()) and not policy.get("egress")


def _refusal(status: int, text: str) -> SandboxError:
    try:
        text = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:500]
    return SandboxError(f"the Kubernetes API refused a request ({status}): {text or 'no message'}")
