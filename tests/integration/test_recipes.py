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
    done = system.train(recipes(tmp_path)["evaluation"])
    assert done.code == 0, done.out + done.err
    assert done.summary["steps"] == 0
    assert done.summary["heldout"]["greedy"] is not None


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(tmp_path, system, name):
    done = system.train(recipes(tmp_path)[name])
    assert done.code == 0, done.out + done.err
    assert len((done.folder / "metrics.jsonl").read_text().splitlines()) >= 3
