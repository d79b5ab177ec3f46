"""Output of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report_to(out: Path | None, result: Mapping[str, Any]) -> None:
    """Prints a result, and writes it to a file if one is given."""
    text = json.dumps(result, indent=2)
    print(text, flush=True)
    if out is not None:
        out.write_text(text + "\n")


class GrowingReport:
    """A report that is printed and written part by part, so that an interruption loses at most one part.

    It is marked as unfinished until the end.

    Args:
        out: The file, if there is one.
        facts: Values that are known from the start.
    """

    def __init__(self, out: Path | None, facts: Mapping[str, Any]) -> None:
        self._out = out
        self._found = dict(facts)

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds a part and writes all parts so far."""
        self._found |= part
        report_to(self._out, self._found | {"unfinished": True})

    def finish(self, part: Mapping[str, Any]) -> None:
        """Adds the last part."""
        self._found |= part
        report_to(self._out, self._found)
