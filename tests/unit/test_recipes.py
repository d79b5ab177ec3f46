"""Tests that the specifications of docs/recipes.md are valid."""

from services.common.runspec.loader import load_spec
from tests.helpers.pages import recipes
from tests.helpers.preflight import check


def test_every_recipe_is_valid_as_it_stands(tmp_path):
    specs = {name: load_spec(path) for name, path in recipes(tmp_path).items()}
    assert set(specs) == {"math", "code", "tools", "lora", "sft", "preferences", "evaluation"}
    for spec in specs.values():
        check(spec)
