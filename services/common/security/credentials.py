"""What a process shows to its peers and by what it knows them: certificates and tokens.

A process takes its identity on once, in its ``main``; servers and channels opened inside that block use it.
A process without one trusts whoever reaches it, which the settings allow on loopback only.
"""

import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import InvalidArgumentError, UnauthenticatedError
from services.common.security.run_tokens import SERVICES, bearer_of, issue_token
from services.common.security.tls import Certificate, Tls, peer_name

MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is."""

    tls: Tls | None = None
    """Certificate for mutual TLS; None talks in plain text."""
    issue: Callable[[str], Certificate] | None = field(default=None, repr=False)
    """Makes the certificate of a DNS name; only services have it, and not all of them."""
    key: bytes = field(default=b"", repr=False)
    """Signs and checks the tokens of all runs; only services have it."""
    run_token: str = field(default="", repr=False)
    """Token of the one run that a worker belongs to."""

    @property
    def is_known(self) -> bool:
        """Whether this process shows and asks for tokens."""
        return bool(self.key or self.run_token)

    def token_for(self, run_id: str = "") -> str:
        """The token to show to a worker of a run, or with no run to a service; empty without identity."""
        if self.key:
            return issue_token(self.key, run_id or SERVICES)
        return self.run_token

    def certificate_for(self, run_id: str) -> Certificate | None:
        """A new certificate for the workers of a run; None where this process makes none."""
        return self.issue(peer_name("worker", run_id)) if self.issue else None

    def bearer(self, authorization: str) -> str:
        """Whose token an ``authorization`` header holds: a run's id, or ``services``.

        Raises:
            UnauthenticatedError: If it holds none that this process knows.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            if self.key and (found := bearer_of(self.key, token)) is not None:
                return found
            if self.run_token and hmac.compare_digest(token.encode(), self.run_token.encode()):
                return SERVICES
        raise UnauthenticatedError(
            "no token that is known here came; workers get theirs from the controller that starts them, in "
            "RUN_TOKEN, and services share service_key_file"
        )


_identity: ContextVar[Identity] = ContextVar("identity", default=Identity())  # noqa: B039 -- frozen


def current_identity() -> Identity:
    """The identity of this process."""
    return _identity.get()


@contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Take an identity on until the block ends."""
    token = _identity.set(identity)
    try:
        yield
    finally:
        _identity.reset(token)


def read_key(file: Path) -> bytes:
    """The key of the installation.

    Raises:
        InvalidArgumentError: If the file cannot be read or the key is too short to be secret.
    """
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {error.strerror}", file=file) from error
    if len(key) < MIN_KEY_BYTES:
        raise InvalidArgumentError(
            f"{file} holds {len(key)} bytes; a key needs {MIN_KEY_BYTES} random ones, for example from "
            "'openssl rand -hex 32'"
        )
    return key
