"""Writes the description of the REST API to standard output: ``make docs`` keeps docs/openapi.json by it."""

import json
import sys
from typing import Any, cast

from services.controller.api.app import build_app
from services.controller.api.run_api import RunApi


def main() -> None:
    """Write it."""
    # Routes are described without being called, so there is nothing that they would need.
    nothing = cast("Any", None)
    api = RunApi(nothing, nothing, nothing, nothing, nothing)
    document = build_app(api).openapi()
    sys.stdout.write(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
