"""Supervised fine-tuning as a user runs it, and reinforcement learning that begins where it ended."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.cli import slipstream
from tests.helpers.plumbing import PLUMBING

pytestmark = pytest.mark.timeout(300)


def write_sft(folder: Path) -> Path:
    """Conversations of two answers each, of which one row has none, and one is too long."""

    def talk(number: int, last: str = "assistant") -> list[dict[str, str]]:
        said = ("user", f"count {number}"), ("assistant", "1"), ("user", "on"), (last, f"{number}")
        return [{"role": role, "content": content} for role, content in said]

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


def test_a_model_is_fine_tuned_exported_and_reinforced(system, plumbing, tmp_path):
    done = system.train(write_sft(tmp_path))
    assert done.code == 0, done.out + done.err
    steps = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "reward_mean" not in steps[0]
    # Of a random model all bytes are about as likely; a held-out score is a mean log-probability.
    scores = [step["heldout_greedy"] for step in steps if "heldout_greedy" in step]
    assert scores == sorted(scores)
    assert scores[-1] > scores[0]
    groups = done.summary["prompts"]
    assert groups["consumed"] == 96
    assert groups["quarantined"] == 2
    exported = slipstream("export", done.folder.name, tmp_path / "base", "--url", system.url)
    assert exported.code == 0, exported.err
    plumbing.write_text(yaml.safe_dump({**PLUMBING, "model": {"path": "base"}}))
    reinforced = system.train(plumbing)
    assert reinforced.code == 0, reinforced.out + reinforced.err
    assert reinforced.summary["steps"] == 3
