"""Forks, checkpoints, changes, logs and streams of runs, with a manager without workers."""

import asyncio
import itertools
import json

import pytest

from services.common.runspec.keys import LIVE_KEYS, fields_of, flat, nested
from services.common.runspec.run import RunSpec
from services.common.telemetry import tracing
from services.controller.api.principals import TokenStore
from services.controller.manager import archive
from services.controller.manager.changes import fork_name
from services.controller.manager.spec_policy import SpecPolicy
from services.controller.rules.ledger import Ledger
from services.controller.rules.run_state import RunEvent
from services.controller.store import ledgers as ledger_store
from services.controller.store.records import Note
from services.controller.store.rows import forget_events
from services.controller.store.runs import RunStore
from services.controller.store.tables import RUNS
from tests.helpers.rest import SPEC, EmptyQueue, client_of, named, open_manager, save

pytestmark = pytest.mark.postgresql

NUMBERS = itertools.count()


async def submitted(api, **sections) -> str:
    spec = {**named(next(NUMBERS)), **sections}
    return (await api.post("/v1/runs", json=spec)).json()["id"]


async def ended(api, run_id) -> None:
    """Cancels a run and waits for its end."""
    await api.post(f"/v1/runs/{run_id}/cancel")
    await api.get(f"/v1/runs/{run_id}/events/stream")


def train(database, run_id, *, steps) -> None:
    """Issues and trains two groups in each step, and commits the steps."""
    ledger = Ledger(max_attempts=3)
    with database.write() as connection:
        for step in range(1, steps + 1):
            groups = [ledger.issue(row=2 * step + i, position=2 * step + i) for i in range(2)]
            for group in groups:
                ledger.lease(group, "rollout-0", version=step - 1, now=0.0)
                ledger.complete(group, oldest_version=step - 1)
            ledger.train(groups)
            ledger_store.write_change(connection, run_id, ledger.take_changes())
            ledger_store.begin_step(connection, run_id, step, version=step - 1, groups=groups)
            ledger.consume(groups)
            ledger_store.write_change(connection, run_id, ledger.take_changes())
            ledger_store.commit_step(connection, run_id, step, {"reward_mean": 0.5})


class RecordingQueue(EmptyQueue):
    """Notes the store from which the samples of each run are deleted."""

    def __init__(self) -> None:
        self.directories: dict[str, str] = {}

    async def delete_sample_records(self, run_id, *, directory=""):
        self.directories[run_id] = directory


async def test_a_run_of_another_release_is_deleted_with_its_samples(database, tmp_path):
    queue, directories = RecordingQueue(), {}
    async with (
        open_manager(database, queue=queue) as manager,
        client_of(manager, database, tmp_path) as api,
    ):
        for samples in (None, {"directory": "s3://bucket/samples"}):
            run_id = await submitted(api)
            await ended(api, run_id)
            document = {"key_of_another_release": 1} | ({"samples": samples} if samples else {})
            with database.write() as connection:
                connection.execute(RUNS.update().values(spec_json=json.dumps(document)))
            await manager.delete(run_id, revision=(await manager.get(run_id)).revision)
            directories[run_id] = samples["directory"] if samples else ""
    assert queue.directories == directories


async def test_numbers_of_steps_are_thinned_out_evenly(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=7)
    for query, steps in (
        ("", [1, 2, 3, 4, 5, 6, 7]),
        ("name=reward_mean&from_step=5", [5, 6, 7]),
        ("max_points=3", [1, 4, 7]),
        ("max_points=2&from_step=2", [4, 7]),
        ("max_points=2&from_step=2&to_step=5", [3, 5]),
        ("from_step=9", []),
    ):
        content = (await api.get(f"/v1/runs/{run_id}/metrics?{query}")).json()
        assert content["steps"] == steps, query
        assert len(content["times"]) == len(steps)
        columns = [{"name": "reward_mean", "values": [0.5] * len(steps)}]
        assert content["items"] == (columns if steps else [])


async def test_numbers_are_asked_for_by_name(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=2)
    content = (await api.get(f"/v1/runs/{run_id}/metrics?name=loss&name=reward_mean")).json()
    assert [metric["name"] for metric in content["items"]] == ["reward_mean"]


async def test_events_are_read_from_the_newest_on_and_by_type(api):
    run_id = await submitted(api)
    await ended(api, run_id)
    path = f"/v1/runs/{run_id}/events"

    async def numbers(query):
        items = (await api.get(f"{path}?{query}")).json()["items"]
        return [event["seq"] for event in items]

    everything = await numbers("")
    assert len(everything) > 2
    assert await numbers("order_by=-seq") == everything[::-1]
    assert await numbers(f"order_by=-seq&limit=1&before_seq={everything[-1]}") == everything[-2:-1]
    changes = await numbers("type=StateChanged&type=Cancelled")
    others = await numbers("not_type=StateChanged&not_type=Cancelled")
    assert changes
    assert others
    assert sorted(changes + others) == everything


async def test_a_run_that_has_ended_keeps_its_specification(api):
    run_id = await submitted(api)
    path = f"/v1/runs/{run_id}"
    spec = (await api.get(path)).json()["spec"]
    await ended(api, run_id)
    headers = {"If-Match": (await api.get(path)).headers["ETag"]}
    for patch in (
        {"rollout_replicas": 9},
        {"checkpoint_every": 7},
        {"limits": {"max_restarts": 9}},
    ):
        refused = await api.patch(path, json=patch, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (409, "ended"), patch
    labelled = (await api.patch(path, json={"labels": {"a": "b"}}, headers=headers)).json()
    assert (labelled["labels"], labelled["spec"]) == ({"a": "b"}, spec)


async def test_a_fork_continues_from_a_checkpoint_with_the_same_prompts(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=3)
    save(database, run_id, step=2, path="/checkpoints/step-00000002")
    body = {"name": "two", "overrides": {"trainer": {"steps": 9}, "algorithm": {"clip_low": 0.1}}}
    forked = await api.post(f"/v1/runs/{run_id}/fork", json=body)
    assert forked.status_code == 201, forked.text
    run = forked.json()
    assert (run["name"], run["step"], run["weight_version"]) == ("two", 2, 2)
    assert run["spec"]["trainer"]["steps"] == 9
    assert run["spec"]["trainer"]["checkpoint"]["start_from"] == "/checkpoints/step-00000002"
    with database.read() as connection:
        state = ledger_store.read_ledger(connection, run["id"])
        steps = ledger_store.read_steps(connection, run["id"])
    assert [step.step for step in steps] == [1, 2]
    # The fork trains the groups of the parent's third step again.
    assert [(group.sequence, group.row) for group in state.groups] == [(4, 6), (5, 7)]


@pytest.mark.parametrize("written", ["/checkpoints/step-00000001", "/checkpoints/./step-00000001/"])
async def test_a_run_does_not_start_from_a_checkpoint_that_is_being_replaced(
    api, database, written
):
    run_id = await submitted(api)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    trainer = {**SPEC["trainer"], "checkpoint": {"start_from": written}}
    note = Note(
        "CheckpointStarted", "saving the checkpoint of step 2", {"step": 2, "replaces": [1]}
    )
    RunStore(database).record(run_id, note)
    body = {**named(next(NUMBERS)), "trainer": trainer}
    refused = await api.post("/v1/runs", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "no_usable_checkpoint")
    RunStore(database).record(run_id, Note("CheckpointFailed", "it was not saved", {"step": 2}))
    assert (await api.post("/v1/runs", json=body)).status_code == 201


async def test_overrides_of_a_fork_win_over_its_parent_under_any_name(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=3)
    save(database, run_id, step=2, path="/checkpoints/step-00000002")
    overrides = {"algorithm": {"generate_ahead_steps": 3}, "data": {"epochs": 2}}
    forked = await api.post(f"/v1/runs/{run_id}/fork", json={"name": "two", "overrides": overrides})
    assert forked.status_code == 201, forked.text
    spec = forked.json()["spec"]
    assert spec["algorithm"]["max_staleness"] == 3
    assert (spec["data"]["epochs"], spec["trainer"]["steps"]) == (2, None)


async def test_a_fork_with_another_model_is_refused_by_key(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=2)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    for overrides, key in (
        ({"model": {"path": "tiny:qwen3-0.4m"}}, "model.path"),
        ({"model": {"tokenizer": "chars:xyz"}}, "model.tokenizer"),
        ({"trainer": {"lora": {"rank": 2}}}, "trainer.lora"),
        ({"trainer": {"optimizer": {"kind": "muon"}}}, "trainer.optimizer.kind"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
    ):
        refused = await api.post(f"/v1/runs/{run_id}/fork", json={"overrides": overrides})
        assert refused.status_code == 422, refused.text
        assert key in refused.text


async def test_a_fork_may_write_the_same_adapters_in_another_order(api, database):
    run_id = await submitted(
        api, trainer={**SPEC["trainer"], "lora": {"target_modules": ["a", "b"]}}
    )
    train(database, run_id, steps=2)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    for modules, status in ((["b", "a"], 201), (["b"], 422)):
        overrides = {"trainer": {"lora": {"target_modules": modules}}}
        body = {"name": f"fork-{len(modules)}", "overrides": overrides}
        forked = await api.post(f"/v1/runs/{run_id}/fork", json=body)
        assert forked.status_code == status, forked.text


async def test_a_fork_that_leaves_nothing_to_train_is_refused_by_key(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=3)
    save(database, run_id, step=3, path="/checkpoints/step-00000003")
    for steps, validation, status in ((3, {}, 422), (4, {}, 201), (3, {"only": True}, 201)):
        overrides = {"trainer": {"steps": steps}, "validation": validation}
        overrides["data"] = {"heldout": {"source": "jsonl", "path": "/heldout.jsonl"}}
        body = {"name": f"fork-{len(validation)}", "overrides": overrides}
        forked = await api.post(f"/v1/runs/{run_id}/fork", json=body)
        assert forked.status_code == status, forked.text
        if status == 422:
            assert forked.json()["errors"][0]["pointer"] == "/trainer/steps"


async def test_a_fork_is_refused_if_its_checkpoint_is_deleted_meanwhile(api, database, monkeypatch):
    run_id = await submitted(api)
    train(database, run_id, steps=2)
    for step in (1, 2):
        checkpoint_id = save(database, run_id, step=step, path=f"/checkpoints/step-{step:08d}")
    await ended(api, run_id)
    path, check = f"/v1/runs/{run_id}/checkpoints/{checkpoint_id}", SpecPolicy.check_for

    async def deleted_first(*arguments):
        assert (await api.delete(path)).is_success
        await check(*arguments)

    monkeypatch.setattr(SpecPolicy, "check_for", deleted_first)
    refused = await api.post(f"/v1/runs/{run_id}/fork", json={"name": "two"})
    assert refused.json()["code"] == "no_usable_checkpoint", refused.text
    monkeypatch.undo()
    forked = await api.post(f"/v1/runs/{run_id}/fork", json={"name": "two"})
    assert forked.json()["step"] == 1, forked.text


async def test_a_run_is_deleted_with_its_checkpoints_unless_a_fork_needs_them(
    api, database, tmp_path
):
    run_id = await submitted(api)
    train(database, run_id, steps=2)
    folders = [tmp_path / "step-00000001", tmp_path / "critic" / "step-00000001"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    save(database, run_id, step=1, path=str(folders[0]))
    # a folder that does not exist on this host
    save(database, run_id, step=2, path=str(tmp_path / "step-00000002"))
    await ended(api, run_id)
    body = {"name": "two", "checkpoint_id": f"ckpt_{run_id[-8:]}_1"}
    fork_id = (await api.post(f"/v1/runs/{run_id}/fork", json=body)).json()["id"]

    async def delete():
        etag = (await api.get(f"/v1/runs/{run_id}")).headers["ETag"]
        query = "delete_checkpoints=true"
        return await api.delete(f"/v1/runs/{run_id}?{query}", headers={"If-Match": etag})

    refused = await delete()
    assert (refused.status_code, refused.json()["code"]) == (409, "in_use")
    assert fork_id in refused.text
    assert (await api.get(f"/v1/runs/{run_id}")).status_code == 200
    await ended(api, fork_id)
    assert (await delete()).status_code == 204
    assert not any(folder.exists() for folder in folders)


def written(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    return folder


async def test_a_controller_finishes_deletions_of_its_predecessor(api, database, tmp_path):
    run_id = await submitted(api)
    folders = [written(tmp_path / f"step-0000000{step}") for step in range(1, 7)]
    critic = written(tmp_path / "critic" / "step-00000001")
    critic.rename(critic.with_name(".deleted-step-00000001"))
    states = ["DELETED", "READY", "DELETED", "READY", "DELETED", "DELETED"]
    for step, (state, folder) in enumerate(zip(states, folders, strict=True), start=1):
        save(database, run_id, step=step, path=str(folder), state=state)
    # step 7 was written to the folder of the deleted step 3
    save(database, run_id, step=7, path=str(folders[2]))

    async def left_by_a_new_controller():
        async with open_manager(database):
            pass
        return [int(folder.name[-1]) for folder in folders if folder.exists()]

    assert await left_by_a_new_controller() == [2, 3, 4]
    assert not any(critic.parent.iterdir())
    # A trainer that was rewound writes later steps again before the database records them.
    latest = written(tmp_path / "step-00000008")
    save(database, run_id, step=8, path=str(latest), state="DELETED")
    await left_by_a_new_controller()
    assert latest.exists()
    await ended(api, run_id)
    await left_by_a_new_controller()
    assert not latest.exists()


async def test_a_run_stays_until_the_files_of_its_checkpoints_are_deleted(
    api, database, tmp_path, monkeypatch
):
    run_id = await submitted(api)
    folder = written(tmp_path / "step-00000001")
    save(database, run_id, step=1, path=str(folder))
    await ended(api, run_id)
    etag = (await api.get(f"/v1/runs/{run_id}")).headers["ETag"]

    async def delete():
        path = f"/v1/runs/{run_id}?delete_checkpoints=true"
        return (await api.delete(path, headers={"If-Match": etag})).status_code

    def killed(checkpoint):
        raise RuntimeError("the controller was killed")

    with monkeypatch.context() as patched:
        patched.setattr(archive, "_remove", killed)
        assert await delete() == 500
    forked = await api.post(f"/v1/runs/{run_id}/fork", json={"name": "two"})
    assert forked.json()["code"] == "no_usable_checkpoint"
    assert folder.exists()
    assert await delete() == 204
    assert not folder.exists()


async def test_a_fork_of_adapters_keeps_their_base(api, database):
    lora = {"rank": 2, "base_dtype": "int8"}
    model = {"path": "team/base", "revision": "v1"}
    run_id = await submitted(api, model=model, trainer={**SPEC["trainer"], "lora": lora})
    train(database, run_id, steps=2)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    for overrides, key in (
        ({"model": {"revision": "v2"}}, "model.revision"),
        ({"trainer": {"lora": {"base_dtype": "nf4"}}}, "trainer.lora"),
        ({"trainer": {"lora": {"base_dtype": None}}}, "trainer.lora"),
    ):
        refused = await api.post(f"/v1/runs/{run_id}/fork", json={"overrides": overrides})
        assert refused.status_code == 422, refused.text
        assert key in refused.text
    overrides = {"trainer": {"lora": {"sync": "merged"}}}
    forked = await api.post(f"/v1/runs/{run_id}/fork", json={"name": "b", "overrides": overrides})
    assert forked.status_code == 201, forked.text


async def test_a_fork_with_other_data_restarts_its_prompts(api, database):
    run_id = await submitted(api)
    train(database, run_id, steps=2)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    forked = await api.post(
        f"/v1/runs/{run_id}/fork", json={"name": "other", "overrides": {"seed": 7}}
    )
    with database.read() as connection:
        state = ledger_store.read_ledger(connection, forked.json()["id"])
    assert state.groups == ()
    assert state.position == 0
    assert state.num_issued == sum(state.ended.values()) == 4


async def test_an_operator_cannot_take_an_admins_trust_for_another_model(
    manager, database, tmp_path
):
    tokens = TokenStore(database)
    admin = tokens.create(name="ann", project="blue", role="admin")
    operator = tokens.create(name="eve", project="blue", role="operator")
    model = {"path": "org/model", "trust_remote_code": True}
    async with client_of(manager, database, tmp_path, tokens, admin) as client:
        run = (await client.post("/v1/runs", json={**SPEC, "model": model})).json()
    train(database, run["id"], steps=1)
    save(database, run["id"], step=1, path="/checkpoints/step-00000001")
    fork = {"name": "stolen", "overrides": {"model": {"path": "evil/model"}}}
    async with client_of(manager, database, tmp_path, tokens, operator) as client:
        refused = await client.post(f"/v1/runs/{run['id']}/fork", json=fork)
        assert refused.status_code == 403, refused.text
        assert "model.trust_remote_code" in refused.json()["detail"]

        response = await client.get(f"/v1/runs/{run['id']}")
        changed = await client.patch(
            f"/v1/runs/{run['id']}",
            json={"checkpoint_every": 2},
            headers={"If-Match": response.headers["ETag"]},
        )
        assert changed.status_code == 200, changed.text
        fork["overrides"]["model"]["trust_remote_code"] = False
        honest = await client.post(f"/v1/runs/{run['id']}/fork", json=fork)
        assert honest.status_code == 201, honest.text


async def test_a_run_without_a_checkpoint_is_not_forked(api, database):
    run_id = await submitted(api)
    refused = await api.post(f"/v1/runs/{run_id}/fork", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "no_usable_checkpoint")
    save(database, run_id, step=1, state="FAILED")
    refused = await api.post(f"/v1/runs/{run_id}/fork", json={"checkpoint_id": "ckpt_none"})
    assert refused.status_code == 404


async def test_a_checkpoint_that_a_run_needs_is_not_deleted(api, database, tmp_path):
    run_id = await submitted(api)
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    older = save(database, run_id, step=1)
    newest = save(database, run_id, step=2, path=str(folder))
    path = f"/v1/runs/{run_id}/checkpoints"
    refused = await api.delete(f"{path}/{newest}")
    assert (refused.status_code, refused.json()["code"]) == (409, "in_use")
    assert (await api.delete(f"{path}/{older}")).status_code == 204
    await ended(api, run_id)
    assert (await api.delete(f"{path}/{newest}")).status_code == 204
    assert (await api.delete(f"{path}/{newest}")).status_code == 204
    assert not folder.exists()
    assert {item["state"] for item in (await api.get(path)).json()["items"]} == {"DELETED"}


async def test_limits_and_intervals_change_while_a_run_exists(api):
    run_id = await submitted(api)
    path = f"/v1/runs/{run_id}"
    etag = (await api.get(path)).headers["ETag"]
    patch = {"limits": {"max_restarts": 9}, "validation_every": 5, "checkpoint_every": 2}
    changed = await api.patch(path, json=patch, headers={"If-Match": etag})
    spec = changed.json()["spec"]
    assert spec["limits"]["max_restarts"] == 9
    assert (spec["validation"]["every"], spec["trainer"]["checkpoint"]["every"]) == (5, 2)
    etag = changed.headers["ETag"]
    refused = await api.patch(
        path, json={"limits": {"max_restarts": -1}}, headers={"If-Match": etag}
    )
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_spec")


async def test_logs_are_read_by_worker_and_followed_to_the_end(api, tmp_path):
    run_id = await submitted(api)
    folder = tmp_path / run_id / "logs"
    folder.mkdir(parents=True)
    (folder / "rollout-0.log").write_text("one\ntwo\n")
    (folder / "trainer-0.log").write_text("three\n")
    path = f"/v1/runs/{run_id}/logs"
    lines = (await api.get(path, params={"component": "rollout-0", "tail_lines": 1})).text
    assert json.loads(lines) == {"component": "rollout-0", "line": "two"}
    await ended(api, run_id)
    streamed = (await api.get(f"{path}/stream")).text
    streamed_lines = [
        json.loads(line[5:]) for line in streamed.splitlines() if line.startswith("data:")
    ]
    assert [line.get("line") for line in streamed_lines] == ["one", "two", "three", None]
    cursor = next(line[3:].strip() for line in streamed.splitlines() if line.startswith("id:"))
    rest = (await api.get(f"{path}/stream", headers={"Last-Event-ID": cursor})).text
    assert "three" in rest
    assert "two" not in rest


async def test_events_of_all_runs_are_streamed(api, manager, database):
    first = await submitted(api)
    begun = (await api.get(f"/v1/runs/{first}/events")).json()["items"][0]
    assert begun["type"] == "Submitted"
    event_types = []

    async def read() -> None:
        async for events in manager.feed.watch_project("default", 1.0):
            event_types.extend((event.run_id, event.type) for event in events)
            if len(event_types) >= 3:
                return

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await asyncio.sleep(0)
        second = await submitted(api)
    assert {run for run, _ in event_types} == {first, second}
    assert (second, "Submitted") in event_types


async def test_a_cancel_with_grace_is_shortened_by_another_one(api, manager):
    run_id = await submitted(api)
    await asyncio.sleep(0)
    patient = {"grace_seconds": 600, "save_checkpoint": True}
    cancelled = await api.post(f"/v1/runs/{run_id}/cancel", json=patient)
    assert cancelled.json()["state"] in ("CANCELLING", "CANCELLED")
    await ended(api, run_id)
    assert (await api.get(f"/v1/runs/{run_id}")).json()["state"] == "CANCELLED"


async def test_a_second_cancel_may_come_while_the_first_one_ends_the_run(api, manager, monkeypatch):
    run_id = await submitted(api)
    may_end = asyncio.Event()

    async def stop(run_id):
        await may_end.wait()

    monkeypatch.setattr(manager.drivers.services.launcher, "stop", stop)
    await manager.cancel(run_id)
    read = manager.get

    async def read_before_the_end(run_id):
        run = await read(run_id)
        may_end.set()
        await manager.drivers.wait()
        return run

    with monkeypatch.context() as patch:
        patch.setattr(manager, "get", read_before_the_end)
        assert (await manager.cancel(run_id)).state == "CANCELLING"
    assert not manager.drivers.driven_runs()
    assert (await manager.get(run_id)).state == "CANCELLED"


async def test_a_run_that_has_ended_is_not_ended_once_more(api, manager):
    run_id = await submitted(api)
    run = await manager.cancel(run_id)
    await ended(api, run_id)
    manager.drivers.drive(run)
    await manager.drivers.wait()
    assert (await manager.get(run_id)).state == "CANCELLED"


async def test_a_failed_run_has_the_party_at_fault(api, database):
    await submitted(api)
    run_id = await submitted(api)
    message = "trainer-0 ended with exit code 1; its last lines:\ngone"
    RunStore(database).apply(run_id, RunEvent.FAIL, reason="WorkerLost", message=message)
    run = (await api.get(f"/v1/runs/{run_id}")).json()
    assert run["error"] == {
        "code": "WorkerLost",
        "category": "INFRA",
        "recoverable": True,
        "message": message,
        "component": "trainer-0",
        "trace_id": tracing.of_step(run_id, 1).trace_id,
    }


@pytest.mark.parametrize(
    ("end", "is_of_user"),
    [
        ("exit code 1: ValueError: rollout.rewards.0.name: 'r.py:f' raised KeyError: 'x'", True),
        ("exit code 1, rank 1 first: OutOfMemoryError; lower trainer.tokens_per_micro_batch", True),
        ("exit code 3 while it ran '/c/data.py:train', which must not end the process", True),
        ("exit code 1: ValueError: Free memory on device cuda:0 is less than desired", False),
        ("exit code 1: RuntimeError: model.layers.0.weight has another size", False),
        ("exit code 1: OSError: /data/rollout.rewards/1: no space left on device", False),
        (
            "exit code 1: TimeoutError: the trainer did not load; raise limits.start_timeout_s",
            False,
        ),
        (
            "exit code 1: services.common.errors.DeadlineExceededError: limits.start_timeout_s",
            False,
        ),
        ("signal 9 (memory was short: the kernel killed processes of its control group)", False),
        ("signal 11: services.trainer.steps raised", False),
    ],
)
async def test_a_worker_that_a_value_or_code_of_the_user_ended_is_the_users_fault(
    api, database, end, is_of_user
):
    await submitted(api)
    run_id = await submitted(api)
    message = f"rollout-0 exited with {end} (log: /s/rollout-0.log)"
    RunStore(database).apply(run_id, RunEvent.FAIL, reason="WorkerLost", message=message)
    error = (await api.get(f"/v1/runs/{run_id}")).json()["error"]
    assert error["category"] == ("USER" if is_of_user else "INFRA")
    assert error["recoverable"] is not is_of_user


@pytest.mark.parametrize(
    ("reason", "category"), [("CheckpointUnusable", "INFRA"), ("OtherCheckpoint", "USER")]
)
async def test_a_run_whose_checkpoint_cannot_be_loaded_does_not_succeed_again(
    api, database, reason, category
):
    await submitted(api)
    run_id = await submitted(api)
    RunStore(database).apply(run_id, RunEvent.FAIL, reason=reason)
    error = (await api.get(f"/v1/runs/{run_id}")).json()["error"]
    assert (error["code"], error["category"], error["recoverable"]) == (reason, category, False)


async def test_an_error_names_what_failed(api, database):
    await submitted(api)
    for reason, message, component in (
        ("WorkerLost", "ref_logp-1 sent no heartbeat for 30 s", "ref_logp-1"),
        ("INTERNAL", "/slipstream.transferqueue.v1.IndexService/Claim: broken", "transferqueue"),
        ("GenerationError", "every rollout failed", "rollout"),
        ("QueueTimeout", "the run did not start", "controller"),
    ):
        run_id = await submitted(api)
        RunStore(database).apply(run_id, RunEvent.FAIL, reason=reason, message=message)
        assert (await api.get(f"/v1/runs/{run_id}")).json()["error"]["component"] == component


async def test_a_run_has_the_times_of_admission_and_end(api):
    first, second = await submitted(api), await submitted(api)
    await api.post(f"/v1/runs/{second}/cancel")
    started = (await api.get(f"/v1/runs/{first}")).json()
    assert started["create_time"] <= started["start_time"]
    assert started["finish_time"] is None
    ended = (await api.get(f"/v1/runs/{second}")).json()
    assert ended["start_time"] is None
    assert ended["create_time"] <= ended["finish_time"]


async def test_a_paused_run_has_desired_and_actual_state(api):
    run_id = await submitted(api)
    await asyncio.sleep(0)
    response = await api.post(f"/v1/runs/{await submitted(api)}/pause", json={"checkpoint": False})
    assert (response.json()["state"], response.json()["desired"]) == ("PAUSED", "PAUSED")
    run = (await api.get(f"/v1/runs/{run_id}")).json()
    assert (run["desired"], run["generation"]) == ("RUNNING", 1)
    statuses = {condition["type"]: condition["status"] for condition in run["conditions"]}
    assert (statuses["Admitted"], statuses["Placed"], statuses["Progressing"]) == (
        "True",
        "Unknown",
        "False",
    )
    unknown = await api.post(f"/v1/runs/{run_id}/pause", json={"release": True})
    assert unknown.status_code == 422


async def test_a_cursor_before_the_oldest_event_is_refused(api, database):
    run_id = await submitted(api)
    await ended(api, run_id)
    with database.write() as connection:
        forget_events(connection, run_id, until=2)
    for path in ("events?after_seq=1", "events/stream?after_seq=1"):
        refused = await api.get(f"/v1/runs/{run_id}/{path}")
        assert (refused.status_code, refused.json()["code"]) == (410, "cursor_expired"), path
    assert (await api.get(f"/v1/runs/{run_id}/events")).json()["items"][0]["seq"] == 3


async def test_forks_of_an_active_run_get_names_of_their_own(api, database):
    run_id = await submitted(api)
    name = (await api.get(f"/v1/runs/{run_id}")).json()["name"]
    train(database, run_id, steps=2)
    save(database, run_id, step=1, path="/checkpoints/step-00000001")
    path = f"/v1/runs/{run_id}/fork"
    forks = [await api.post(path, json={}) for _ in range(2)]
    names = [forked.json().get("name", forked.text) for forked in forks]
    assert names == [f"{name}-fork", f"{name}-fork-2"]
    refused = await api.post(path, json={"name": name})
    assert (refused.status_code, refused.json()["code"]) == (409, "name_taken")
    await ended(api, run_id)
    assert (await api.post(path, json={})).json()["name"] == name


def test_the_default_name_of_a_fork_has_the_length_of_a_name():
    names = {"a" * 63, f"{'a' * 58}-fork"}
    assert fork_name("a" * 63, names) == f"{'a' * 56}-fork-2"


async def test_live_keys_change_under_the_names_of_the_specification(api):
    run_id = await submitted(api)
    path = f"/v1/runs/{run_id}"
    spec = {
        "limits": {"max_restarts": 9},
        "trainer": {"checkpoint": {"every": 3, "every_s": 50}},
        "validation": {"every": 2, "timeout_s": 40},
        "rollout": {"replicas": 3},
    }
    headers = {"If-Match": (await api.get(path)).headers["ETag"]}
    changed = await api.patch(path, json={"spec": spec, "priority": 4}, headers=headers)
    assert changed.status_code == 200, changed.text
    run = changed.json()
    assert run["priority"] == 4
    now = dict(flat(run["spec"]))
    assert {key: now[key] for key, _ in flat(spec)} == dict(flat(spec))


@pytest.mark.parametrize(
    "key", ["trainer.steps", "algorithm.max_staleness", "rollout.engine", "nothing.of.this", "name"]
)
async def test_a_key_that_is_fixed_during_a_run_is_refused_by_name(api, key):
    run_id = await submitted(api)
    path = f"/v1/runs/{run_id}"
    headers = {"If-Match": (await api.get(path)).headers["ETag"]}
    refused = await api.patch(path, json={"spec": nested(key, 4)}, headers=headers)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == f"/{key.replace('.', '/')}"


def test_every_live_key_is_a_key_of_the_specification():
    keys = {key for key, _ in fields_of(RunSpec)}
    assert keys >= LIVE_KEYS.keys()
