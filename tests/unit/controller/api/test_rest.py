"""The REST API over a manager whose runs have no workers."""

import asyncio
import json
from urllib.parse import unquote

import pytest

from services.common.security.confinement import CodePolicy
from services.controller.api import errors, request_limits
from services.controller.api.app import build_app
from services.controller.api.principals import TokenStore
from services.controller.fleets import named_fleet
from services.controller.schemas import FleetRunView, FleetServerView, FleetView
from services.controller.store.records import Note
from services.controller.store.runs import RunStore
from tests.helpers.rest import SPEC, api_of, client_of, named, open_manager, save

JSON = {"Content-Type": "application/json"}


async def test_a_run_is_submitted_read_and_cancelled(api):
    created = await api.post("/v1/runs", json=SPEC)
    assert created.status_code == 201
    path = created.headers["Location"]
    response = await api.get(path)
    assert response.json()["state"] in ("QUEUED", "STARTING")
    assert (
        await api.get(path, headers={"If-None-Match": response.headers["ETag"]})
    ).status_code == 304
    assert (await api.post(f"{path}/cancel")).json()["state"] in ("CANCELLING", "CANCELLED")


@pytest.mark.postgresql
async def test_an_idempotency_key_makes_one_run(api):
    first = await api.post("/v1/runs", json=SPEC, headers={"Idempotency-Key": "k"})
    again = await api.post("/v1/runs", json=SPEC, headers={"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = await api.post("/v1/runs", json={**SPEC, "seed": 1}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


async def test_runs_wait_for_their_turn_and_the_queue_is_bounded(api):
    for number in range(3):
        assert (await api.post("/v1/runs", json=named(number))).status_code == 201
    quota = (await api.get("/v1/quota")).json()
    assert (quota["active_runs"], quota["queued_runs"]) == (1, 2)
    refused = await api.post("/v1/runs", json=SPEC)
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert int(refused.headers["Retry-After"]) > 0


@pytest.mark.postgresql
async def test_a_name_is_free_again_once_its_run_has_ended(api):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    refused = await api.post("/v1/runs", json=SPEC)
    assert (refused.status_code, refused.json()["code"]) == (409, "name_taken")
    await api.post(f"{path}/cancel")
    await api.get(f"{path}/events/stream")
    assert (await api.post("/v1/runs", json=SPEC)).status_code == 201


async def test_a_run_of_higher_priority_starts_first(api, manager):
    runs = [
        (await api.post("/v1/runs", json=named(n), params={"priority": priority})).json()["id"]
        for n, priority in enumerate((0, 0, 5))
    ]
    await api.post(f"/v1/runs/{runs[0]}/cancel")
    async for events in manager.feed.watch(runs[2], 1):
        if any(event.data.get("to") == "STARTING" for event in events):
            break
    assert (await api.get(f"/v1/runs/{runs[1]}")).json()["state"] == "QUEUED"


async def test_a_patch_needs_the_revision_that_was_read(api):
    created = await api.post("/v1/runs", json=SPEC)
    path = created.headers["Location"]
    patch = {"labels": {"team": "blue"}}
    assert (await api.patch(path, json=patch)).status_code == 428
    assert (await api.patch(path, json=patch, headers={"If-Match": '"0"'})).status_code == 412
    etag = (await api.get(path)).headers["ETag"]
    changed = await api.patch(path, json=patch, headers={"If-Match": etag})
    assert changed.json()["labels"] == {"team": "blue"}
    noted = (await api.get(f"{path}/events", params={"type": "RunChanged"})).json()["items"]
    assert [event["data"]["changed"] for event in noted] == [["labels"]]
    listed = (await api.get("/v1/runs", params={"label": "team=blue"})).json()["items"]
    assert len(listed) == 1
    assert (await api.get("/v1/runs", params={"label": "team=red"})).json()["items"] == []


async def test_a_step_changes_what_is_read_and_refuses_no_patch(api, database):
    created = (await api.post("/v1/runs", json=SPEC)).json()
    path = f"/v1/runs/{created['id']}"
    etag = (await api.get(path)).headers["ETag"]
    RunStore(database).record(created["id"], Note("StepCommitted", "step 1", {}, 1))
    assert (await api.get(path, headers={"If-None-Match": etag})).json()["step"] == 1
    revision = (await api.get(path)).json()["revision"]
    for key, number in ((etag, 1), (f'"{revision + 1}"', 2)):
        patch = {"priority": number}
        changed = await api.patch(path, json=patch, headers={"If-Match": key})
        assert changed.json()["priority"] == number
        assert (await api.patch(path, json=patch, headers={"If-Match": key})).status_code == 412


@pytest.mark.parametrize(
    "patch",
    [
        {"checkpoint_every": True},
        {"checkpoint_every": "3"},
        {"validation_every": 2.5},
        {"rollout_replicas": "2"},
        {"priority": True},
    ],
)
async def test_a_patch_takes_numbers_only_where_numbers_are_expected(api, patch):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    etag = (await api.get(path)).headers["ETag"]
    refused = await api.patch(path, json=patch, headers={"If-Match": etag})
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert next(iter(patch)) in error["pointer"]


async def test_a_patch_without_changes_changes_nothing(api):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    etag = (await api.get(path)).headers["ETag"]
    same = await api.patch(path, json={}, headers={"If-Match": etag})
    assert (same.status_code, same.headers["ETag"]) == (200, etag)
    assert (await api.patch(path, json={}, headers={"If-Match": '"99"'})).status_code == 412


@pytest.mark.parametrize("odd", ["%00", "%1b[2J", "%0a"])
async def test_control_characters_are_rejected_wherever_texts_are_stored_or_sought(api, odd):
    run = (await api.post("/v1/runs", json=SPEC)).json()
    queries = [
        f"/v1/runs?label=a%3D{odd}",
        f"/v1/runs?name={odd}",
        f"/v1/runs/{run['id']}/events?type={odd}",
        f"/v1/runs/{run['id']}/metrics?name={odd}",
    ]
    answers = [await api.get(query) for query in queries]
    answers.append(await api.post(f"/v1/runs?label=a%3D{odd}", json=SPEC))
    patch = {"labels": {"a": unquote(odd)}}
    answers.append(
        await api.patch(f"/v1/runs/{run['id']}", json=patch, headers={"If-Match": '"1"'})
    )
    assert [answer.status_code for answer in answers] == [422] * len(answers)


@pytest.mark.postgresql
async def test_labels_and_priority_come_with_the_submission(api):
    parameters = {"label": ["team=blue", "note=a=b"], "priority": 7}
    headers = {"Idempotency-Key": "k"}
    run = (await api.post("/v1/runs", json=SPEC, params=parameters, headers=headers)).json()
    assert (run["labels"], run["priority"]) == ({"team": "blue", "note": "a=b"}, 7)
    listed = (await api.get("/v1/runs", params={"label": "note=a=b"})).json()["items"]
    assert [item["id"] for item in listed] == [run["id"]]
    again = await api.post("/v1/runs", json=SPEC, params=parameters, headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, run["id"])
    other = await api.post("/v1/runs", json=SPEC, params={"label": "team=red"}, headers=headers)
    assert other.json()["code"] == "idempotency_key_reused"
    for label in ("team", "=blue", "Team=blue", "team=" + "x" * 64):
        refused = await api.post("/v1/runs", json=SPEC, params={"label": label})
        assert refused.status_code == 422, label


async def test_only_ended_runs_are_deleted(api):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    etag = (await api.get(path)).headers["ETag"]
    refused = await api.delete(path, headers={"If-Match": etag})
    assert (refused.status_code, refused.json()["code"]) == (409, "not_terminal")
    await api.post(f"{path}/cancel")
    await api.get(f"{path}/events/stream")
    response = await api.get(path)
    assert (
        await api.delete(path, headers={"If-Match": response.headers["ETag"]})
    ).status_code == 204
    assert (await api.get(path)).status_code == 404


@pytest.mark.postgresql
async def test_the_logs_of_a_deleted_run_are_deleted_and_its_checkpoints_stay(api, tmp_path):
    folders = []
    for number in range(2):
        run_id = (await api.post("/v1/runs", json=named(number))).json()["id"]
        await api.post(f"/v1/runs/{run_id}/cancel")
        await api.get(f"/v1/runs/{run_id}/events/stream")
        (tmp_path / run_id / "logs").mkdir(parents=True)
        (tmp_path / run_id / "logs" / "trainer-0.log").write_text("a secret\n")
        if number:
            (tmp_path / run_id / "checkpoints").mkdir()
            folders.append(tmp_path / run_id / "checkpoints")
        etag = (await api.get(f"/v1/runs/{run_id}")).headers["ETag"]
        deleted = await api.delete(f"/v1/runs/{run_id}", headers={"If-Match": etag})
        assert deleted.status_code == 204
    assert [*tmp_path.glob("run_*/*")] == folders
    assert [*tmp_path.glob("run_*")] == [folders[0].parent]


async def test_pages_follow_each_other(api):
    for number in range(3):
        await api.post("/v1/runs", json=named(number))
    first = (await api.get("/v1/runs", params={"page_size": 2})).json()
    second = (
        await api.get("/v1/runs", params={"page_size": 2, "page_token": first["next_page_token"]})
    ).json()
    assert [len(first["items"]), len(second["items"])] == [2, 1]
    assert second["next_page_token"] == ""
    forged = await api.get("/v1/runs", params={"page_token": "cnVuXzE="})
    assert forged.status_code == 422


async def test_events_are_streamed_to_the_end(api):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    await api.post(f"{path}/cancel")
    body = (await api.get(f"{path}/events/stream")).text
    kinds = [line.removeprefix("event: ") for line in body.splitlines() if line.startswith("event")]
    assert kinds[0] == "Submitted"
    assert kinds[-1] == "end"
    after = (await api.get(f"{path}/events/stream", headers={"Last-Event-ID": "2"})).text
    assert "id: 2\n" not in after.replace("\r", "")


async def test_observations_of_a_run_without_steps_are_empty(api):
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    for name in ("metrics", "samples", "checkpoints", "topology"):
        assert (await api.get(f"{path}/{name}")).json()["items"] == []
    assert (await api.get(f"{path}/logs")).text == ""
    refused = await api.post(f"{path}/checkpoint")
    assert (refused.status_code, refused.json()["code"]) == (409, "invalid_transition")


async def test_a_queued_run_is_held_and_queued_again(api):
    await api.post("/v1/runs", json=named(1))
    path = (await api.post("/v1/runs", json=SPEC)).headers["Location"]
    assert (await api.post(f"{path}/pause")).json()["state"] == "PAUSED"
    assert (await api.post(f"{path}/resume")).json()["state"] == "QUEUED"


async def test_problems_have_codes(api):
    broken = await api.post("/v1/runs", content=b"{", headers=JSON)
    assert (broken.status_code, broken.json()["code"]) == (400, "invalid_json")
    assert broken.headers["Content-Type"] == "application/problem+json"
    unknown = await api.post("/v1/runs", json={**SPEC, "colour": "red"})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_spec")
    traced = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}
    assert (await api.get("/v1/runs/run_1", headers=traced)).json()["trace_id"] == "a" * 32
    assert len(unknown.json()["trace_id"]) == 32
    wrong = await api.put("/v1/runs")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "GET, POST")


async def test_tokens_separate_projects_and_roles(manager, database, tmp_path):
    tokens = TokenStore(database)
    ours = tokens.create(name="ann", project="blue", role="operator")
    viewer_token = tokens.create(name="bob", project="blue", role="viewer")
    theirs = tokens.create(name="eve", project="red", role="admin")
    async with client_of(manager, database, tmp_path, tokens, ours) as client:
        path = (await client.post("/v1/runs", json=SPEC)).headers["Location"]
        assert (await client.get(path)).json()["created_by"] == "ann"
    async with client_of(manager, database, tmp_path, tokens, viewer_token) as client:
        assert (await client.get(path)).status_code == 200
        assert (await client.post(f"{path}/cancel")).status_code == 403
    async with client_of(manager, database, tmp_path, tokens, theirs) as client:
        assert (await client.get(path)).status_code == 404
        assert (await client.get("/v1/runs")).json()["items"] == []
    async with client_of(manager, database, tmp_path, tokens) as client:
        refused = await client.get(path)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_what_the_installation_does_not_allow_is_refused(database, tmp_path):
    async with (
        open_manager(database, allowance=CodePolicy(roots=(tmp_path,))) as confined,
        client_of(confined, database, tmp_path) as client,
    ):
        for query in ({}, {"validate_only": True}):
            refused = await client.post("/v1/runs", json=SPEC, params=query)
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_spec")
            assert "data.train.path" in refused.text
        plain = {**SPEC, "rollout": {**SPEC["rollout"], "workflow_arguments": {"api_key": "k"}}}
        assert "workflow_arguments.api_key" in (await client.post("/v1/runs", json=plain)).text


async def test_files_of_another_projects_runs_are_not_there(manager, database, tmp_path):
    tokens = TokenStore(database)
    ours = tokens.create(name="ann", project="blue", role="operator")
    theirs = tokens.create(name="eve", project="red", role="admin")
    async with client_of(manager, database, tmp_path, tokens, ours) as client:
        run_id = (await client.post("/v1/runs", json=SPEC)).json()["id"]
    saved_elsewhere = "/data/blue/step-1"
    save(database, run_id, step=1, path=saved_elsewhere)
    save(database, run_id, step=2, path="s3://bucket/blue/step-2")
    by_id = {**named(2), "model": {"path": f"/var/lib/slipstream/{run_id}/checkpoints/step-1"}}
    stealing = [by_id] + [
        {**named(3), "trainer": {**SPEC["trainer"], "checkpoint": checkpoint}}
        for checkpoint in (
            {"start_from": saved_elsewhere},
            {"start_from": "/data/./x/../blue/step-1/model"},
            {"directory": "/data/blue"},
            {"start_from": "s3://bucket/blue/step-2"},
            {"directory": "s3://bucket/blue"},
        )
    ]
    for query in ({"validate_only": True}, {}):
        async with client_of(manager, database, tmp_path, tokens, theirs) as client:
            for spec in stealing:
                answer = await client.post("/v1/runs", json=spec, params=query)
                assert answer.status_code == 404
                assert spec is by_id or run_id not in answer.text
    async with client_of(manager, database, tmp_path, tokens, ours) as client:
        for spec in stealing:
            answer = await client.post("/v1/runs", json=spec, params={"validate_only": True})
            assert answer.status_code == 200
        assert (await client.post("/v1/runs", json=stealing[1])).status_code == 201
    async with client_of(manager, database, tmp_path, tokens, theirs) as client:
        beside = {**named(4), "trainer": {**SPEC["trainer"], "checkpoint": {"directory": "/data"}}}
        assert (await client.post("/v1/runs", json=beside)).status_code == 201


async def test_validation_reports_an_insufficient_quota(database, tmp_path):
    async with (
        open_manager(database, max_gpus=1) as limited,
        client_of(limited, database, tmp_path) as client,
    ):
        answers = [
            await client.post("/v1/runs", json=SPEC, params=query)
            for query in ({"validate_only": True}, {})
        ]
        assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {
            (409, "quota_too_small")
        }


TRUSTING = {"model": {"path": "org/model", "trust_remote_code": True}}


@pytest.mark.parametrize(
    "changes",
    [
        TRUSTING,
        *(
            {
                "model": {"path": "org/model"},
                "rollout": {**SPEC["rollout"], "engine": engine, "engine_arguments": arguments},
            }
            for engine, arguments in (
                ("vllm", {"trust_remote_code": True}),
                ("vllm", {"worker_cls": "evil.Worker"}),
                ("vllm", {"distributed_executor_backend": "evil.Executor"}),
                ("sglang", {"trust_remote_code": True}),
                ("sglang", {"speculative_draft_model_path": "evil/draft"}),
            )
        ),
    ],
)
async def test_unreviewed_code_needs_an_admin(manager, database, tmp_path, changes):
    tokens = TokenStore(database)
    for role, status in (("operator", 403), ("admin", 201)):
        token = tokens.create(name=role, project="blue", role=role)
        async with client_of(manager, database, tmp_path, tokens, token) as client:
            for query in ({"validate_only": True}, {}):
                answer = await client.post("/v1/runs", json={**SPEC, **changes}, params=query)
                assert answer.status_code == (200 if query and role == "admin" else status)
                assert role == "admin" or answer.json()["code"] == "permission_denied"


async def test_an_operator_sets_what_engines_do_with_their_memory(manager, database, tmp_path):
    tokens = TokenStore(database)
    token = tokens.create(name="ann", project="blue", role="operator")
    rollout = {
        **SPEC["rollout"],
        "engine": "vllm",
        "engine_arguments": {"gpu_memory_utilization": 0.8, "tensor_parallel_size": 2},
    }
    async with client_of(manager, database, tmp_path, tokens, token) as client:
        answer = await client.post("/v1/runs", json={**SPEC, "rollout": rollout})
        assert answer.status_code == 201, answer.text


async def test_a_body_that_is_too_large_is_refused(api):
    refused = await api.post("/v1/runs", content=b" " * ((1 << 20) + 1), headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"name": 5}, "/name"),
        ({"trainer": None}, "/trainer"),
        ({"trainer": {"steps": 10**40, "prompts_per_step": 4}}, "/trainer/steps"),
        ({"limits": {"step_timeout_s": float("inf")}}, "/limits/step_timeout_s"),
        ({"topology": 5}, "/topology"),
        (
            {"trainer": {"sperated_node_tasks": ["train"], "nnodes": "a", "n_gpus_per_node": 8}},
            "/trainer/nnodes",
        ),
        ({"validation": {"replicas": 2}}, "/validation/replicas"),
        (
            {"rollout": {**SPEC["rollout"], "workflow_arguments": {"x-api-key": "k"}}},
            "/rollout/workflow_arguments/x-api-key",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_with_a_specification_is_pointed_at(api, changes, pointer):
    refused = await api.post("/v1/runs", content=json.dumps({**SPEC, **changes}), headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_spec")
    assert refused.json()["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize("count", ["x", 0, True, [1]])
async def test_an_engine_needs_a_number_of_gpus(api, count):
    split = {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5], "gpus": 8}
    rollout = {
        **SPEC["rollout"],
        "engine": "vllm",
        "engine_arguments": {"tensor_parallel_size": count},
    }
    refused = await api.post("/v1/runs", json={**SPEC, "topology": split, "rollout": rollout})
    assert refused.status_code == 422
    assert "tensor_parallel_size must be an integer" in refused.text


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
async def test_what_cannot_be_read_is_no_json(api, body):
    refused = await api.post("/v1/runs", content=body, headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_json")


async def test_overrides_of_a_fork_may_be_anything_but_a_fault(api):
    run_id = (await api.post("/v1/runs", json=SPEC)).json()["id"]
    for overrides in ({"model": None}, {"model": "x"}, {"model": []}):
        refused = await api.post(f"/v1/runs/{run_id}/fork", json={"overrides": overrides})
        assert refused.status_code == 409, refused.text


async def test_half_a_character_is_the_callers_fault(api):
    half = b'{"overrides": {"name": "\\ud800"}}'
    run_id = (await api.post("/v1/runs", json=SPEC)).json()["id"]
    refused = await api.post(f"/v1/runs/{run_id}/fork", content=half, headers=JSON)
    assert refused.status_code == 422, refused.text
    half = json.dumps({**SPEC, "model": "\ud800"})
    refused = await api.post("/v1/runs", content=half, headers=JSON)
    assert refused.status_code == 422, refused.text


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {**SPEC["rollout"], "rewards": [{"name": "x", "a": 1}] * 9000}},
        {"rollout": {**SPEC["rollout"], "rewards": [{"name": "math", "weight": -1}] * 7000}},
        {f"key{number}": 1 for number in range(9000)},
    ],
    ids=["wrong items", "broken rules", "unknown keys"],
)
async def test_of_very_many_problems_the_first_are_explained(api, changes):
    refused = await api.post("/v1/runs", json={**SPEC, **changes})
    assert refused.status_code == 422
    assert 90 < len(refused.json()["errors"]) < 110, "each takes time to explain"


async def test_a_body_that_states_too_large_a_size_is_refused_unread(api):
    num_read = 0

    async def body():
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield b" " * 8192

    stated = {**JSON, "Content-Length": str(100 * 8192)}
    refused = await api.post("/v1/runs", content=body(), headers=stated)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert num_read == 0


async def test_a_client_that_disconnects_within_its_body_is_no_fault(
    manager, database, tmp_path, caplog
):
    app, statuses = build_app(api_of(manager, database, tmp_path)), []
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    async def send(message):
        statuses.append(message.get("status"))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/runs",
        "query_string": b"",
        "headers": headers,
        "state": {},
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    assert statuses[0] == 400
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_without_a_length_is_limited_too(api):
    async def endless():
        for _ in range(3):
            yield b" " * (1 << 19)

    refused = await api.post("/v1/runs", content=endless(), headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")


async def test_a_body_that_does_not_come_is_not_waited_for(api, monkeypatch):
    monkeypatch.setattr(errors, "_BODY_DEADLINE_S", 0.05)

    async def stuck():
        yield b"{"
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        refused = await api.post("/v1/runs", content=stuck(), headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (408, "request_timeout")


async def test_the_body_of_an_unknown_caller_is_not_read(manager, database, tmp_path):
    async def stuck():
        yield b"{"
        await asyncio.Event().wait()

    headers = JSON | {"If-Match": '"1"'}
    async with client_of(manager, database, tmp_path, TokenStore(database), token="slp_x") as api:
        for method, path in (("POST", "/v1/runs"), ("PATCH", f"/v1/runs/run_{'0' * 32}")):
            async with asyncio.timeout(20):
                refused = await api.request(method, path, content=stuck(), headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")


async def test_lookups_of_unknown_tokens_are_limited(manager, database, tmp_path, monkeypatch):
    monkeypatch.setattr(request_limits, "_BURST", 1000.0)
    monkeypatch.setattr(request_limits, "_MAX_WAITING", 64)
    headers = [{"Authorization": f"Bearer slp_{number}"} for number in range(100)]
    async with client_of(manager, database, tmp_path, TokenStore(database)) as api:
        answers = await asyncio.gather(*(api.get("/v1/runs", headers=answer) for answer in headers))
    assert {answer.status_code for answer in answers} == {401, 429}


class _Fleets:
    """One fleet, whose server two runs share."""

    def __init__(self, *run_ids):
        self.run_ids = run_ids

    async def views(self):
        return [await self.view("shared")]

    async def view(self, name):
        runs = [
            FleetRunView(
                run_id=run_id,
                share=1.0,
                weight_version=3,
                adapters=1,
                tokens=10,
                requests=2,
                running=1,
                waiting=0,
            )
            for run_id in self.run_ids
        ]
        server = FleetServerView(address="http://a:1", is_healthy=True, runs=runs)
        return FleetView(name=name, servers=[server])

    async def resolve(self, spec):
        spec = {**spec, "seed": 12345}
        if named_fleet(spec) is not None:
            servers = {"addresses": ["http://a:1"]}
            spec["rollout"] = {**spec["rollout"], "engine_arguments": servers}
        return spec


async def test_a_fleet_shows_the_ids_of_the_projects_own_runs_only(database, tmp_path):
    async with open_manager(database) as manager:
        fleets = _Fleets("run_" + "0" * 32)
        async with client_of(manager, database, tmp_path, fleets=fleets) as client:
            own_run = (await client.post("/v1/runs", json=SPEC)).json()["id"]
            fleets.run_ids = (own_run, *fleets.run_ids)
            (fleet,) = (await client.get("/v1/fleets")).json()["items"]
            assert (await client.get("/v1/fleets/shared")).json() == fleet
    assert [run["run_id"] for run in fleet["servers"][0]["runs"]] == [own_run, None]


async def test_a_run_is_created_with_the_servers_of_its_fleet(database, tmp_path):
    async with (
        open_manager(database) as manager,
        client_of(manager, database, tmp_path, fleets=_Fleets()) as client,
    ):
        answer = await client.post("/v1/runs", json=SPEC)
        assert answer.json()["spec"]["seed"] == 12345


async def test_a_fork_leaves_its_parents_servers_for_those_of_the_fleet_that_it_names(
    database, tmp_path
):
    async with (
        open_manager(database) as manager,
        client_of(manager, database, tmp_path, fleets=_Fleets()) as client,
    ):
        engine = {
            "engine": "vllm-server",
            "replicas": 1,
            "engine_arguments": {"addresses": ["http://b:1"], "token": {"secret": "OF_B"}},
        }
        spec = {
            **SPEC,
            "rollout": {**SPEC["rollout"], **engine},
            "weight_sync": {"mode": "cpu_async"},
        }
        created = await client.post("/v1/runs", json=spec)
        assert created.status_code == 201, created.text
        run_id = created.json()["id"]
        save(database, run_id, step=0, path="/checkpoints/step-00000000")
        changes = {"rollout": {"engine_arguments": {"fleet": "shared"}}}
        forked = await client.post(
            f"/v1/runs/{run_id}/fork", json={"name": "two", "overrides": changes}
        )
        assert forked.status_code == 201, forked.text
        arguments = forked.json()["spec"]["rollout"]["engine_arguments"]
        assert arguments == {"addresses": ["http://a:1"]}


async def test_an_installation_without_fleets_has_an_empty_list_of_them(api):
    assert (await api.get("/v1/fleets")).json() == {"items": []}
    missing = await api.get("/v1/fleets/shared")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
