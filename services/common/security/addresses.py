"""Finds the network addresses in texts of a specification, and the hosts that they name."""

import ipaddress
import re
import unicodedata
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

# Words of a name in any spelling: base_url, baseUrl, API-Endpoint.
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ADDRESS_WORDS: Final = frozenset(
    (
        *("addr", "address", "addresses", "broker", "brokers", "connection", "domain", "domains"),
        *("dsn", "endpoint", "endpoints", "fqdn", "gateway", "host", "hostname", "hosts", "ip"),
        *("origin", "peer", "peers", "proxies", "proxy", "registry", "server", "servers"),
        *("socket", "uri", "url", "urls", "webhook"),
    )
)
_ADDRESS_NAMES: Final = (
    *(["host", "name"], ["domain", "name"], ["server", "name"], ["node", "name"]),
    *(["api", "base"], ["connection", "string"], ["conn", "string"]),
)
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]{0,40}:/{2,}[^\s\"'<>]{0,2000}", re.IGNORECASE)
_SEPARATORS: Final = re.compile(
    r"(?i)[\s,;|=\"'(){}<>@]+|\\+|/{2,}|(?<![a-z])[a-z]+:/|(?<![\w.])[a-z]+:(?=\d+\.)|(?<=[\w\]]):(?=/)"
)
"""Separators of addresses in a list, a command or JSON text, and before one that has no scheme."""
# A host without letters, such as 16 in 16:9, is a number, unless it is as long as an IPv4 address is.
_HOST_AND_PORT: Final = re.compile(
    r"(?P<host>\[[0-9a-f:.%]+\]|(?=[\w.-]*[a-z_])[\w.-]+|\d+(?:\.\d+){1,3}|\d{8,12}):\d{1,5}(?:[/?#].*)?",
    re.IGNORECASE | re.DOTALL,
)
# Forms of an IPv4 address that no number has: 0x7f000001, 0177.0.0.1, 127.1. Digits alone may be of a phone.
_OLD_IP: Final = re.compile(
    r"0x[\da-f]{7,8}|(?:0x[\da-f]+\.|0\d+\.(?=[^.]+\.[^.]+\.))(?:0x[\da-f]+|\d+)(?:\.(?:0x[\da-f]+|\d+)){0,2}"
    r"|127(?:\.\d+){1,2}"
)
_SSH_PATH: Final = re.compile(r"[\w.-]+@(?P<host>\[[0-9a-f:.%]+\]|[\w.-]+):\S*", re.IGNORECASE)
_IMAGE_REGISTRY: Final = re.compile(
    r"(?P<host>localhost|[\w-]+(?:\.[\w-]+)+|\[[0-9a-f:.]+\]|[\w.-]+(?=:))(?::\d+)?/"
)


def hosts_in(text: str) -> set[str]:
    """Returns the hosts of all URLs and IP addresses in a text, of ``host:port``, and of local names."""
    text = unicodedata.normalize("NFKC", text).replace("\N{IDEOGRAPHIC FULL STOP}", ".")
    # Readers of URLs drop tabs and line breaks, and some take a backslash for a slash.
    forms = f"{text} {joined}" if " " not in (joined := re.sub(r"[\t\r\n]", "", text)) else text
    forms = f"{forms} {forms.replace(chr(92), '/')}"
    hosts = {
        _host_of(match[0])
        for match in _URL.finditer(forms if "://" in forms else "")
        if match[0].partition(":")[0].lower() not in ("file", "data")
    }
    stripped = text.strip().rstrip(".")
    if address := _HOST_AND_PORT.fullmatch(stripped) or _SSH_PATH.fullmatch(stripped):
        hosts.add(address["host"].strip("[]").lower())
    for candidate in _SEPARATORS.split(text):
        address = _HOST_AND_PORT.fullmatch(candidate)
        host = (address["host"] if address else candidate.partition("/")[0]).strip("[].").lower()
        is_local = host == "localhost" or host.endswith((".internal", ".svc", ".cluster.local"))
        # Digits with a port are no phone number; fewer may be a date with a time.
        is_number = bool(address) and host.isdecimal() and len(host) > 8
        is_ip = (re.search(r"\d", host) or candidate == stripped) and _is_ip(host)
        if is_local or is_number or is_ip or _OLD_IP.fullmatch(host):
            hosts.add(host)
    return hosts


def names_address(name: str) -> bool:
    """Returns True if the name of an argument says that its value is an address, such as ``base_url``."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] in _ADDRESS_WORDS or words[-2:] in _ADDRESS_NAMES)


def host_of(text: str) -> str:
    """Returns the host of an address in any form: a URL, ``host:port``, or a host alone."""
    return next(iter(hosts_in(text)), "") or _host_of(f"//{text.strip()}")


def registry_of(image: str) -> str:
    """Returns the host of the registry that an image's name has; empty for the default registry."""
    address = _IMAGE_REGISTRY.match(image)
    return address["host"].strip("[]").lower() if address else ""


def is_private(host: str) -> bool:
    """Returns True if a host is an IP address or a name that only a local network resolves."""
    is_local = host.endswith((".internal", ".local", ".svc", ".localhost"))
    return bool(host) and (is_local or "." not in host or _is_ip(host))


def _host_of(url: str) -> str:
    with suppress(ValueError):  # invalid brackets
        return (urlsplit(url).hostname or "").lower().rstrip(".")
    return url.lower()


def _is_ip(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(text.strip("[]").partition("%")[0]))
    return False
