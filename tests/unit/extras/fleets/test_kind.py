"""Specifications of runs that attach to servers: what is accepted, and what is refused with which fix."""

from typing import Any

import pytest

from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.worker_kinds import gpu_needs
from services.common.security.confinement import CodePolicy
from services.controller.manager.spec_policy import admin_reasons
from tests.helpers.specs import changed

ADDRESSES = ["http://vllm-0.fleet:8000", "https://vllm-1.fleet:8000"]
TOKEN = {"secret": "FLEET_TOKEN"}


def _changes(arguments: dict[str, Any] | None = None, **rollout: Any) -> dict[str, Any]:
    return {
        "rollout": {
            "engine": "vllm-server",
            "replicas": 1,
            "engine_arguments": {"addresses": ADDRESSES, "token": TOKEN} | (arguments or {}),
        }
        | rollout,
        "weight_sync": {"mode": "cpu_async"},
    }


def test_a_run_names_servers_and_its_rollout_needs_no_gpu() -> None:
    spec = parse_spec(changed(**_changes()))
    assert spec.rollout.engine_arguments["addresses"] == ADDRESSES
    assert not spec.runs_engines and spec.has_engine
    assert gpu_needs(spec)["rollout-0"] == 0
    assert admin_reasons(spec) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_changes({"addresses": []}), "addresses must list the servers"),
        (_changes({"addresses": "http://a:1"}), "addresses must list the servers"),
        (_changes({"addresses": ["grpc://a:1"]}), "must be http://HOST:PORT"),
        (_changes({"addresses": ["http://a:1/v1"]}), "must be http://HOST:PORT"),
        (_changes({"addresses": ["http://u:p@a:1"]}), "must be http://HOST:PORT"),
        (_changes({"addresses": ["http://a:1", "http://a:1/"]}), "names a server twice"),
        (_changes({"token": 5}), 'token must be {"secret": "NAME"}'),
        (_changes({"token": {"file": "a"}}), 'token must be {"secret": "NAME"}'),
        (_changes({"dtype": "float16"}), "accepts only"),
        (_changes({"max_model_len": 4}), "raise or remove it"),
        (_changes(replicas=2), "one rollout attaches to all servers"),
        (_changes(kv_policy="keep"), "set it to recompute"),
        (_changes(routing_replay="replay"), "set it to 'off'"),
        (_changes(quantization="fp8"), "quantization"),
        (_changes(speculation={}), "speculation"),
        (_changes(reproducible="batch_invariant"), "batch_invariant"),
        (_changes() | {"weight_sync": {"mode": "shadow"}}, "set it to cpu_async"),
        (_changes() | {"weight_sync": {"mode": "inplace"}}, "inplace"),
    ],
)
def test_what_servers_do_not_have_is_refused_with_the_fix(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(changed(**changes))
    assert message in str(raised.value)


IMAGES = {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct", "images": True}}


@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 4, "sync": "adapter"}}])
def test_vllms_servers_take_images_with_whole_weights(trainer: dict[str, Any]) -> None:
    spec = parse_spec(changed(**_changes() | IMAGES | {"trainer": trainer}))
    assert spec.model.images and not spec.adds_adapters


def test_images_are_refused_for_sglangs_servers() -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(changed(**_changes(engine="sglang-server") | IMAGES))
    assert "model.images is true, which engine 'sglang-server' does not support" in str(
        raised.value
    )


DIRECT = {"weight_sync": {"mode": "servers"}}


def test_weights_may_go_to_the_workers_of_vllms_servers() -> None:
    assert parse_spec(changed(**_changes() | DIRECT)).weight_sync.mode == "servers"


@pytest.mark.parametrize(
    "changes",
    [
        _changes(engine="sglang-server") | DIRECT,
        _changes(engine="torch", engine_arguments={}) | DIRECT,
        _changes() | {"weight_sync": {"mode": "servers", "backend": "gloo"}},
        _changes() | DIRECT | {"trainer": {"lora": {"rank": 4, "sync": "adapter"}}},
    ],
)
def test_weights_that_servers_cannot_receive_from_the_trainer_are_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(changed(**changes))
    assert "sends whole weights to the servers of rollout.engine vllm-server" in str(raised.value)


def test_an_installation_for_several_users_must_list_the_servers(tmp_path: Any) -> None:
    spec = parse_spec(changed(**_changes()))
    policy = CodePolicy(roots=(tmp_path,), hosts=("vllm-0.fleet",))
    problems = [problem for problem in policy.problems(spec) if "engine_arguments" in problem]
    (problem,) = problems
    assert "'vllm-1.fleet', which is not among the reward_hosts" in problem


def test_sglangs_servers_have_their_own_name_of_the_length() -> None:
    rollout = _changes(engine="sglang-server")["rollout"]
    arguments = {**rollout["engine_arguments"], "context_length": 8192}
    changes = _changes() | {"rollout": rollout | {"engine_arguments": arguments}}
    spec = parse_spec(changed(**changes))
    assert not spec.runs_engines
    assert admin_reasons(spec) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_changes({"max_model_len": 8192}, engine="sglang-server"), "accepts only"),
        (_changes({"context_length": 4}, engine="sglang-server"), "raise or remove it"),
        (_changes(engine="sglang-server", kv_policy="keep"), "set it to recompute"),
        (_changes(engine="sglang-server", replicas=2), "one rollout attaches to all servers"),
        (_changes(engine="sglang-server", routing_replay="replay"), "set it to 'off'"),
        (_changes(engine="sglang-server", sampling={"top_k": 5}), "top_k"),
        (_changes(engine="sglang-server", quantization="fp8"), "quantization"),
        (_changes(engine="sglang-server", speculation={}), "speculation"),
        (
            _changes(engine="sglang-server") | {"weight_sync": {"mode": "shadow"}},
            "set it to cpu_async",
        ),
    ],
)
def test_what_sglangs_servers_do_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(changed(**changes))
    assert message in str(raised.value)
