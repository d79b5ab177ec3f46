"""Defaults of a specification's keys, given its other keys."""

import json
from pathlib import Path

import pytest
import yaml

from services.common.runspec.keys import flat
from services.common.runspec.loader import canonical_json, parse_spec
from services.controller.api.handlers import defaults_of
from tests.helpers.cli import REPOSITORY

EXAMPLES = [
    path
    for path in sorted((REPOSITORY / "examples").rglob("*.yaml"))
    if "trainer" in yaml.safe_load(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_only_keys_that_an_example_sets_differ_from_their_defaults(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    spec = parse_spec(document)
    values, defaults = dict(flat(json.loads(canonical_json(spec)))), defaults_of(spec)
    changed = {key for key in values if key not in defaults or defaults[key] != values[key]}
    keys = {key for key, _ in flat(document)}
    assert not {key for key in changed if not any(key.startswith(prefix) for prefix in keys)}


def test_a_default_that_depends_on_the_loss_is_that_of_the_loss() -> None:
    path = REPOSITORY / "examples" / "sft.yaml"
    defaults = defaults_of(parse_spec(yaml.safe_load(path.read_text(encoding="utf-8"))))
    assert (defaults["algorithm.advantage"], defaults["rollout.group_size"]) == ("uniform", 1)
    assert "data.train.path" not in defaults
