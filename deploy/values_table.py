"""Writes the table of the chart's values: ``python -m deploy.values_table``."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "helm" / "slipstream"
_BEGIN, _END = "<!-- values -->\n", "<!-- /values -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):")


def table(values: Path) -> str:
    """Returns a Markdown table of all values that a ``# --`` comment explains.

    Raises:
        ValueError: If a comment does not precede a value.
    """
    text = values.read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    path: list[str] = []
    comment = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped.removeprefix("# -- ")
        elif stripped.startswith("#") and comment:
            comment += " " + stripped.removeprefix("#").strip()
        elif match := _KEY.match(line):
            path = [*path[: len(match["indent"]) // 2], match["key"]]
            if comment:
                default = json.dumps(_at(defaults, path))
                rows.append(f"| `{'.'.join(path)}` | `{default}` | {comment} |")
                comment = ""
        elif comment and stripped:
            raise ValueError(f"{values}: the comment {comment!r} stands before no value")
    return "\n".join(rows) + "\n"


def _at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def main() -> None:
    """Replaces the table in the chart's README."""
    readme = CHART / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    new = f"{before}{_BEGIN}{table(CHART / 'values.yaml')}{_END}{after}"
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
