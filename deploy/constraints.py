"""The versions of a report of ``pip install --report``, as constraints: see ``make constraints``."""

import json
import re
import sys

# Torch is chosen where it is installed, by TORCH of the Makefile and the Dockerfiles, and names its CUDA.
_CHOSEN_ELSEWHERE = {"torch", "slipstream", "cuda-bindings", "cuda-pathfinder"}


def main() -> None:
    """Read a report, write a constraint for each package that it would install."""
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
