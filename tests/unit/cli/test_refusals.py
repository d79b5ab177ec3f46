"""Tests of the command line's messages for rejected requests."""

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.api import Api, ApiError
from services.cli.commands import control
from services.cli.main import app
from services.common.http.server import serve_http
from services.controller.api.operations import GetVersion
from services.extras.export.command import _upload


@pytest.mark.parametrize(
    ("pointer", "message", "line"),
    [
        ("/query/label/0", "String should match", "query.label.0: String should match"),
        ("/trainer/steps", "trainer.steps: too few", "trainer.steps: too few"),
        ("", "the whole is wrong", "the whole is wrong"),
    ],
)
async def test_a_rejection_lists_each_problem(pointer, message, line):
    problem = {"detail": "no", "errors": [{"pointer": pointer, "message": message}]}

    async def refuse(scope, receive, send):
        answer = httpx.Response(422, json=problem)
        headers = [(b"content-type", b"application/problem+json")]
        await send({"type": "http.response.start", "status": 422, "headers": headers})
        await send({"type": "http.response.body", "body": answer.content})

    async with serve_http("127.0.0.1:0", refuse) as port, Api(f"http://127.0.0.1:{port}") as api:
        with pytest.raises(ApiError) as refused:
            await api.call(GetVersion())
    assert str(refused.value) == f"no\n{line}"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["watch", ""], "run_id"),
        (["get", "Sort 4"], "'Sort 4'"),
        (["fork", f"run_{'0' * 32}", "--name", "Bad_Name"], "name"),
        (["fork", f"run_{'0' * 32}", "--set", "trainer.steps"], "trainer.steps"),
        (["set", f"run_{'0' * 32}", "validation.every"], "validation.every"),
        (["set", f"run_{'0' * 32}", "trainer.steps=[1"], "trainer.steps=[1"),
        (["set", f"run_{'0' * 32}", "trainer..steps=1"], "KEY=VALUE"),
        (["fork", f"run_{'0' * 32}", "--set", "=1"], "KEY=VALUE"),
        (["set", f"run_{'0' * 32}", "trainer=1", "trainer.steps=1"], "trainer.steps"),
        (["cancel", f"run_{'0' * 32}", "--grace-seconds", "-1"], "--grace-seconds"),
        (["list", "--label", "blue"], "--label blue"),
        (["submit", "no.yaml", "--label", "blue"], "--label blue"),
        (["up", "--port", "99999"], "--port"),
        (["samples", f"run_{'0' * 32}", "--export", "/"], "--export /"),
        (["list", "--state-directory", __file__], "--state-directory"),
        (["track", f"run_{'0' * 32}", "--folder", __file__], "--folder"),
        (["init", "--example", "--file", "/dev/null/run.yaml"], "/dev/null/run.yaml"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_request(arguments, value):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert value in result.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("1e-3", 1e-3),
        ("1:30", "1:30"),
        ("2026-11-30", "2026-11-30"),
        ("[on, =]", ["on", "="]),
    ],
)
def test_a_value_on_the_command_line_is_what_it_is_in_a_file(text: str, value: object) -> None:
    changes = control._changes([f"rollout.rewards={text}"])
    assert changes == {"rollout": {"rewards": value}}


def test_an_upload_that_fails_names_the_folder_that_is_written(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise RuntimeError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(OSError, match=rf"{tmp_path}.*'me/model'.*no network"):
        _upload(tmp_path, "me/model")


def test_track_reports_that_it_waits_for_a_controller(monkeypatch):
    monkeypatch.setattr("services.extras.trackers.command._RETRY_S", 0.0)
    result = CliRunner().invoke(app, ["track", f"run_{'0' * 32}", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.output.count("http://127.0.0.1:1") == 2  # before the wait, and after it


@pytest.mark.parametrize("command", ["get", "logs", "samples"])
def test_a_controller_that_does_not_answer_is_named(command):
    arguments = [command, f"run_{'0' * 32}", "--url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 1
    assert "http://127.0.0.1:1" in result.output


async def test_events_of_all_pages_are_read():
    async def serve(scope, receive, send):
        query = httpx.QueryParams(scope["query_string"])
        first, limit = int(query["after_seq"]) + 1, int(query["limit"])
        items = [
            {
                "run_id": "run_1",
                "seq": seq,
                "time": 0,
                "type": "T",
                "message": "",
                "data": {},
                "actor": "",
            }
            for seq in range(first, min(first + limit, 1501))
        ]
        answer = httpx.Response(200, json={"items": items})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer.content})

    async with serve_http("127.0.0.1:0", serve) as port, Api(f"http://127.0.0.1:{port}") as api:
        assert [event.seq for event in await api.events("run_" + "0" * 32)] == list(range(1, 1501))
