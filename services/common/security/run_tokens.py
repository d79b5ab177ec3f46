"""Tokens that authenticate services of one installation and the workers of a run.

A token has the name of its bearer and a keyed digest of that name, so any holder of the key can
verify it locally. Workers get the token of their run and never the key.
"""

import base64
import hashlib
import hmac

PREFIX = "slr_"
SERVICES = "services"
"""Bearer that may act for every run: the controller, the transferqueue and its shards."""


def issue_token(key: bytes, bearer: str) -> str:
    """Returns the token of a run, or of the services.

    Args:
        key: Service key of the installation.
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
