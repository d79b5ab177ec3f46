"""A request as it is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a controller; what is None is not sent."""

    method: str
    path: str
    """With names in braces."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What stands for them."""
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    makes_no_second: bool = False
    """Whether it may be sent again although it does not only read."""

    @property
    def may_repeat(self) -> bool:
        """Whether asking again changes nothing more: it reads, or names what it makes by a key."""
        return self.method == "GET" or self.makes_no_second or "idempotency-key" in self.headers

    def options(self) -> dict[str, Any]:
        """What httpx sends it by."""
        path = self.path.format(**{name: quote(of, safe="") for name, of in self.names.items()})
        options = {"params": given(self.query), "headers": dict(self.headers), "json": self.body}
        return {"method": self.method, "url": path, **options}


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
