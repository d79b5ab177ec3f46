"""Writes the references in docs/ and most of the Python client: ``python -m deploy.reference``."""

import json
from pathlib import Path
from typing import Any, cast

from deploy.reference import client, fits, models, rlrun, runspec, workers
from services.controller.api.app import build_app
from services.controller.api.run_api import RunApi

_DOCS = Path(__file__).parents[2] / "docs"
_CHART = Path(__file__).parents[1] / "helm" / "slipstream"


def files() -> dict[Path, str]:
    """Returns the text of every generated file."""
    # Routes are described but not called, so the application needs no dependencies.
    nothing = cast("Any", None)
    app = build_app(RunApi(nothing, nothing, nothing, nothing, nothing))
    api = json.dumps(app.openapi(), indent=1, sort_keys=True)
    return {
        _DOCS / "openapi.json": api + "\n",
        _DOCS / "runspec.md": runspec.page(),
        _DOCS / "runspec.schema.json": runspec.schema(),
        _DOCS / "models.md": models.page(),
        _DOCS / "fits.md": fits.page(),
        _DOCS / "workers.md": workers.page(),
        _CHART / "files" / "workers.yaml": workers.chart(),
        _CHART / "files" / "rlrun-spec.yaml": rlrun.chart(),
        **client.modules(json.loads(api)),
    }


def main() -> None:
    """Writes all files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
