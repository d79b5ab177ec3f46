"""Runs with a user's agent and reward service."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.helpers.cli import slipstream

pytestmark = pytest.mark.timeout(300)

AGENT = """
import httpx

http = httpx.AsyncClient(timeout=60)

async def ask(base_url, api_key, model, messages):
    response = await http.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": messages, "max_tokens": 5},
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]

async def talk(base_url, api_key, model, prompt, row):
    user = lambda text: {"role": "user", "content": text}
    messages = [user(prompt)]
    messages += [await ask(base_url, api_key, model, messages), user("more")]
    await ask(base_url, api_key, model, [user("helper")])
    await ask(base_url, api_key, model, [*messages[:-1], user("else")])
    await ask(base_url, api_key, model, messages)
"""


class Judge(BaseHTTPRequestHandler):
    """Reward service that prefers long answers."""

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"score": len(content["response"]) / 100}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Does nothing."""


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_an_agent_trains_on_what_a_service_judges(plumbing, judge, tmp_path, system):
    """Parks responses every three tokens, so that agents run again on recorded replies.

    The agent has three conversations, two of which begin with the same messages.
    """
    (tmp_path / "agent.py").write_text(AGENT)
    spec = yaml.safe_load(plumbing.read_text())
    spec["rollout"] |= {
        "max_response_tokens": 60,
        "partial_rollout": True,
        "segment_tokens": 3,
        "workflow": "agent",
        "workflow_arguments": {"agent": "agent.py:talk", "train": "all"},
        "rewards": [{"name": judge}],
    }
    plumbing.write_text(yaml.safe_dump(spec))
    result = system.train(plumbing)
    assert result.code == 0, result.out + result.err
    summary = result.summary
    assert summary["steps"] == 3
    assert summary["prompts"]["consumed"] == summary["prompts"]["issued"] == 12
    steps = [
        json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[0]["rollout_logprob_abs_diff_max"] <= 1e-4
    listing = slipstream(
        *("samples", result.folder.name, "--tokens", "--limit", "0"),
        *("--state-directory", result.folder.parent),
    )
    contents = [json.loads(line) for line in listing.out.splitlines()]
    assert {sample["step"] for sample in contents} == {1, 2, 3}
    for sample in contents:
        tokens = sample["tokens"]
        is_input = [version < 0 for version in tokens["weight_versions"]]
        assert any(is_input) and not any(sample["turns"][0]["tool_calls"])
        assert len({len(column) for column in tokens.values()}) == 1
        assert not any(
            trained and t for trained, t in zip(tokens["is_trained"], is_input, strict=True)
        )
    assert all(step["trained_tokens"] < step["response_tokens"] for step in steps)
    assert all(step["sequences_mean"] == step["reward/conversations"] == 3.0 for step in steps)
    assert all(step["reward/rewritten_histories"] == 0.0 for step in steps)
