"""The images of deploy/docker: their build arguments and the lines of their stages."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.helpers.chart import ROOT

FOLDER = ROOT / "deploy" / "docker"
DOCKERFILE = FOLDER / "Dockerfile"
_TARGETS: Mapping[str, Any] = json.loads((FOLDER / "bake.json").read_text("utf-8"))["target"]
IMAGES = tuple(sorted(name for name in _TARGETS if not name.startswith("_")))


def target_of(image: str) -> dict[str, Any]:
    """Returns an image's target in bake.json, with the keys that it inherits."""
    target = _TARGETS[image]
    merged: dict[str, Any] = {"args": {}}
    for parent in target.get("inherits", ()):
        merged |= target_of(parent)
    return {**merged, **target, "args": {**merged["args"], **target.get("args", {})}}


def stage_of(image: str) -> list[str]:
    """Returns the lines of the stages that an image consists of, without comments."""
    stages = stages_of_file()
    lines: list[str] = []
    name = target_of(image)["target"]
    while name in stages:
        lines = [*stages[name][1:], *lines]
        name = stages[name][0].split()[1]
    return lines


def stages_of_file() -> dict[str, list[str]]:
    """Returns the lines of each stage by its name, without comments; the first is its FROM."""
    stages: dict[str, list[str]] = {}
    current: list[str] = []
    for line in DOCKERFILE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            current = stages[match[1]] = []
        if line and not line.startswith("#"):
            current.append(line)
    return stages
