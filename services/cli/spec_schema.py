"""Writes docs/runspec.schema.json, by which editors complete and check a specification."""

import json
import sys

from services.common.spec.run import RunSpec

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def main() -> None:
    """Write the schema to standard output."""
    schema = {"$schema": _DRAFT, **RunSpec.model_json_schema()}
    sys.stdout.write(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main()
