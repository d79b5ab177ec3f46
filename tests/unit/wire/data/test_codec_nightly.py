"""Fuzz test of the decoder with a million inputs."""

import json

import pytest

from tests.helpers.cli import run_module


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_million_inputs_are_rejected_or_understood() -> None:
    content = json.loads(run_module("bench.dataplane.fuzz", "1000000"))
    assert 0 < content["refused"] < content["inputs"]
