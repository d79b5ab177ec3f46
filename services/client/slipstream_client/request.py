"""An HTTP request of the client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a controller. Query parameters that are None are not sent."""

    method: str
    path: str
    """Path template with ``{name}`` placeholders."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Values of the placeholders."""
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    is_idempotent: bool = False
    """True if a request that is not a GET may be repeated."""

    @property
    def may_retry(self) -> bool:
        """True if a repetition has no further effect: a GET, or a request with an idempotency key."""
        return self.method == "GET" or self.is_idempotent or "idempotency-key" in self.headers

    def options(self) -> dict[str, Any]:
        """Returns the arguments of ``httpx.AsyncClient.request``."""
        path = self.path.format(**{name: quote(of, safe="") for name, of in self.names.items()})
        options = {
            "params": without_none(self.query),
            "headers": dict(self.headers),
            "json": self.body,
        }
        return {"method": self.method, "url": path, **options}


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
