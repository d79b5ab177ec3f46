"""What a new user has: a few files of an own task, and hands whose clicks and commands are counted."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.cli import Finished, slipstream

MOST_COMMANDS, MOST_CLICKS = 2, 4

SPEC = {
    "name": "digits",
    "model": {"path": "tiny:qwen2-0.4m", "tokenizer": "chars:0123456789="},
    "data": {
        "train": {"source": "jsonl", "path": "train.jsonl"},
        "heldout": {"source": "jsonl", "path": "heldout.jsonl"},
        "prompt_column": "question",
        "answer_column": "answer",
        "max_prompt_tokens": 8,
    },
    "rollout": {
        "group_size": 4,
        "max_response_tokens": 6,
        "rewards": [{"name": "rewards.py:score"}],
    },
    "trainer": {"steps": 24, "prompts_per_step": 4, "checkpoint": {"every": 12}},
    "validation": {"every": 12},
}

# One term falls while the run goes on: nobody would guess it from the reward alone.
REWARDS = """
calls = 0


def score(prompt, response, answer, row):
    global calls
    calls += 1
    return {"style": max(1.0 - calls / 120, 0.0), "right": float(response == answer)}


def brief(prompt, response, answer, row):
    return {"brief": 1.0 - len(response) / 6}
"""


def write_task(folder: Path) -> Path:
    """Write data, rewards and specification of a run of seconds into a folder; returns the specification."""
    for name, begin in (("train", 0), ("heldout", 64)):
        rows = [{"question": f"{n}=", "answer": str(n)} for n in range(begin, begin + 64)]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "digits.yaml"
    path.write_text(yaml.safe_dump(SPEC, sort_keys=False))
    return path


class Terminal:
    """Commands that are given in a folder, counted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands = 0

    def slipstream(self, *arguments: str | Path) -> Finished:
        """Run a command to its end, which must be a good one."""
        done = self.tries(*arguments)
        assert done.code == 0, done.out + done.err
        return done

    def tries(self, *arguments: str | Path) -> Finished:
        """Run a command to its end."""
        self.count()
        return slipstream(*arguments, folder=self._folder)

    def count(self) -> None:
        """Another command is given."""
        self._commands += 1
        assert self._commands <= MOST_COMMANDS


class Mouse:
    """Clicks of a browser's page, counted; typing needs one into the field, a choice one to open it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._clicks = 0

    async def click(self, what: Any, **how: Any) -> None:
        """Click on something."""
        self._count(1)
        await what.click(**how)

    async def write(self, field: Any, text: str) -> None:
        """Click into a field and write."""
        self._count(1)
        await field.fill(text)
        await field.press("Enter")

    async def choose(self, field: Any, option: str) -> None:
        """Open a choice and take an option."""
        self._count(2)
        await field.select_option(option)

    def _count(self, clicks: int) -> None:
        self._clicks += clicks
        assert self._clicks <= MOST_CLICKS
