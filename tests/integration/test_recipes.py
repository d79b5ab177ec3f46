"""The specifications of docs/recipes.md train unchanged."""

import pytest

from tests.helpers.pages import recipes

RECIPES = [
    pytest.param("tools"),
    *(
        pytest.param(n, marks=pytest.mark.nightly)
        for n in ("math", "code", "lora", "sft", "preferences")
    ),
]


def test_the_recipe_of_an_evaluation_reports_scores_without_a_step(tmp_path, system):
    result = system.train(recipes(tmp_path)["evaluation"])
    assert result.code == 0, result.out + result.err
    assert result.summary["steps"] == 0
    assert result.summary["heldout"]["greedy"] is not None


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(tmp_path, system, name):
    result = system.train(recipes(tmp_path)[name])
    assert result.code == 0, result.out + result.err
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) >= 3
