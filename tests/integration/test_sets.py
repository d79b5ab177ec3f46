"""Several data sets, a curriculum and epochs, from the command line to the metrics of each step."""

import json

import yaml

from tests.helpers.cli import REPOSITORY, slipstream
from tests.helpers.plumbing import PLUMBING

EXAMPLE = REPOSITORY / "examples" / "curriculum" / "curriculum.yaml"
SHORT = (
    "model.warm_start.steps=20",
    "rollout.replicas=1",
    "trainer.steps=null",
    "data.epochs=0.2",  # of 600 rows: 3.75 batches of 32
    *(f"data.heldout.{name}.limit=8" for name in ("two", "four", "six")),
    "data.heldout.six.samples_per_prompt=4",
)


def test_the_curriculum_example_trains_for_a_part_of_an_epoch(system):
    result = system.train(EXAMPLE, *SHORT)
    assert result.code == 0, result.out + result.err
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(0 <= step["set_reward/two"] <= 1 for step in steps)
    # All issued prompts are trained; a third is from each set.
    sizes = [sum(step[f"set_samples/{name}"] for step in steps) for name in ("two", "four", "six")]
    assert sorted(sizes) == [42 * 8, 43 * 8, 43 * 8]
    aside = steps[-1]["skipped/solved"] + steps[-1]["skipped/hopeless"]
    assert 0 < aside <= result.summary["prompts"]["issued"]
    sets = result.summary["heldout"]["sets"]
    assert sorted(sets) == ["four", "six", "two"]
    assert {"pass@1", "pass@2", "pass@4"} <= sets["six"].keys()
    assert "pass@2" not in sets["two"]


ODD_FIRST = """
def odd_first(row, tried, *, until):
    return tried["step"] >= until or int(row["prompt"].split()[1]) % 2 == 1
"""


def test_a_curriculum_of_the_users_own_chooses_the_prompts(system, plumbing):
    (plumbing.parent / "order.py").write_text(ODD_FIRST)
    curriculum = {"function": "order.py:odd_first", "arguments": {"until": 100}}
    data = {**PLUMBING["data"], "shuffle": False, "curriculum": curriculum}
    plumbing.write_text(yaml.safe_dump({**PLUMBING, "data": data}))
    result = system.train(plumbing)
    assert result.code == 0, result.out + result.err
    prompts = result.summary["prompts"]
    assert prompts["consumed"] == 12
    assert prompts["dropped"] >= 11
    lines = slipstream(
        "samples", result.folder.name, "--json", "--url", system.url
    ).out.splitlines()
    numbers = {int(json.loads(line)["prompt"].split()[1]) for line in lines}
    assert numbers <= set(range(1, 32, 2))
