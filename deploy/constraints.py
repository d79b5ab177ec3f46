"""Writes the versions of a ``pip install --report`` as constraints: see ``make constraints``."""

import json
import re
import sys

# The variable TORCH of the Makefile and the Dockerfiles selects torch, and torch its CUDA packages.
_CHOSEN_ELSEWHERE = {"torch", "slipstream", "cuda-bindings", "cuda-pathfinder"}


def main() -> None:
    """Reads a report and writes a constraint for each package that it would install."""
    packages = [found["metadata"] for found in json.load(sys.stdin)["install"]]
    pins = {
        re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in packages
    }
    lines = [f"{name}=={pins[name]}" for name in sorted(pins) if name not in _CHOSEN_ELSEWHERE]
    sys.stdout.write(
        "# Versions that CI, the images and make share; written by `make constraints`.\n"
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
