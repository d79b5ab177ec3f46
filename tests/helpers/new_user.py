"""Files of a small task, and counters of a new user's commands and clicks."""

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

# One reward term falls during the run, which the total reward alone does not show.
REWARDS = """
import time

calls = 0


def score(prompt, response, answer, row):
    global calls
    calls += 1
    return {"style": max(1.0 - calls / 120, 0.0), "right": float(response == answer)}


def brief(prompt, response, answer, row):
    time.sleep(0.3)  # an endless run leaves the processor to the browser
    return {"brief": 1.0 - len(response) / 6}
"""


def write_task(folder: Path) -> Path:
    """Writes data, rewards and specification of a short run into a folder; returns the specification."""
    for name, begin in (("train", 0), ("heldout", 64)):
        rows = [{"question": f"{n}=", "answer": str(n)} for n in range(begin, begin + 64)]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "digits.yaml"
    path.write_text(yaml.safe_dump(SPEC, sort_keys=False))
    return path


class Terminal:
    """Runs commands in a folder and counts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands = 0

    def slipstream(self, *arguments: str | Path) -> Finished:
        """Runs a command, which must succeed."""
        result = self.tries(*arguments)
        assert result.code == 0, result.out + result.err
        return result

    def tries(self, *arguments: str | Path) -> Finished:
        """Runs a command to its end."""
        self.count()
        return slipstream(*arguments, folder=self._folder)

    def count(self) -> None:
        """Counts another command."""
        self._commands += 1
        assert self._commands <= MOST_COMMANDS


class Mouse:
    """Clicks on a page and counts the clicks: one to type into a field, two to choose an option."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._clicks = 0

    async def click(self, what: Any, **how: Any) -> None:
        """Clicks on an element."""
        self._count(1)
        await what.click(**how)

    async def write(self, field: Any, text: str) -> None:
        """Clicks into a field and types."""
        self._count(1)
        await field.fill(text)
        await field.press("Enter")

    async def choose(self, field: Any, option: str) -> None:
        """Opens a select field and chooses an option."""
        self._count(2)
        await field.select_option(option)

    def _count(self, clicks: int) -> None:
        self._clicks += clicks
        assert self._clicks <= MOST_CLICKS
