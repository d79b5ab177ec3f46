"""Azurite, the server of Azure's blob protocol of the npm package ``azurite``, on loopback."""

import base64
import hashlib
import hmac
import http.client
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.helpers.ports import free_port

_SCRIPT = os.environ.get("SLIPSTREAM_AZURITE", "")
_ACCOUNT = "devstoreaccount1"
# The well-known key of the emulator's account.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_S = 60.0

needs_azurite = pytest.mark.skipif(
    not _SCRIPT,
    reason="no Azurite: npm install azurite, and set SLIPSTREAM_AZURITE to its dist/src/blob/main.js",
)


@contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """Starts the server; yields its port."""
    port = free_port()
    command = ["node", _SCRIPT, "--silent", "--blobPort", str(port), "--location", str(folder)]
    process = subprocess.Popen(
        [*command, "--skipApiVersionCheck", "--disableTelemetry"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                _create_container(port, "started")
                break
            except OSError:
                assert time.monotonic() < deadline, "Azurite does not answer"
                time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def environment(port: int) -> dict[str, str]:
    """Returns the environment variables of a client of the server."""
    return {
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
    }


def new_container(port: int) -> str:
    """Creates a container with a new name; returns its URL."""
    name = f"container-{time.time_ns()}"
    _create_container(port, name)
    return f"az://{name}"


def _create_container(port: int, name: str) -> None:
    headers = {
        "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "x-ms-version": "2021-08-06",
    }
    path = f"/{_ACCOUNT}/{name}"
    canonical = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    text = "PUT" + 12 * "\n" + canonical + f"/{_ACCOUNT}{path}\nrestype:container"
    signature = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status in (201, 409), answer.read()
    finally:
        connection.close()
