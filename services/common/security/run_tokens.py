"""Tokens by which the services of one installation know each other and the workers of a run.

A token names its bearer and carries a keyed digest of that name, so whoever holds the key checks it
without asking anybody. Workers get the token of their run and never the key.
"""

import base64
import hashlib
import hmac

PREFIX = "slr_"
SERVICES = "services"
"""The bearer that may act for every run: the controller, the transferqueue and its shards."""


def issue_token(key: bytes, bearer: str) -> str:
    """The token of a run, or of the services themselves.

    Args:
        key: Secret of the installation.
        bearer: Id of a run, or :data:`SERVICES`.
    """
    return f"{PREFIX}{bearer}.{_digest(key, bearer)}"


def bearer_of(key: bytes, token: str) -> str | None:
    """Whose token this is; None if it was not issued with the key."""
    bearer, _, digest = token.removeprefix(PREFIX).partition(".")
    if not token.startswith(PREFIX) or not bearer:
        return None
    is_ours = hmac.compare_digest(digest.encode(), _digest(key, bearer).encode())
    return bearer if is_ours else None


def _digest(key: bytes, bearer: str) -> str:
    raw = hmac.digest(key, bearer.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
