"""A server of Google Cloud Storage's XML protocol on loopback.

It is moto's server of the S3 protocol, which has the same requests for objects: to write one, also in parts,
to read a range, to list, and to delete. Only the credentials differ, so the server takes any. Emulators of
Google Cloud Storage (``fake-gcs-server``, ``gcp-storage-emulator``) lack uploads in the XML protocol, which
is the one that obstore speaks.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import s3

_SERVER = """
import logging, sys, threading
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication, MotoRequestHandler, create_backend_app)
from werkzeug.serving import make_server

LOGIN = (
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=any")
backend = DomainDispatcherApplication(create_backend_app)

def answer(environ, start_response):
    return backend({**environ, "HTTP_AUTHORIZATION": LOGIN}, start_response)

server = make_server("127.0.0.1", 0, answer, True, request_handler=MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


@contextmanager
def gcs_server() -> Iterator[int]:
    """Starts a server whose objects are in its memory; yields its port."""
    with s3.started(_SERVER) as port:
        yield port


def environment(port: int, folder: Path) -> dict[str, str]:
    """Returns the environment variables of a client of the server.

    Args:
        folder: Gets the file of a service account that names the server and needs no token.
    """
    account = folder / "account.json"
    keys = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    address = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}
    account.write_text(json.dumps({**keys, **address}))
    return {"GOOGLE_SERVICE_ACCOUNT": str(account)}


def new_bucket(port: int) -> str:
    """Creates a bucket with a new name; returns its URL."""
    # No hyphen: obstore encodes it in the path, and moto takes the bucket for another one.
    name = f"bucket{time.time_ns()}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=30):
        return f"gs://{name}"
