"""Tests of the client's retries, and of servers that answer wrongly."""

import asyncio
import json

import httpx
import pytest
from typer.testing import CliRunner

from services.cli import api as api_module
from services.cli.api import Api, ApiError, fields_of
from services.cli.main import app
from services.controller.api.operations import GetRun, GetVersion, ListRuns, PauseRun
from slipstream_client import async_transport, request
from tests.helpers.tracked import RUN as TRACKED


def api_of(num_failures, calls, **options):
    async def answer(request):
        calls.append((request.method, request.headers.get("Idempotency-Key")))
        if len(calls) <= num_failures:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"version": "1"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Api("http://controller", http=http, **options)


async def test_requests_are_retried_until_the_controller_answers():
    calls = []
    async with api_of(1, calls, retry_s=30.0) as api:
        assert (await api.call(GetVersion())).version == "1"
    assert len(calls) == 2


async def test_an_unreachable_controller_fails_at_once_without_retries():
    calls = []
    async with api_of(1, calls) as api:
        with pytest.raises(ApiError, match="no controller answers"):
            await api.call(GetVersion())


async def test_only_idempotent_requests_are_retried():
    calls = []
    async with api_of(1, calls, retry_s=30.0) as api:
        with pytest.raises(ApiError):
            await api.call(PauseRun(run_id="run_" + "0" * 32))
    assert len(calls) == 1


RUN = f"run_{'0' * 32}"
COMMANDS = (
    ["list"],
    ["get", RUN],
    ["logs", RUN],
    ["samples", RUN],
    ["events", RUN],
    ["metrics", RUN],
)
WRONG_ANSWERS = {
    "a page": (200, "text/html", b"<html>welcome</html>"),
    "a list": (200, "application/json", b"[[]]\n[1]\n"),
    "other objects": (
        200,
        "application/json",
        b'{"items": [{"seq": 1}], "state": 3}\n{"line": []}',
    ),
    "no text": (200, "application/json", b"\xff\xfe\x00"),
    "nested": (200, "application/json", b"[" * 100_000),
    "events": (200, "text/event-stream", b"event: log\ndata: {}\n\nevent: x\ndata: [\n\n"),
    "an error": (500, "application/problem+json", b'{"detail": 1, "errors": [3, {}], "code": []}'),
    "an error of lists": (404, "application/json", b'[{"errors": 1}]'),
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_a_server_that_answers_wrongly_is_named_without_a_traceback(answer, monkeypatch, tmp_path):
    status, content_type, content = WRONG_ANSWERS[answer]
    response = httpx.Response(status, headers={"content-type": content_type}, content=content)
    use_transport(monkeypatch, httpx.MockTransport(lambda _: response))
    for command in COMMANDS:
        arguments = [*command, "--url", "http://wrong", "--state-directory", str(tmp_path)]
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, SystemExit), (command, result.exception)
        assert result.exit_code == 1, (command, result.output)
        assert "Traceback" not in result.output


class Endless(httpx.AsyncByteStream):
    """Sends bytes until the reader leaves."""

    num_bytes = 0

    async def __aiter__(self):
        while True:
            self.num_bytes += 1 << 16
            yield b"x" * (1 << 16)


def test_an_endless_answer_is_not_read_to_its_end(monkeypatch, tmp_path):
    monkeypatch.setattr(async_transport, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(request, "MAX_ANSWER_BYTES", 1 << 20)
    for command in COMMANDS:
        body = Endless()
        use_transport(
            monkeypatch, httpx.MockTransport(lambda _, body=body: httpx.Response(200, stream=body))
        )
        arguments = [*command, "--url", "http://wrong", "--state-directory", str(tmp_path)]
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, body.num_bytes < 4 << 20) == (1, True), (command, result.output)


@pytest.mark.parametrize("content_type", ["application/x-ndjson", "text/event-stream"])
def test_endless_heartbeats_end_a_command_that_does_not_follow(content_type, monkeypatch, tmp_path):
    class Heartbeats(httpx.AsyncByteStream):
        async def __aiter__(self):
            while True:
                yield b": nothing new\n\n" if "event" in content_type else b"\n"
                await asyncio.sleep(0.01)

    stream = async_transport.AsyncTransport.stream
    monkeypatch.setattr(stream, "__kwdefaults__", {**stream.__kwdefaults__, "quiet_s": 0.1})
    answer = {"headers": {"content-type": content_type}, "stream": Heartbeats()}
    use_transport(monkeypatch, httpx.MockTransport(lambda _: httpx.Response(200, **answer)))
    result = CliRunner().invoke(app, ["logs", RUN, "--url", "http://wrong"])
    assert (result.exit_code, "only heartbeats" in result.output) == (1, True), result.output


def answer_samples(monkeypatch, answer):
    """Lets the client receive a run, then an answer with samples."""
    run = httpx.Response(404, json={"detail": "no such run"})
    use_transport(
        monkeypatch,
        httpx.MockTransport(lambda call: answer if "samples" in call.url.path else run),
    )
    return CliRunner().invoke(app, ["samples", RUN, "--url", "http://wrong"])


SAMPLE = {
    "id": "s1",
    "prompt": "1+1=",
    "reward": 1.0,
    "finish_reason": "stop",
    "response_tokens": 1,
    "is_greedy": False,
}
WRONG_FIELDS = (
    {"reward": "x"},
    {"prompt": 3},
    {"finish_reason": None},
    {"terms": [1]},
    {"terms": {"a": "x", "b": 1}},
    {"turns": "abc"},
    {"turns": [{"text": "x"}]},
    {"images": 5},
    {"staleness": 1.5},
)


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=str)
def test_a_sample_with_wrong_fields_is_no_traceback(fields, monkeypatch):
    result = answer_samples(monkeypatch, httpx.Response(200, json={**SAMPLE, **fields}))
    assert isinstance(result.exception, SystemExit), result.exception
    assert "does not answer as a controller" in result.stderr


def test_more_samples_than_requested_end_the_command(monkeypatch):
    lines = (json.dumps(SAMPLE) + "\n") * 6
    result = answer_samples(monkeypatch, httpx.Response(200, text=lines))
    assert (result.exit_code, result.stdout.count("reward 1")) == (1, 5)
    assert "more than 5 samples" in result.stderr


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_is_not_an_answer_without_lines(status, monkeypatch):
    answer = httpx.Response(status, headers={"location": "http://elsewhere"})
    use_transport(monkeypatch, httpx.MockTransport(lambda _: answer))
    for command in (["logs", RUN], ["samples", RUN]):
        result = CliRunner().invoke(app, [*command, "--url", "http://wrong"])
        assert result.exit_code == 1, (command, result.output)


def test_a_damaged_compression_is_no_traceback(monkeypatch):
    head = {"content-encoding": "gzip"}

    class Damaged(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b"no gzip"

    use_transport(
        monkeypatch,
        httpx.MockTransport(lambda _: httpx.Response(200, headers=head, stream=Damaged())),
    )
    result = CliRunner().invoke(app, ["logs", RUN, "--url", "http://wrong"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1


def use_transport(monkeypatch, transport):
    """Lets the client of the commands send its requests to a transport."""
    client = httpx.AsyncClient
    monkeypatch.setattr(
        async_transport.httpx,
        "AsyncClient",
        lambda **options: client(**options, transport=transport),
    )


async def test_pages_of_events_that_do_not_advance_end_the_call(monkeypatch):
    monkeypatch.setattr(api_module, "_EVENTS_A_PAGE", 1)
    event = {
        "run_id": RUN,
        "seq": 1,
        "time": 0,
        "type": "x",
        "message": "",
        "data": {},
        "actor": "",
    }
    page = httpx.Response(200, json={"items": [event]})
    http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: page))
    async with Api("http://controller", http=http) as api:
        with pytest.raises(ApiError, match="advance"):
            await api.events(RUN)


@pytest.mark.parametrize("run_id", ["../../etc", "/etc", "..", "run_1/../x", "", "a" * 4096])
@pytest.mark.parametrize("operation", [ListRuns(), GetRun(run_id=RUN)])
async def test_an_id_that_names_a_folder_elsewhere_is_refused(run_id, operation):
    run = TRACKED.model_dump(mode="json") | {"id": run_id}
    answer = {"items": [run], "next_page_token": ""} if isinstance(operation, ListRuns) else run
    http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    )
    async with Api("http://controller", http=http) as api:
        with pytest.raises(ApiError, match="no id of a run"):
            await api.call(operation)


@pytest.mark.parametrize(
    ("kind", "event"), [("StepCommitted", {"seq": 1, "data": "text"}), ("end", {"seq": 2})]
)
async def test_an_event_without_the_fields_of_the_api_is_refused(kind, event):
    text = f"event: {kind}\nid: 1\ndata: {json.dumps(event)}\n\n"
    answer = httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
    http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
    async with Api("http://controller", http=http) as api:
        with pytest.raises(ApiError, match="does not answer as a controller"):
            async for _ in api.watch(RUN):
                pass


def test_a_terminal_that_cannot_show_an_answer_is_no_fault_of_the_server():
    with pytest.raises(UnicodeEncodeError), fields_of("http://controller", "the run"):
        "\u00fc".encode("ascii")
