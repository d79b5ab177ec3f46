"""Writes the description of the REST API to standard output: ``make docs`` keeps docs/openapi.json by it."""

import json
import sys
from typing import Any, cast

from services.controller.api.app import build_app


def main() -> None:
    """Write it."""
    # Routes are described without being called, so there is nothing that they would need.
    nothing = cast("Any", None)
    document = build_app(nothing, nothing, nothing, None, nothing).openapi()
    sys.stdout.write(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
