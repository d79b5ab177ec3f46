"""Roles of those who use the API. The command line imports it, so it needs no database."""

from typing import Literal

Role = Literal["viewer", "operator", "admin"]

_RANK: dict[Role, int] = {"viewer": 0, "operator": 1, "admin": 2}


def covers(role: Role, needed: Role) -> bool:
    """Whether whoever has a role may do what needs another one."""
    return _RANK[role] >= _RANK[needed]
