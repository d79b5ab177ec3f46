"""Where results go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report_to(out: Path | None, result: Mapping[str, Any]) -> None:
    """Print a result, and write it if there is a file for it."""
    text = json.dumps(result, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
