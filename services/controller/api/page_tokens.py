"""Page tokens: signed positions in a list, so that clients cannot forge one."""

import base64
import hashlib
import hmac
import secrets

from services.common.errors import InvalidArgumentError

_MAC_BYTES = 12


class PageTokens:
    """Creates and reads page tokens; tokens of an earlier process are refused."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, position: str, scope: str) -> str:
        """Returns the token that continues after ``position`` in the list named ``scope``."""
        return base64.urlsafe_b64encode(self._mac(position, scope) + position.encode()).decode()

    def read(self, token: str, scope: str) -> str | None:
        """Returns the position of a token; None for the first page.

        Raises:
            InvalidArgumentError: If this object did not create the token for this list.
        """
        if not token:
            return None
        try:
            raw = base64.urlsafe_b64decode(token.encode())
            position = raw[_MAC_BYTES:].decode()
        except ValueError:
            raw, position = b"", ""
        if not hmac.compare_digest(raw[:_MAC_BYTES], self._mac(position, scope)):
            raise InvalidArgumentError(
                "page_token is not one that this list returned; begin again without it"
            )
        return position

    def _mac(self, position: str, scope: str) -> bytes:
        text = f"{scope}\0{position}".encode()
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]
