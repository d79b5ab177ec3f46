"""Short runs on a random model: one that learns nothing, and two that learn answers from the data."""

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
        "reward_concurrency": 2,  # processes of each replica; their start takes longer than their calls
    },
    "trainer": {"steps": 3, "prompts_per_step": 4},
    "validation": {"every": 0},
}


def write_plumbing(folder: Path) -> Path:
    """Writes specification, prompts and reward into a folder; returns the specification."""
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(32))
    )
    (folder / "reward.py").write_text(
        "def length(prompt, response, answer, row):\n    return float(len(response))\n\n\n"
        "def odd(prompt, response, answer, row):\n    return float(sum(response.encode()) % 2)\n"
    )
    path = folder / "plumbing.yaml"
    path.write_text(yaml.safe_dump(PLUMBING))
    return path


def write_sft(folder: Path) -> Path:
    """Writes conversations with two answers each; one ends without an answer, and one is too long.

    Returns the specification of a run that trains on them.
    """

    def talk(number: int, last: str = "assistant") -> list[dict[str, str]]:
        turns = ("user", f"count {number}"), ("assistant", "1"), ("user", "on"), (last, f"{number}")
        return [{"role": role, "content": content} for role, content in turns]

    rows = [talk(number) for number in range(40)]
    rows += [talk(1, last="user"), [*talk(2)[:-1], {"role": "assistant", "content": "long" * 40}]]
    lines = [json.dumps({"talk": row}) for row in rows]
    (folder / "talks.jsonl").write_text("\n".join(lines))
    source = {"source": "jsonl", "path": "talks.jsonl"}
    spec = {
        "name": "sft",
        "model": {"path": "tiny:qwen2-0.4m"},
        "data": {
            "train": source,
            "heldout": {**source, "limit": 8},
            "prompt_column": "talk",
            "answer_column": None,
            "chat_template": True,
        },
        "algorithm": "sft",
        "rollout": {"max_response_tokens": 64},
        "trainer": {
            "steps": 12,
            "prompts_per_step": 8,
            "optimizer": {"learning_rate": 3.0e-3},
        },
        "validation": {"every": 6},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def write_dpo(folder: Path) -> Path:
    """Writes preference pairs, of which one has equal answers and one has an answer that is too long.

    Returns the specification of a run that trains on them.
    """
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(32)]
    rows += [{**rows[0], "rejected": "yes"}, {**rows[1], "rejected": "no" * 40}]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"source": "jsonl", "path": "pairs.jsonl"}
    spec = {
        "name": "dpo",
        "model": {"path": "tiny:qwen2-0.4m"},
        "data": {"train": source, "heldout": {**source, "limit": 8}},
        "algorithm": "dpo",
        "rollout": {"max_response_tokens": 16},
        "trainer": {"steps": 8, "prompts_per_step": 8, "optimizer": {"learning_rate": 1.0e-3}},
        "validation": {"every": 8},
    }
    path = folder / "dpo.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path
