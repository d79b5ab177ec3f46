"""Output of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report_to(out: Path | None, result: Mapping[str, Any]) -> None:
    """Print a result, and write it if there is a file for it."""
    text = json.dumps(result, indent=2)
    print(text, flush=True)
    if out is not None:
        out.write_text(text + "\n")


class GrowingReport:
    """A report that is printed and written part by part, so that a run that is cut off loses one at most.

    Until the end it says that it is unfinished.

    Args:
        out: The file, if there is one.
        facts: What is known from the start.
    """

    def __init__(self, out: Path | None, facts: Mapping[str, Any]) -> None:
        self._out = out
        self._found = dict(facts)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a part and report all so far."""
        self._found |= part
        report_to(self._out, self._found | {"unfinished": True})

    def finish(self, part: Mapping[str, Any]) -> None:
        """Add the last part."""
        self._found |= part
        report_to(self._out, self._found)
