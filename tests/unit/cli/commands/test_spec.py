"""Tests of ``validate`` and ``submit`` for other machines: of a controller, or of another launcher."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.main import app
from tests.helpers.specs import changed

# Needs more processes than this machine may run, and files that only pods have.
CLUSTER = changed(
    model={"path": "/models/of-the-pods"},
    data={"train": {"source": "jsonl", "path": "/data/of-the-pods.jsonl"}},
    trainer={"world_size": 4096},
)


class Controller(BaseHTTPRequestHandler):
    """Controller elsewhere that refuses each specification with the problems of ``server.problems``."""

    server: Any

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, document))
        problems = self.server.problems
        answer: dict[str, Any] = {"spec": document, "spec_digest": "0" * 64}
        if problems:
            errors = [{"pointer": "", "message": problem} for problem in problems]
            answer = {"detail": "refused", "errors": errors}
        body = json.dumps(answer).encode()
        self.send_response(422 if problems else 200)
        self.send_header("content-type", f"application/{'problem+' if problems else ''}json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Controller)
    server.requests, server.problems = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("SLIPSTREAM_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return str(path)


def test_a_run_of_this_machine_must_fit_it(file: str) -> None:
    checked = CliRunner().invoke(app, ["validate", file])
    assert checked.exit_code == 2
    assert "trainer.world_size" in checked.output


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_a_run_of_another_launcher_must_fit_its_nodes_and_not_this_machine(
    file: str, tmp_path: Path, launcher: str
) -> None:
    rows = [f'{{"prompt": "1+{row}=", "answer": "{row + 1}"}}\n' for row in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    document = changed(
        data={"train": {"source": "jsonl", "path": str(tmp_path / "prompts.jsonl")}},
        trainer={"world_size": 64},
    )
    Path(file).write_text(yaml.safe_dump(document))
    here = CliRunner().invoke(app, ["validate", file])
    assert "worker processes" in here.output
    there = ["validate", file, "--launcher", launcher]
    valid = CliRunner().invoke(app, there)
    assert valid.exit_code == 0, valid.output
    wide = [*there, "--set", "topology.placement=colocated", "--set", "rollout.replicas=64"]
    refused = CliRunner().invoke(app, wide)
    assert refused.exit_code == 2
    assert "topology.placement" in refused.output


def test_a_launcher_that_no_package_provides_is_refused(file: str) -> None:
    refused = CliRunner().invoke(app, ["validate", file, "--launcher", "slrum"])
    assert refused.exit_code == 2
    assert "slurm" in refused.output


def test_a_launcher_without_services_on_this_machine_does_not_run(file: str) -> None:
    refused = CliRunner().invoke(app, ["run", file, "--launcher", "kubernetes"])
    assert refused.exit_code == 2
    assert "submit" in refused.output


def test_a_run_of_other_machines_is_submitted_without_checks_of_this_one(
    controller: Any, file: str
) -> None:
    controller.problems = ["trainer.world_size: too large for this cluster"]
    result = CliRunner().invoke(app, ["submit", file])
    assert result.exit_code == 1
    ((path, document),) = controller.requests
    assert path.startswith("/v1/runs")
    assert document["trainer"]["world_size"] == 4096
    assert controller.problems[0] in result.output


@pytest.mark.parametrize("problems", [[], ["topology.placement: no node has so many GPUs"]])
def test_the_controller_that_will_run_it_validates_a_specification(
    controller: Any, file: str, problems: list[str]
) -> None:
    controller.problems = problems
    result = CliRunner().invoke(app, ["validate", file])
    ((path, _),) = controller.requests
    assert "validate_only=true" in path
    assert result.exit_code == bool(problems)
    assert all(problem in result.output for problem in problems)


def test_keys_are_checked_before_a_controller_is_asked(controller: Any, file: str) -> None:
    result = CliRunner().invoke(app, ["submit", file, "--set", "trainer.setps=3"])
    assert result.exit_code == 2
    assert "trainer.setps" in result.output
    assert not controller.requests
