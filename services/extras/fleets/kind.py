"""Properties of the engines ``vllm-server`` and ``sglang-server``. Imports neither an engine nor torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from services.common.runspec.engines import EngineKind
from services.extras.fleets.protocol import MAX_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKind(EngineKind):
    """An engine whose servers are named in its arguments."""

    def check(self, arguments: Mapping[str, Any], *, most_tokens: int) -> None:
        super(FleetKind, self).check(arguments, most_tokens=most_tokens)
        if problem := next(_problems(arguments), None):
            raise ValueError(problem)


def _problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    key = "rollout.engine_arguments"
    addresses = arguments.get("addresses")
    if (name := arguments.get("fleet")) is not None and addresses is None:
        if not isinstance(name, str):
            yield f"{key}.fleet must be the name of a fleet of this installation, got {name!r}"
        # The controller knows its servers, and replaces the name by them.
        addresses = ["http://fleet:1"]
    if not isinstance(addresses, list | tuple) or not addresses:
        yield (
            f"{key}.addresses must list the servers of this rollout.engine, such as "
            f"[http://server-0:8000], got {addresses!r}"
        )
        return
    for address in addresses:
        if not is_server_address(address):
            yield (
                f"{key}.addresses must be http://HOST:PORT or https://HOST:PORT without a path, got "
                f"{address!r}"
            )
    if len({str(address).rstrip("/") for address in addresses}) != len(addresses):
        yield f"{key}.addresses names a server twice: {', '.join(map(str, addresses))}; remove one"
    share = arguments.get("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= MAX_SHARE:
        yield (
            f"{key}.share must be a number in (0, {MAX_SHARE:.0f}], the run's weight among the runs that "
            f"share the servers, got {share!r}"
        )
    token = arguments.get("token", "")
    # Workers have the secret's value in place of its name.
    is_secret = isinstance(token, Mapping) and set(token) == {"secret"}
    if not (is_secret or isinstance(token, str)):
        yield (
            f'{key}.token must be {{"secret": "NAME"}}, where NAME is a file in the installation\'s secrets '
            f"directory, got {type(token).__name__}"
        )


def is_server_address(address: Any) -> bool:
    """Returns True for ``http://HOST:PORT`` and ``https://HOST:PORT``."""
    if not isinstance(address, str) or not address.isprintable() or " " in address:
        return False
    try:
        address_parts = urlsplit(address)
        has_host = bool(address_parts.hostname) and address_parts.port != 0
    except ValueError:
        return False
    is_bare = address_parts.path in ("", "/") and not (
        address_parts.query or address_parts.fragment or address_parts.username
    )
    return address_parts.scheme in ("http", "https") and has_host and is_bare


KIND: Final = FleetKind(
    adapter="services.extras.fleets.vllm_server:build",
    arguments=frozenset({"addresses", "fleet", "token", "max_model_len", "share"}),
    harmless_arguments=frozenset({"addresses", "fleet", "token", "max_model_len"}),
    is_remote=True,
    takes_adapters=True,
    takes_images=True,
    length_argument="max_model_len",
    why_unquantized="its servers decide the precision of their products",
)
SGLANG_KIND: Final = FleetKind(
    adapter="services.extras.fleets.sglang_server:build",
    arguments=frozenset({"addresses", "fleet", "token", "context_length"}),
    harmless_arguments=frozenset({"addresses", "fleet", "token", "context_length"}),
    is_remote=True,
    length_argument="context_length",
    reports_top_logprobs=True,
    why_unquantized="its servers decide the precision of their products",
)
