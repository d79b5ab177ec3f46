"""Tests that make, CI and the images install the versions of constraints.txt."""

import re
import tomllib

import pytest

from tests.helpers.chart import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    requirement
    for requirements in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in requirements
]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: str) -> dict[str, str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def torch_of(path: str) -> set[str]:
    return set(re.findall(r"torch==[\d.]+", (ROOT / path).read_text(encoding="utf-8")))


def test_every_requirement_has_a_version_and_torch_is_chosen_where_it_is_installed():
    names = {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in REQUIREMENTS}
    assert names - set(pins("constraints.txt")) == {"slipstream", "torch"}


@pytest.mark.parametrize("path", ["deploy/docker/bake.json", "deploy/compose/compose.yaml"])
def test_images_have_the_torch_that_tests_have(path):
    assert torch_of(path) == torch_of("Makefile")


def test_engines_are_tested_with_the_same_versions():
    shared, beside = pins("constraints.txt"), pins("tests/engines/locks/services.txt")
    assert {name: version for name, version in beside.items() if shared[name] != version} == {}
