"""Identity of a process: its certificate and tokens, how tokens are issued, and how peers are verified.

A process sets its identity once, in its ``main``; servers and channels opened inside that block use
it. A process without one trusts every peer, which the settings allow only on loopback.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import InvalidArgumentError, UnauthenticatedError
from services.common.security.tls import Certificate, Tls, peer_name

PREFIX = "slr_"
SERVICES = "services"
"""Bearer that may act for every run: the controller, the transferqueue and its shards."""


def issue_token(key: bytes, bearer: str) -> str:
    """Returns the token of a run, or of the services.

    A token has the name of its bearer and a keyed digest of that name, so any holder of the key can
    verify it locally. Workers get the token of their run and never the key.

    Args:
        bearer: Id of a run, or :data:`SERVICES`.
    """
    return f"{PREFIX}{bearer}.{_digest(key, bearer)}"


def bearer_of(key: bytes, token: str) -> str | None:
    """Returns the bearer of a token; None if it was not issued with the key."""
    bearer, _, digest = token.removeprefix(PREFIX).partition(".")
    if not token.startswith(PREFIX) or not bearer:
        return None
    is_ours = hmac.compare_digest(digest.encode(), _digest(key, bearer).encode())
    return bearer if is_ours else None


def _digest(key: bytes, bearer: str) -> str:
    raw = hmac.digest(key, bearer.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Certificate, keys and token of this process."""

    tls: Tls | None = None
    """Certificate for mutual TLS; None for plain text."""
    issue: Callable[[str], Certificate] | None = field(default=None, repr=False)
    """Issues a certificate for a DNS name; only some services have it."""
    key: bytes = field(default=b"", repr=False)
    """Key that signs and verifies the tokens of all runs; only services have it."""
    run_token: str = field(default="", repr=False)
    """Token of the one run that a worker belongs to."""

    @property
    def is_known(self) -> bool:
        """True if this process sends and requires tokens."""
        return bool(self.key or self.run_token)

    def token_for(self, run_id: str = "") -> str:
        """Returns the token for calls to a worker of a run, or else to a service; empty without identity."""
        if self.key:
            return issue_token(self.key, run_id or SERVICES)
        return self.run_token

    def certificate_for(self, run_id: str) -> Certificate | None:
        """Returns a new certificate for the workers of a run; None if this process issues none."""
        return self.issue(peer_name("worker", run_id)) if self.issue else None

    def bearer(self, authorization: str) -> str:
        """Returns the bearer of the token in an ``authorization`` header: a run's id, or ``services``.

        Raises:
            UnauthenticatedError: If it has no token that this process can verify.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            if self.key and (bearer := bearer_of(self.key, token)) is not None:
                return bearer
            if self.run_token and hmac.compare_digest(token.encode(), self.run_token.encode()):
                return SERVICES
        raise UnauthenticatedError(
            "the call has no valid token; a worker receives its token from the controller in "
            "RUN_TOKEN, and services share service_key_file"
        )


_identity: ContextVar[Identity] = ContextVar("identity", default=Identity())  # noqa: B039 -- frozen


def current_identity() -> Identity:
    return _identity.get()


@contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Uses an identity until the block ends."""
    token = _identity.set(identity)
    try:
        yield
    finally:
        _identity.reset(token)


def read_key(file: Path) -> bytes:
    """Reads the service key of the installation.

    Raises:
        InvalidArgumentError: If the file cannot be read or the key is too short to be secret.
    """
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {error.strerror}", file=file) from error
    if len(key) < MIN_KEY_BYTES:
        raise InvalidArgumentError(
            f"{file} has {len(key)} bytes, but a key needs at least {MIN_KEY_BYTES} random bytes, for "
            "example from 'openssl rand -hex 32'"
        )
    return key
