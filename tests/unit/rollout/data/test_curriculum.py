"""User function of a curriculum: its arguments, and the effect of its results."""

from pathlib import Path
from textwrap import dedent

import pytest

from services.common.runspec.data import CurriculumSpec
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Curriculum
from services.rollout.failures import GroupError
from services.wire.workers import PromptHistory

MINE = """
def wants(row, tried, *, answers):
    if answers == "message":
        raise ValueError(f"{row} {tried}")
    return answers[row["number"]]
"""
NEW = PromptHistory(step=4, tries=0, mean_reward=0.0)


async def answers(
    folder: Path, row: dict[str, int], tried: PromptHistory, answers_of_function: object
) -> str:
    """Returns reason and message of the failure, or an empty string if the function accepts the prompt."""
    (folder / "mine.py").write_text(dedent(MINE))
    spec = CurriculumSpec(
        function=f"{folder}/mine.py:wants", arguments={"answers": answers_of_function}
    )
    async with CallPool(1) as calls:
        try:
            await Curriculum(spec, calls).check(row, tried)
        except GroupError as error:
            return f"{error.reason}: {error.message}"
    return ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, ""),
        (False, "deferred: "),
        (
            1,
            "curriculum_invalid_value: data.curriculum.function: .*mine.py:wants.* True .*returned 1",
        ),
        (None, "curriculum_invalid_value: .* returned None"),
    ],
)
async def test_only_true_has_a_prompt_answered_and_only_false_has_it_wait(
    tmp_path: Path, answer: object, message: str
) -> None:
    answer_text = await answers(tmp_path, {"number": 0}, NEW, [answer])
    if not message:
        assert answer_text == ""
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(answer_text)


async def test_the_function_receives_the_row_and_the_prompts_history(tmp_path: Path) -> None:
    message = await answers(tmp_path, {"number": 7}, NEW, "message")
    assert message.startswith("curriculum_exception: data.curriculum.function: ")
    assert "{'number': 7} {'step': 4, 'tries': 0, 'mean_reward': None}" in message
    tried = PromptHistory(step=9, tries=2, mean_reward=0.5)
    message = await answers(tmp_path, {"number": 7}, tried, "message")
    assert "{'step': 9, 'tries': 2, 'mean_reward': 0.5}" in message


def test_its_function_takes_the_place_of_the_bounds() -> None:
    alone = CurriculumSpec(function="mine:wants")
    assert (alone.solved_from, alone.hopeless_to) == (None, None)
    both = CurriculumSpec.model_validate({"function": "mine:wants", "solved_from": 0.8})
    assert (both.solved_from, both.hopeless_to) == (0.8, None)
    assert CurriculumSpec().solved_from == 0.9
