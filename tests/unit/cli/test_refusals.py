"""What the command line says of a request that was refused."""

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.api import Api, ApiError
from services.cli.main import app
from services.common.http.server import serve_http
from services.controller.api.operations import GetVersion


@pytest.mark.parametrize(
    ("pointer", "message", "said"),
    [
        ("/query/label/0", "String should match", "query.label.0: String should match"),
        ("/trainer/steps", "trainer.steps: too few", "trainer.steps: too few"),
        ("", "the whole is wrong", "the whole is wrong"),
    ],
)
async def test_a_refusal_names_what_is_wrong(pointer, message, said):
    problem = {"detail": "no", "errors": [{"pointer": pointer, "message": message}]}

    async def refuse(scope, receive, send):
        answer = httpx.Response(422, json=problem)
        headers = [(b"content-type", b"application/problem+json")]
        await send({"type": "http.response.start", "status": 422, "headers": headers})
        await send({"type": "http.response.body", "body": answer.content})

    async with serve_http("127.0.0.1:0", refuse) as port, Api(f"http://127.0.0.1:{port}") as api:
        with pytest.raises(ApiError) as refused:
            await api.call(GetVersion())
    assert str(refused.value) == f"no\n{said}"


def test_a_run_that_was_not_submitted_is_not_watched():
    done = CliRunner().invoke(app, ["watch", ""])
    assert done.exit_code == 2
    assert "was the run submitted?" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["get", "Sort 4"], "no name and no id of a run"),
        (["fork", f"run_{'0' * 32}", "--name", "Bad_Name"], "name: String should match"),
        (["fork", f"run_{'0' * 32}", "--set", "trainer.steps"], "expected KEY=VALUE"),
        (["cancel", f"run_{'0' * 32}", "--grace-seconds", "-1"], "--grace-seconds"),
        (["list", "--label", "blue"], "expected KEY=VALUE"),
        (["submit", "no.yaml", "--label", "blue"], "expected KEY=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anybody_is_asked(arguments, said):
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2
    assert said in done.output


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
