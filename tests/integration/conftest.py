"""What integration tests share."""

import json
from pathlib import Path

import pytest
import yaml

PLUMBING = {
    "name": "plumbing",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}, "answer_column": None},
    "rollout": {
        "group_size": 4,
        "max_response_tokens": 4,
        "rewards": [{"name": "reward.py:length"}],
    },
    "trainer": {"steps": 3, "prompts_per_step": 4},
    "validation": {"every": 0},
}


@pytest.fixture
def plumbing(tmp_path) -> Path:
    """A run of seconds on a random model."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(32))
    )
    (tmp_path / "reward.py").write_text(
        "def length(prompt, response, answer, row):\n    return float(len(response))\n"
    )
    path = tmp_path / "plumbing.yaml"
    path.write_text(yaml.safe_dump(PLUMBING))
    return path
