"""The text ``weight_version`` of an SGLang server, which says who uses it with which weights."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

_PREFIX: Final = "slipstream"
NO_VERSION: Final = "none"
LOADING: Final = "loading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Content of a server's ``weight_version``."""

    owner: str
    session: str
    version: str
    """Weight version, ``none`` or ``loading``."""
    beat: int = 0

    def __str__(self) -> str:
        return f"{_PREFIX}:{quote(self.owner, safe='')}:{self.session}:{self.version}:{self.beat}"

    @classmethod
    def parse(cls, text: object) -> "Label | None":
        """Reads a label; None if another program set the text."""
        match str(text).split(":"):
            case [prefix, owner, session, version, beat] if prefix == _PREFIX and beat.isdigit():
                return cls(owner=unquote(owner), session=session, version=version, beat=int(beat))
        return None
