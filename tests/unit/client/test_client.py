"""Tests that the client finds a controller, sends requests, and reports failures."""

import json
import multiprocessing
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from slipstream_client import ApiError, Client, RunFailedError
from slipstream_client.async_transport import AsyncTransport
from slipstream_client.local import find_token, find_url
from slipstream_client.specification import read_spec

RUN_ID = "run_" + "0" * 32
RUN = {
    **dict.fromkeys(("project", "state_reason", "message", "created_by", "spec_digest"), ""),
    **dict.fromkeys(("priority", "step", "weight_version", "target_steps"), 0),
    "id": RUN_ID,
    "name": "one",
    "desired": "RUNNING",
    "state": "RUNNING",
    "labels": {},
    "summary": {},
    "spec": {},
    "revision": 1,
    "generation": 1,
    "create_time": "2026-01-01T00:00:00Z",
    "update_time": "2026-01-01T00:00:00Z",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SLIPSTREAM_URL", "SLIPSTREAM_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def keep_token(home, address, **owner):
    folder = home / ".slipstream" / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    entry = {"token": f"of {address}", "host": socket.gethostname(), "pid": os.getpid(), **owner}
    (folder / address).write_text(json.dumps(entry))


def client_of(answer, **options) -> Client:
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Client("http://controller", http=http, **options)


def test_the_only_controller_that_runs_here_is_meant(home):
    keep_token(home, "127.0.0.1:1", pid=2**22 + 1)
    keep_token(home, "127.0.0.1:2", host="elsewhere")
    keep_token(home, "127.0.0.1:3")
    assert find_url() == "http://127.0.0.1:3"
    assert find_token("http://127.0.0.1:3/") == "of 127.0.0.1:3"
    keep_token(home, "127.0.0.1:4")
    with pytest.raises(ApiError, match=r"several controllers .*:3, .*:4"):
        find_url()


def test_the_environment_names_another_one(home, monkeypatch):
    keep_token(home, "127.0.0.1:3")
    monkeypatch.setenv("SLIPSTREAM_URL", "http://elsewhere:80")
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert (find_url(), find_token("http://elsewhere:80")) == ("http://elsewhere:80", "secret")
    assert find_url("http://given") == "http://given"


def test_a_missing_controller_is_reported_with_a_fix():
    with pytest.raises(ApiError, match="start one with 'slipstream up'"):
        Client()


def test_files_next_to_a_specification_get_absolute_paths(tmp_path):
    for name in ("rows.jsonl", "task.py", "exact_match"):
        (tmp_path / name).touch()
    (tmp_path / "my.yaml").write_text(
        "name: exact_match\n"
        "model: {path: Qwen/Qwen2.5-0.5B, tokenizer: 'chars:012='}\n"
        "data: {train: {source: jsonl, path: rows.jsonl}}\n"
        "rollout: {rewards: [{name: 'task.py:reward'}, {name: exact_match}], workflow: missing.py:f}\n"
    )
    assert read_spec(tmp_path / "my.yaml") == {
        "name": "exact_match",
        "model": {"path": "Qwen/Qwen2.5-0.5B", "tokenizer": "chars:012="},
        "data": {"train": {"source": "jsonl", "path": f"{tmp_path}/rows.jsonl"}},
        "rollout": {
            "rewards": [{"name": f"{tmp_path}/task.py:reward"}, {"name": "exact_match"}],
            "workflow": "missing.py:f",
        },
    }
    text = "Solve the problem. " * 300
    (tmp_path / "long.yaml").write_text(f"data: {{prompt_template: '{text}'}}\n")
    assert read_spec(tmp_path / "long.yaml") == {"data": {"prompt_template": text}}
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"list\.yaml: expected a mapping of keys, got list"):
        read_spec(str(tmp_path / "list.yaml"))


def test_a_refusal_names_what_is_wrong():
    problem = {
        "code": "invalid_argument",
        "detail": "no",
        "errors": [{"pointer": "/trainer/steps", "message": "too few"}],
    }
    with (
        client_of(lambda request: httpx.Response(422, json=problem)) as client,
        pytest.raises(ApiError, match=r"^no\ntrainer\.steps: too few$") as refused,
    ):
        client.submit({"name": "x"})
    assert (refused.value.status, refused.value.code) == (422, "invalid_argument")


def test_a_submission_that_is_repeated_has_the_same_key():
    keys = []

    def answer(request):
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise httpx.ConnectError("refused")
        assert dict(request.url.params.multi_items()) == {
            "validate_only": "false",
            "priority": "2",
            "label": "team=blue",
        }
        return httpx.Response(201, json=RUN)

    with client_of(answer, retry_s=30) as client:
        assert client.submit({}, priority=2, labels={"team": "blue"}).id == RUN_ID
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_waiting_for_a_failed_run_raises_an_error():
    def answer(request):
        if not request.url.path.endswith("/stream"):
            body = {"items": []} if request.url.path.endswith("/events") else RUN
            return httpx.Response(200, json=body)
        ended = json.dumps({**RUN, "state": "FAILED", "message": "no memory"})
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, text=f"event: end\ndata: {ended}\n\n", headers=headers)

    with (
        client_of(answer) as client,
        pytest.raises(RunFailedError, match=r"^one FAILED: no memory$"),
    ):
        client.run(RUN_ID).wait()


def test_an_unknown_name_is_not_found():
    def answer(request):
        return httpx.Response(200, json={"items": [], "next_page_token": ""})

    with client_of(answer) as client, pytest.raises(ApiError) as error:
        client.run("gone")
    assert (error.value.status, error.value.code) == (404, "not_found")


def test_a_wait_beyond_its_timeout_raises():
    def answer(request):
        return httpx.Response(200, json=RUN | {"items": []})

    with client_of(answer) as client, pytest.raises(TimeoutError, match="has not ended within 0 s"):
        client.run(RUN_ID).wait(timeout_s=0)


class Stream(httpx.AsyncByteStream):
    """Response stream that yields the lines of a function."""

    def __init__(self, lines):
        self.lines = lines

    async def __aiter__(self):
        for line in self.lines():
            yield line


@pytest.fixture
def clock(monkeypatch):
    """Returns a list whose only element is the time of a fake clock, which sleeps advance."""
    now = [0.0]

    async def sleep(seconds):
        now[0] += seconds

    transport = "slipstream_client.async_transport"
    monkeypatch.setattr(f"{transport}.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(f"{transport}.asyncio", SimpleNamespace(sleep=sleep))
    return now


def test_a_run_is_watched_through_a_restart_after_a_long_silence(clock):
    def cut_off():
        clock[0] += 500.0
        yield b": alive\n"
        raise httpx.ReadError("the controller was killed")

    def end():
        yield f"event: end\ndata: {json.dumps(RUN)}\n".encode()

    answers = iter([cut_off, None, end])

    def answer(request):
        if (lines := next(answers)) is None:
            raise httpx.ConnectError("not yet")
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=Stream(lines))

    with client_of(answer) as client:
        assert [kind for kind, _ in client.watch(RUN_ID)] == ["end"]


def test_a_controller_that_stays_away_is_given_up_after_a_minute(clock):
    def answer(request):
        raise httpx.ConnectError("gone")

    with client_of(answer) as client, pytest.raises(ApiError, match="lost the connection"):
        list(client.watch(RUN_ID))
    assert 60 <= clock[0] <= 62


async def test_a_controller_that_is_restarted_has_the_time_that_the_caller_allows(clock):
    def answer(request):
        if clock[0] < 500:
            raise httpx.ConnectError("it imports its modules")
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, text=f"event: end\ndata: {json.dumps(RUN)}\n\n", headers=headers)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    transport = AsyncTransport("http://controller", away_s=600, http=http)
    assert [kind async for kind, _ in transport.watch(RUN_ID)] == ["end"]


def answer_list(request):
    return httpx.Response(200, json={"items": [{**RUN, "activities": []}], "next_page_token": ""})


async def test_a_synchronous_client_works_where_an_event_loop_runs():
    with client_of(answer_list) as client:
        assert [run.name for run in client.list_runs().items] == ["one"]


def test_threads_share_a_client():
    with client_of(answer_list) as client, ThreadPoolExecutor(8) as threads:
        pages = list(threads.map(lambda _: client.list_runs(), range(50)))
    assert [len(page.items) for page in pages] == [1] * 50


def test_the_error_in_a_forked_process_asks_for_a_new_client():
    def use(client, answers):
        try:
            client.list_runs()
        except RuntimeError as error:
            answers.put(str(error))
        with client_of(answer_list) as forked_client:
            answers.put(len(forked_client.list_runs().items))

    context = multiprocessing.get_context("fork")
    with client_of(answer_list) as client:
        client.list_runs()
        answers = context.SimpleQueue()
        child = context.Process(target=use, args=(client, answers))
        child.start()
        assert "another process" in answers.get()
        assert answers.get() == 1
        child.join()


def test_a_stream_that_is_left_early_is_closed():
    closed = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):
            while True:
                yield f"event: Tried\ndata: {json.dumps({'seq': 1})}\n".encode()

        async def aclose(self):
            closed.append(True)

    headers = {"content-type": "text/event-stream"}
    with client_of(lambda r: httpx.Response(200, headers=headers, stream=Endless())) as client:
        for _, _event in client.watch(RUN_ID):
            break
        else:
            pytest.fail("no event")
    assert closed == [True]
