"""Routers in front of servers: which servers they list, and how a balancer that lists none is found out.

A router chooses a server for each request, while a run must know which server has which weights. A router
that lists its servers is therefore asked for them, and the run sends its requests to these.
"""

import json
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

from services.extras.fleets.kind import is_server_address

LISTS: Final = ("/workers", "/list_workers")
"""Paths at which routers list servers: SGLang's, and vLLM's (as SGLang's earlier ones)."""


def parse_servers(content: bytes) -> list[str]:
    """Returns the addresses of the servers that a router lists.

    Raises:
        ValueError: If the list is malformed, or has others than servers for whole responses over HTTP.
    """
    try:
        answer: Any = json.loads(content)
        if "workers" in answer:
            entries = [
                (entry["url"], entry.get("worker_type", "regular")) for entry in answer["workers"]
            ]
        else:
            entries = [(url, "regular") for url in answer["urls"]]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its list of servers is malformed ({error!r})") from error
    for url, kind in entries:
        if kind != "regular":
            raise ValueError(f"it lists {url} as {kind}; a fleet needs servers for whole responses")
        if not is_server_address(url):
            raise ValueError(f"it lists {url!r}, which is not http://HOST:PORT")
    return sorted({str(url).rstrip("/") for url, _ in entries})


def check_hosts(urls: Collection[str], allowed: Collection[str]) -> None:
    """Checks that a router names no hosts to which the run's token must not go.

    Args:
        allowed: Hosts of the specification's addresses, and those that the installation lists.

    Raises:
        ValueError: If it does.
    """
    for url in urls:
        host = (urlsplit(url).hostname or "").lower()
        if host not in allowed:
            raise ValueError(
                f"it lists {url}, whose host is neither in rollout.engine_arguments.addresses nor among the "
                "installation's reward_hosts; add it to one of them"
            )
