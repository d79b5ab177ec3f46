"""A run of seconds on a random model, which learns nothing."""

import json
from pathlib import Path

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


def write_plumbing(folder: Path) -> Path:
    """Write its specification, its prompts and its reward into a folder; returns the specification."""
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(32))
    )
    (folder / "reward.py").write_text(
        "def length(prompt, response, answer, row):\n    return float(len(response))\n"
    )
    path = folder / "plumbing.yaml"
    path.write_text(yaml.safe_dump(PLUMBING))
    return path
