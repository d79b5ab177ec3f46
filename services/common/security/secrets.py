"""Secrets by reference: a specification has ``{"secret": "NAME"}``, a worker has the file ``NAME``.

A literal secret would be stored, shown and logged with its run, so it is rejected.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from services.common.errors import FailedPreconditionError
from services.common.runspec.base import SpecPart
from services.common.runspec.run import RunSpec

_Part = TypeVar("_Part", bound=SpecPart)

# Words of a name in any spelling: api_key, apiKey, X-API-Key.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Names of secrets, in words; eos_token and similar are names of text tokens.
_SECRET_NAME = re.compile(
    r"(^|.* )(apikey|auth|authorization|bearer|cookie|credentials?|passphrase|passwd|password|pwd|secrets?"
    r"|token|(access|account|admin|api|auth|client|encryption|private|secret|service|signing) keys?)"
)
_TEXT_TOKEN = re.compile(
    r"(.* )?(answer|assistant|audio|begin|bos|cls|end|eos|first|image|last|mask|next|pad|per|prompt|sep"
    r"|special|start|stop|system|think|thinking|tool|unk|user|video) token"
)
# Every repetition is bounded, as a text may be as long as a specification.
_URL_USER = re.compile(
    r"\w://[^/?#\s@:]{0,200}:[^/?#\s@]{1,500}@|\b(https?|grpcs?)://[^/?#\s@]{1,500}@", re.IGNORECASE
)
_URL_PARAMETER = re.compile(r"[?&;]([\w.-]{1,64})=[^&;#\s]")
_SIGNATURES = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
_SECRET_VALUE = re.compile(
    r"^bearer\s+\S+$|^(basic|token)\s+(?=\S*\d)[\w.~+/=-]{8,}$"
    r"|\b((proxy-)?authorization|x-api-key)\s*[:=]\s*\S+"
    r"|(?<![\w-])--?[\w-]{0,40}(token|api-?key|password|passwd|secret)=\S+"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
    r"|\b(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|AIza)(?=[\w-]{0,60}\d)[\w-]{16}"
    r"|\beyJ[\w-]{8,500}\.eyJ[\w-]{8}",
    re.IGNORECASE,
)
_FIX: Final = (
    'a specification must not contain secrets; use {"secret": "NAME"}, where NAME is a file in the '
    "installation's secrets directory"
)
_FIX_URL: Final = (
    "the URL has a user, a password or a token, but a specification must not contain secrets; remove it, and "
    'set the service\'s token to {"secret": "NAME"}, where NAME is a file in the installation\'s '
    "secrets directory"
)


def find_plain_secrets(spec: RunSpec) -> list[str]:
    """Returns the keys of a specification whose values look like literal secrets.

    Returns:
        One line per key: the key and the fix, never the value.
    """
    plain_secrets = _plain_secrets(spec.model_dump(mode="json"), "", is_secret=False)
    return [f"{key.removeprefix('.')}: {fix}" for key, fix in dict(plain_secrets).items()]


def _plain_secrets(value: Any, key: str, *, is_secret: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if _URL_USER.search(value) or _has_secret_parameter(value):
            yield key, _FIX_URL
        elif (value and is_secret) or _SECRET_VALUE.search(value):
            yield key, _FIX
    elif isinstance(value, Mapping):
        if _is_by_name(value):
            return
        # The usual form of headers and variables: {"name": "Authorization", "value": ...}.
        is_pair = any(_is_secret_name(value.get(name)) for name in ("name", "key", "header"))
        for name, inner in value.items():
            yield from _plain_secrets(name, key, is_secret=False)
            is_named = is_secret or _is_secret_name(name) or (is_pair and name == "value")
            yield from _plain_secrets(inner, f"{key}.{name}", is_secret=is_named)
    elif isinstance(value, Sequence):
        is_pair = len(value) == 2 and _is_secret_name(value[0])
        for index, inner in enumerate(value):
            follows = is_pair or (index and _is_secret_option(value[index - 1]))
            yield from _plain_secrets(
                inner, f"{key}.{index}", is_secret=bool(index and follows) or is_secret
            )


def _has_secret_parameter(text: str) -> bool:
    """Returns True if a text has a URL with a secret in its query, such as ``?access_token=...``."""
    _, separator, rest = text.partition("://")
    names = _URL_PARAMETER.findall(rest) if separator else ()
    return any(_is_secret_name(name) or name.lower() in _SIGNATURES for name in names)


def _is_by_name(value: Mapping[str, Any]) -> bool:
    return set(value) == {"secret"} and isinstance(value["secret"], str)


def _is_secret_option(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("-") and _is_secret_name(text)


def _is_secret_name(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    words = " ".join(_WORD.findall(name)).lower()
    return bool(_SECRET_NAME.fullmatch(words)) and not _TEXT_TOKEN.fullmatch(words)


def with_secrets(section: _Part, folder: Path | None) -> _Part:
    """Returns a copy of a part of a specification with its secrets filled in; never store or log it.

    Args:
        section: Part of a specification, with or without references to secrets.

    Raises:
        FailedPreconditionError: If a secret does not exist; the message has its name and the
            folder, never a value.
    """
    return type(section).model_validate(_filled(section.model_dump(mode="json"), folder))


def _filled(value: Any, folder: Path | None) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"secret"} and isinstance(value["secret"], str):
            return _read(value["secret"], folder)
        return {key: _filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, folder) for inner in value]
    return value


def _read(name: str, folder: Path | None) -> str:
    file = None if folder is None else folder / name
    if file is None or file.parent != folder or not file.is_file():
        raise FailedPreconditionError(
            f"the specification refers to the secret {name!r}, but "
            + (f"{folder} has no such file" if folder else "its folder of secrets is not set")
            + "; add it to the secret workers.secrets of the chart, or, on one machine, to the folder that "
            "SLIPSTREAM_ROLLOUT_SECRETS_DIRECTORY names",
            secret=name,
        )
    return file.read_text(encoding="utf-8").strip()
