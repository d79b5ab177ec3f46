"""Output of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report_to(out: Path | None, result: Mapping[str, Any]) -> None:
    """Prints a result, and writes it to a file if one is given."""
    print(json.dumps(result, indent=1), flush=True)
    if out is not None:
        write_json(out, result)


def read_json(path: Path | None, empty: Any = None) -> Any:
    """Returns the results in a file; ``empty``, or an empty dictionary, if there is no such file."""
    if path is not None and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {} if empty is None else empty


def write_json(path: Path, result: Any) -> None:
    """Writes results to a file at once, and creates its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(f"{path.name}.part")
    partial_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial_file.replace(path)


def device_name() -> str:
    """Returns the name of the GPU; ``cpu`` without one."""
    import torch  # most benchmarks need no GPU, and the import takes seconds

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class GrowingReport:
    """A report that is printed and written part by part, so that an interruption loses at most one part.

    It is marked as unfinished until the end.

    Args:
        out: The file, if there is one.
        facts: Values that are known from the start.
    """

    def __init__(self, out: Path | None, facts: Mapping[str, Any]) -> None:
        self._out = out
        self._report = dict(facts)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Adds a part and writes all parts so far."""
        self._report |= figures
        report_to(self._out, self._report | {"unfinished": True})

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Adds the last part."""
        self._report |= figures
        report_to(self._out, self._report)
