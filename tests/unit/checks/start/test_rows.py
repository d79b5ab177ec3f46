"""Tests of what the first rows say about a reward before a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.checks.start import rows
from services.checks.start.rows import RowTrialResult, try_functions, try_rows
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.rollout.data.sources import open_sources

ROWS = [{"question": f"How much is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
DERIVED = [{**row, "answer": f"It is twice that.\n#### {row['answer']}"} for row in ROWS]
TESTED = [{**row, "answer": f"assert f({row['answer']}) == 1"} for row in ROWS]
UNTESTED = [{**row, "answer": "def check(candidate):\n    assert candidate(1)"} for row in ROWS]
REWARDS = """\
import time

def always(prompt, response, answer, row):
    return 1.0

def half(prompt, response, answer, row):
    return 0.5

def never(prompt, response, answer, row):
    return 0.0

def right(prompt, response, answer, row):
    return float(response == answer)

def slow(prompt, response, answer, row):
    time.sleep(60)

def broken(prompt, response, answer, row):
    raise RuntimeError("broken")

async def awaited(prompt, response, answer, row):
    return float(response == answer)

class Called:
    def __call__(self, prompt, response, answer, row):
        return float(response == answer)

class Uncalled(Called): pass

instance = Called()
anonymous = lambda prompt, response, answer, row: float(response == answer)
number = 1.0

def boolean(prompt, response, answer, row):
    return response == answer

def of_numpy(prompt, response, answer, row):
    import numpy
    return numpy.float32(response == answer)

def booleans_of_numpy(prompt, response, answer, row):
    import numpy
    return numpy.array([response == answer])

def two_of_numpy(prompt, response, answer, row):
    import numpy
    return numpy.array([1.0, 2.0])

def nothing(prompt, response, answer, row):
    print("nothing is returned")

def undefined(prompt, response, answer, row):
    return float("nan")

def infinite(prompt, response, answer, row):
    return float("inf")

def text(prompt, response, answer, row):
    return "1.0"

def pair(prompt, response, answer, row):
    return 1.0, "because"

def terms(prompt, response, answer, row):
    return {"right": float(response == answer)}

def no_terms(prompt, response, answer, row):
    return {}

def of_answers(response, answer):
    return 1.0

def of_completions(completions, **columns):
    return [1.0 for _ in completions]

def parsing(prompt, response, answer, row):
    return float(int(response) == int(answer))

def exiting(prompt, response, answer, row):
    raise SystemExit(3)

def worse(prompt, response, answer, row):
    return 0.2 if response == answer else 0.9

def negative(prompt, response, answer, row):
    return 0.0 if response == answer else -1.0

def large(prompt, response, answer, row):
    return 10.0 if response == answer else 5.0

def labelled(prompt, response, answer, row):
    return float(row["label"] == response)
"""


def specified(
    folder: Path, reward: dict[str, Any], rows: list[dict[str, str]], **data: object
) -> RunSpec:
    """Returns a specification with a reward and rows."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if reward["name"][0] == ":":
        reward = {**reward, "name": f"{folder / 'rewards.py'}{reward['name']}"}
    return RunSpec.model_validate(
        {
            "name": "trial",
            "model": {"path": "tiny:qwen2-0.4m", "tokenizer": "bytes"},
            "data": {
                "train": {"source": "jsonl", "path": str(folder / "rows.jsonl")},
                "prompt_column": "question",
                "answer_column": "answer",
                "max_prompt_tokens": 64,
                **data,
            },
            "rollout": {"group_size": 2, "max_response_tokens": 16, "rewards": [reward]},
            "algorithm": {"max_staleness": 1},
            "trainer": {"steps": 1, "prompts_per_step": 1},
        }
    )


def trial(
    folder: Path, reward: dict[str, Any], rows: list[dict[str, str]], **data: str
) -> RowTrialResult:
    """Returns the findings for a reward and rows."""
    spec = specified(folder, reward, rows, **data)
    tokenizer = load_tokenizer(spec.model)
    _, prompts = try_rows(spec, open_sources(spec.data), tokenizer)
    return try_functions(spec, prompts, tokenizer)


def test_messages_as_json_text_are_noted(tmp_path: Path) -> None:
    chat = json.dumps([{"role": "user", "content": "1+1="}])
    rows = [{"question": text, "answer": "2"} for text in (chat, "[1, 2]", "[", chat)]
    spec = specified(
        tmp_path, {"name": "exact_match"}, rows, chat_template=True, max_prompt_tokens=256
    )
    trial_result, _ = try_rows(spec, open_sources(spec.data), load_tokenizer(spec.model))
    assert ["in 2 of 4 rows" in note for note in trial_result.notes] == [True]


@pytest.mark.parametrize(
    ("name", "rows", "data", "words"),
    [
        (":always", ROWS, {}, ["a wrong answer scores 1 in 16 of 16 rows"]),
        (":never", ROWS, {}, ["expected answer itself scores 0 in 16 of 16 rows"]),
        (":half", ROWS, {}, []),
        (":right", ROWS, {}, []),
        ("exact_match", ROWS, {}, []),
        ("exact_match", DERIVED, {}, ["derivation in 16 of 16 rows", "math_verify"]),
        ("math_verify", ROWS, {}, []),
        ("math_verify", DERIVED, {}, []),
        (
            "math_verify",
            ROWS,
            {"answer_column": "question"},
            ["16 of 16 rows", "data.answer_column"],
        ),
        ("code_tests", TESTED[:4], {}, []),
    ],
)
def test_a_reward_that_does_not_tell_right_from_wrong_is_noted(
    tmp_path: Path, name: str, rows: list[dict[str, str]], data: dict[str, str], words: list[str]
) -> None:
    outcome = trial(tmp_path, {"name": name}, rows, **data)
    assert outcome.problems == []
    assert len(outcome.notes) == bool(words), outcome.notes
    assert all(word in outcome.notes[0] for word in words)


def test_the_weight_of_a_reward_does_not_hide_a_wrong_score(tmp_path: Path) -> None:
    outcome = trial(tmp_path, {"name": ":always", "weight": 0.1}, ROWS)
    assert ["a wrong answer" in note for note in outcome.notes] == [True]


@pytest.mark.parametrize(("name", "rows"), [(":broken", ROWS), ("code_tests", UNTESTED)])
def test_a_reward_that_fails_for_every_row_is_a_problem(
    tmp_path: Path, name: str, rows: list[dict[str, str]]
) -> None:
    (problem,) = trial(tmp_path, {"name": name}, rows).problems
    assert problem.startswith("rollout.rewards.0.name")


def test_a_reward_with_slow_imports_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports are no part of the deadline of the calls."""
    monkeypatch.setattr(rows, "TIMEOUT_S", 3.0)
    (tmp_path / "slow_import.py").write_text(f"import time\ntime.sleep(4)\n{REWARDS}")
    outcome = trial(tmp_path, {"name": f"{tmp_path / 'slow_import.py'}:broken"}, ROWS)
    assert len(outcome.problems) == 1


def test_a_slow_reward_leaves_no_process_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "TIMEOUT_S", 3.0)
    outcome = trial(tmp_path, {"name": ":slow"}, ROWS)
    assert ["not tested" in note for note in outcome.notes] == [True]
    assert capfd.readouterr().err == ""


# Reward: words of the only problem, words of the only note.
OWN: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(("awaited", "instance", "anonymous", "boolean", "of_numpy"), ([], [])),
    **dict.fromkeys(("booleans_of_numpy", "terms", "negative"), ([], [])),
    "Uncalled": (["TypeError", "(prompt, response, answer, row) and must return a number"], []),
    "of_answers": (["2 positional", "(prompt, response, answer, row)"], []),
    "of_completions": (["TypeError", "(prompt, response, answer, row)"], []),
    "number": (["expected a function or a class", "of type float"], []),
    "missing": (["has no 'missing'", "it defines"], []),
    "two_of_numpy": (["must return a finite number", "[1.0, 2.0]"], []),
    "nothing": (["must return a finite number", "got None"], []),
    "undefined": (["must return a finite number", "got nan"], []),
    "infinite": (["must return a finite number", "got inf"], []),
    "text": (["must return a finite number", "got '1.0'"], []),
    "pair": (["must return a finite number", "because"], []),
    "no_terms": (["at least one term"], []),
    "exiting": (["SystemExit: 3", "rewards.py, line"], []),
    "labelled": (["KeyError: 'label'", "rewards.py, line"], []),
    "parsing": ([], ["failed in 7 of 10", "ValueError", "rewards.py, line"]),
    "worse": ([], ["an unrelated text scores more (0.9) than the expected answer (0.2) in 3 of 3"]),
    "large": ([], ["a wrong answer scores 5 in 3 of 3 rows"]),
}


@pytest.mark.parametrize("name", OWN)
def test_each_kind_of_own_reward_gets_the_message_that_helps(tmp_path: Path, name: str) -> None:
    outcome = trial(tmp_path, {"name": f":{name}"}, ROWS[:3])
    for messages, words in zip((outcome.problems, outcome.notes), OWN[name], strict=True):
        assert len(messages) == bool(words), messages
        assert all(word in messages[0] for word in words), messages
