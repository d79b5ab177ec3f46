"""Tests that paths, code and addresses of a specification stay inside the limits of the installation."""

import os
import random
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from services.common.callables import load_callable
from services.common.errors import FailedPreconditionError
from services.common.runspec.keys import fields_of
from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import RunSpec
from services.common.security.confinement import KINDS, CodePolicy, paths_named
from services.common.security.secrets import find_plain_secrets, with_secrets


def spec_with(**changes):
    document = {
        "name": "/etc/passwd",  # free text
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "data": {"train": {"source": "jsonl", "path": "/data/train.jsonl"}},
        "rollout": {"rewards": [{"name": "exact_match"}], "sampling": {"stop": ["/think"]}},
        "trainer": {"steps": 1, "prompts_per_step": 1},
    }
    document["name"] = "demo"
    for key, value in changes.items():
        target = document
        *parents, leaf = key.split("__")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    return parse_spec(document)


def reward(name, **arguments):
    return {"rollout__rewards": [{"name": name, "arguments": arguments}]}


def source(path, kind="jsonl", **arguments):
    return {"data__train": {"source": kind, "path": path, "arguments": arguments}}


@pytest.fixture
def roots(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    return [inside]


def strays(spec, roots, **also):
    return CodePolicy(roots=tuple(roots), code_roots=tuple(roots), **also).problems(spec)


def strays_here(spec, roots, **also):
    return CodePolicy(roots=tuple(roots), code_roots=tuple(roots), **also).problems_here(spec)


def test_no_roots_allow_everything():
    assert strays(spec_with(model__path="/anywhere"), []) == []
    assert strays_here(spec_with(model__path="/anywhere"), []) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model__path": "/etc"},
        {"model__path": "~/models"},
        {"model__path": "../models"},
        source("/data/../etc/passwd"),
        source("train.jsonl"),
        source("file:///etc/passwd", "python"),
        source("/etc/x.py:rows", "python"),
        source("x:rows", "python", folder="/etc"),
        reward("/etc/x.py:score"),
        reward("exact_match", table={"paths": ["/etc/shadow"]}),
        {"model__path": "examples/../../secretdir"},
        {"model__tokenizer": "a/../../secretdir"},
        source("examples/../../secretdir", "huggingface"),
        source("a/../../x.jsonl", "parquet"),
        source("a/../../x.csv", "csv"),
        {"trainer__checkpoint": {"start_from": "a/../../b"}},
        {"trainer__checkpoint": {"directory": "b"}},
        reward("exact_match", file="examples/../../secretdir"),
        {"rollout__workflow": "/etc/x.py:Flow"},
        {"rollout__workflow_arguments": {"tools": ["../x.py:tool"]}},
        {"rollout__workflow_arguments": {"agent": "/x.py:agent"}},
        {"model": {"path": "tiny:qwen2-0.4m", "warm_start": {"examples": "/x.py:pairs"}}},
    ],
)
def test_paths_out_of_the_roots_are_named(roots, changes):
    document = {**source(str(roots[0] / "train.jsonl")), **changes}
    (problem,) = strays(spec_with(**document), roots)
    assert str(roots[0]) in problem
    assert problem.startswith(("model.", "data.train", "rollout.", "trainer."))


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "tiny:qwen2-0.4m"])
def test_paths_inside_the_roots_are_allowed(roots, model):
    spec = spec_with(model__path=model, **source(str(roots[0] / "a" / "train.jsonl")))
    assert strays(spec, roots) == []


def test_a_run_writes_neither_among_code_nor_among_the_controllers_files(roots, tmp_path):
    code, state_folder, good = (roots[0] / name for name in ("code", "state", "checkpoints"))
    for folder in (code, state_folder, good):
        folder.mkdir()
    (good / "link").symlink_to(code)
    policy = CodePolicy(roots=tuple(roots), code_roots=(code,), unwritable=(state_folder,))
    for folder, is_refused in (
        (code, True),
        (code / "new", True),
        (good / ".." / "code" / "new", True),
        (state_folder, True),
        (state_folder / "logs", True),
        (good / "new", False),
        (roots[0] / "code-of-a-run", False),
    ):
        spec = spec_with(
            **source(str(good / "rows.jsonl")), trainer__checkpoint={"directory": str(folder)}
        )
        assert bool(policy.problems(spec)) == is_refused, folder
    inside = spec_with(
        **source(str(good / "rows.jsonl")), trainer__checkpoint={"directory": str(good / "link")}
    )
    assert not policy.problems(inside)
    assert policy.problems_here(inside)
    reads = spec_with(
        **source(str(good / "rows.jsonl")),
        trainer__checkpoint={"start_from": str(state_folder / "run")},
    )
    assert not policy.problems(reads)


def test_links_that_lead_out_are_found_where_the_files_are(roots, tmp_path):
    (tmp_path / "outside").mkdir()
    (roots[0] / "link").symlink_to(tmp_path / "outside")
    spec = spec_with(**source(str(roots[0] / "link" / "train.jsonl")))
    assert strays(spec, roots) == []
    (problem,) = strays_here(spec, roots)
    assert "outside" in problem


def test_functions_of_modules_elsewhere_are_not_called(roots, monkeypatch):
    (roots[0] / "ours_for_test.py").write_text("def score(): ...\n")
    monkeypatch.syspath_prepend(str(roots[0]))
    inside = source(str(roots[0] / "train.jsonl"))
    assert strays_here(spec_with(**inside, **reward("ours_for_test:score")), roots) == []
    for name in ("subprocess:run", "os.path:exists", "not_there_at_all:f", "builtins:eval"):
        (problem,) = strays_here(spec_with(**inside, **reward(name)), roots)
        assert name.partition(":")[0].partition(".")[0] in problem
    assert "ours_for_test" not in sys.modules


@pytest.mark.parametrize(
    "name",
    ["subprocess:Popen", "/tmp/other/game.py:Game", "../game.py:Game", "not_there_at_all:Game"],
)
def test_environments_are_code_and_stay_inside(roots, name):
    inside = source(str(roots[0] / "train.jsonl"))
    arguments = {"environment": name}
    spec = spec_with(
        **inside, rollout__workflow="environment", rollout__workflow_arguments=arguments
    )
    (problem,) = strays_here(spec, roots)
    assert "workflow_arguments.environment" in problem
    arguments["environment"] = str(roots[0] / "game.py:Game")
    spec = spec_with(
        **inside, rollout__workflow="environment", rollout__workflow_arguments=arguments
    )
    assert strays_here(spec, roots) == []


def test_environments_elsewhere_are_judged_where_they_are_asked(roots):
    for url in ("https://games.example", "openenv+http://games.example:8000"):
        spec = spec_with(
            data__train={"source": "environment", "path": "train", "limit": 3},
            rollout__workflow="environment",
            rollout__workflow_arguments={"environment": url},
        )
        assert strays_here(spec, roots) == []


def test_tasksets_of_verifiers_are_code_and_name_more_code(roots, monkeypatch):
    (roots[0] / "our_tasks_for_test.py").write_text("")
    monkeypatch.syspath_prepend(str(roots[0]))

    def problems(path, **arguments):
        return strays_here(spec_with(**source(path, "verifiers", **arguments)), roots)

    assert problems("owner/our-tasks-for-test@1") == []
    assert "data.train.path" in problems("os")[0]
    plugged = {"task": {"rewards": {"x": {"fn": "os.system"}}}}
    (problem,) = problems("our_tasks_for_test", taskset=plugged)
    assert "rewards.x.fn" in problem
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "our_tasks_for_test"}}
    (problem,) = problems("our_tasks_for_test", agent=agent)
    assert "allowed_commands" in problem


def test_rows_cannot_choose_verifiers_code(roots):
    spec = spec_with(
        **source(str(roots[0] / "train.jsonl")),
        rollout__workflow="agent",
        rollout__workflow_arguments={"agent": "verifiers"},
    )
    (problem,) = strays_here(spec, roots)
    assert problem.startswith("data.train.source")


def test_presets_are_no_modules(roots):
    spec = spec_with(
        model__path="tiny:qwen2",
        model__tokenizer="chars:abcdef",
        **source(str(roots[0] / "train.jsonl")),
    )
    assert strays_here(spec, roots) == []


def test_values_that_look_like_secrets_are_rejected():
    spec = spec_with(**reward("exact_match", api_key="abc", nested={"password": "x"}, tokens="ok"))
    problems = find_plain_secrets(spec)
    assert [problem.partition(":")[0] for problem in problems] == [
        "rollout.rewards.0.arguments.api_key",
        "rollout.rewards.0.arguments.nested.password",
    ]
    assert "abc" not in "".join(problems)
    assert find_plain_secrets(spec_with(**reward("exact_match", api_key={"secret": "KEY"}))) == []


def test_a_worker_fills_secrets_in(tmp_path):
    (tmp_path / "KEY").write_text("abc\n")
    spec = spec_with(**reward("exact_match", api_key={"secret": "KEY"}, other=[{"secret": "KEY"}]))
    filled = with_secrets(spec.rollout, tmp_path)
    assert filled.rewards[0].arguments == {"api_key": "abc", "other": ["abc"]}
    assert spec.rollout.rewards[0].arguments["api_key"] == {"secret": "KEY"}


@pytest.mark.parametrize("name", ["OTHER", "../KEY", "/etc/passwd", ""])
def test_a_secret_that_is_not_there_is_named(tmp_path, name):
    (tmp_path / "inner").mkdir()
    (tmp_path / "KEY").write_text("abc")
    spec = spec_with(**reward("exact_match", api_key={"secret": name}))
    with pytest.raises(FailedPreconditionError, match="secrets"):
        with_secrets(spec.rollout, tmp_path / "inner")
    with pytest.raises(FailedPreconditionError, match="not set"):
        with_secrets(spec.rollout, None)


def servers(*commands):
    return {"rollout__workflow_arguments": {"mcp_servers": [*commands]}}


@pytest.mark.parametrize(
    "command",
    [["sh", "-c", "id"], "sh", ["search-server", "--also"], ["search-server"], [], [["sh"]]],
)
def test_only_the_commands_of_the_installation_are_started(roots, command):
    inside = source(str(roots[0] / "train.jsonl"))
    allowed = {"commands": (("search-server", "--index", "/data"),)}
    for judge in (strays, strays_here):
        (problem,) = judge(spec_with(**inside, **servers(command)), roots, **allowed)
        assert problem.startswith("rollout.workflow_arguments.mcp_servers.0")
        assert "search-server --index /data" in problem
        honest = spec_with(**inside, **servers(["search-server", "--index", "/data"]))
        assert judge(honest, roots, **allowed) == []
    assert strays(spec_with(**inside, **servers(command)), []) == []


def test_folders_with_data_are_no_folders_with_code(roots, monkeypatch):
    """Files in a model cache come from untrusted authors."""
    (roots[0] / "downloaded_for_test.py").write_text("def score(): ...\n")
    monkeypatch.syspath_prepend(str(roots[0]))
    allowance = CodePolicy(roots=tuple(roots), code_roots=(roots[0] / "code",))
    inside = source(str(roots[0] / "train.jsonl"))
    assert allowance.problems(spec_with(**inside)) == []
    for name in (f"{roots[0]}/downloaded.py:score", "downloaded_for_test:score"):
        for judge in (allowance.problems, allowance.problems_here):
            assert len(judge(spec_with(**inside, **reward(name)))) == 1
    code = spec_with(**inside, **reward(f"{roots[0]}/code/mine.py:score"))
    assert allowance.problems(code) == allowance.problems_here(code) == []


def test_a_folder_that_is_called_like_a_model_is_a_folder(roots, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    spec = spec_with(model__path="org/model", **source(str(roots[0] / "x.jsonl")))
    assert strays(spec, roots) == []
    assert len(strays_here(spec, roots)) == 1


@pytest.mark.parametrize("path", ["~nobody-there/x", "/" * 5000, "file://../../etc"])
def test_strange_paths_are_rejected_and_raise_nothing(roots, path):
    for judge in (strays, strays_here):
        assert judge(spec_with(**source(path)), roots)
        assert judge(spec_with(model__path=path, **source(str(roots[0] / "x.jsonl"))), roots)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "circle/a"])
def test_strange_paths_of_rows_are_rejected_and_raise_nothing(tmp_path, name):
    (tmp_path / "in" / "circle").parent.mkdir()
    (tmp_path / "in" / "circle").symlink_to("circle")
    policy = CodePolicy(roots=(tmp_path / "in",))
    policy.path_problems(tmp_path / "in" / name)
    assert policy.path_problems(tmp_path / "out" / name)


def test_links_that_this_process_may_not_read_are_named(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to("file")

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "readlink", refused)
    path = str(tmp_path / "link")
    assert paths_named(spec_with(data__train__path=path)) >= {Path(path)}


def test_sets_of_prompts_are_looked_at_one_by_one(roots):
    inside = {
        "source": "jsonl",
        "path": f"{roots[0]}/a.jsonl",
        "prompt_template": "/think {prompt}",
    }
    assert strays(spec_with(data__train={"a": inside, "b": inside}), roots) == []
    outside = {**inside, "path": "/etc/passwd"}
    problems = strays(
        spec_with(data__train={"a": inside, "b": outside}, data__heldout={"c": outside}), roots
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "data.train.b.path",
        "data.heldout.c.path",
    ]
    filters = [
        {"column": "a", "matches": "/x"},
        {"column": "a", "one_of": ["/y"]},
        {"function": "os:getcwd"},
    ]
    problems = strays(spec_with(data__train={"a": {**inside, "filters": filters}}), roots)
    assert [problem.split(":")[0] for problem in problems] == ["data.train.a.filters.2.function"]
    chosen = spec_with(data__train=inside, data__curriculum={"function": "/tmp/mine.py:f"})
    problems = strays(chosen, roots)
    assert [problem.split(":")[0] for problem in problems] == ["data.curriculum.function"]
    code = {**inside, "rewards": [{"name": "/tmp/judge.py:f"}, {"name": "os:getcwd"}]}
    problems = strays(spec_with(data__train={"a": code}), roots)
    assert [problem.split(":")[0] for problem in problems] == [
        "data.train.a.rewards.0.name",
        "data.train.a.rewards.1.name",
    ]


@pytest.mark.parametrize(
    ("kind", "image", "is_refused"),
    [
        ("bubblewrap", "/etc", True),
        ("bubblewrap", "etc", True),
        ("bubblewrap", "INSIDE/tasks", False),
        ("podman", "debian:12", False),
    ],
)
def test_the_image_of_a_local_sandbox_is_a_path(roots, kind, image, is_refused):
    sandbox = {"kind": kind, "image": image.replace("INSIDE", str(roots[0]))}
    spec = spec_with(rollout__sandbox=sandbox, rollout__workflow="agent")
    refused = [problem for problem in strays(spec, roots) if "sandbox" in problem]
    assert bool(refused) == is_refused


def holds_text(annotation: Any) -> bool:
    """Returns whether a type accepts arbitrary text from a user, except for keys of a mapping of parts."""
    if annotation in (str, Any):
        return True
    if get_origin(annotation) is Literal or isinstance(annotation, type):
        return False
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping):
        arguments = arguments[1:] if is_part(arguments[1]) else arguments
    return any(map(holds_text, arguments))


def is_part(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def test_every_text_key_has_a_kind():
    keys = {key for key, info in fields_of(RunSpec) if holds_text(info.annotation)}
    assert keys - KINDS.keys() == set(), (
        "say in services.common.security.confinement.KINDS what they name"
    )
    assert KINDS.keys() - keys == set(), "these keys are gone"


# A specification in which every mapping of arguments has a value.
ARGUMENTS = {
    "name": "demo",
    "model": {"path": "org/model"},
    "data": {
        "train": {
            "a": {
                "source": "reasoning_gym",
                "path": "x",
                "arguments": "HERE",
                "filters": [{"function": "f", "arguments": "HERE"}],
                "rewards": [{"name": "r", "arguments": "HERE"}],
            }
        },
        "heldout": {
            "a": {
                "source": "verifiers",
                "path": "x",
                "arguments": "HERE",
                "filters": [{"function": "f", "arguments": "HERE"}],
                "rewards": [{"name": "r", "arguments": "HERE"}],
            }
        },
        "curriculum": {"function": "f", "arguments": "HERE"},
        "chat_template_arguments": "HERE",
    },
    "rollout": {
        "engine_arguments": "HERE",
        "workflow_arguments": "HERE",
        "rewards": [{"name": "r", "arguments": "HERE"}],
        "sandbox": {"kind": "e2b", "arguments": "HERE"},
    },
    "algorithm": {"advantage_arguments": "HERE", "loss_arguments": "HERE"},
    "trainer": {"steps": 1, "prompts_per_step": 1},
}


def with_arguments(value, arguments):
    if value == "HERE":
        return arguments
    if isinstance(value, dict):
        return {key: with_arguments(inner, arguments) for key, inner in value.items()}
    return (
        [with_arguments(inner, arguments) for inner in value] if isinstance(value, list) else value
    )


def paths_of_arguments(value, prefix=""):
    if value == "HERE":
        yield prefix
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from paths_of_arguments(inner, f"{prefix}.{key}".removeprefix("."))


def test_every_mapping_of_arguments_is_in_the_example():
    mappings = {
        key
        for key, info in fields_of(RunSpec)
        if get_origin(info.annotation) is dict and get_args(info.annotation)[1] is Any
    }
    of_sets = {re.sub(r"\.[0-9]+\.", ".N.", path) for path in paths_of_arguments(ARGUMENTS)}
    names = {
        path.replace("train.a.", "train.NAME.").replace("heldout.a.", "heldout.NAME.")
        for path in of_sets
    }
    assert mappings - names == {path.replace(".NAME.", ".") for path in names if ".NAME." in path}


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": "https://evil.example/collect"},
        {"x": ["see grpc://evil.example:9"]},
        {"x": {"y": "tcp://10.0.0.1:5"}},
        {"x": "evil.example:443"},
        {"x": "169.254.169.254"},
        {"x": "[fd00::1]:80"},
        {"x": "2130706433:80"},
        {"x": "localhost"},
        {"https://evil.example": 1},
        {"domain": "evil.example"},
        {"apiEndpoint": "evil"},
        {"base_url": "evil.example/v1"},
        {"proxy": ["evil.example"]},
        {"proxies": "evil.example"},
        {"api_base": "evil.example"},
        {"connection": "evil.example"},
        {"x": "//10.0.0.1/latest"},
        {"x": "user@10.0.0.1:80"},
        {"x": "10.0.0.1, 10.0.0.1:80"},
        {"x": "--host=10.0.0.1 --port 80"},
        {"x": '{"host": "10.0.0.1", "port": 80}'},
        {"x": "http:/10.0.0.1/"},
        {"x": "http:\\\\10.0.0.1"},
        {"x": "tcp:10.0.0.1:80"},
        {"x": "\N{FULLWIDTH DIGIT ONE}0。0。0。1:80"},
        {"x": "metadata.google.internal"},
        {"x": "connect to kubernetes.default.svc"},
        {"host": "2130706433"},
        {"host": 2130706433},
        {"tool": {"server_ip": 3232235777}},
        {"hosts": [2852039166]},
        {"address": 0},
        {"x": "http://2130706433/"},
        {"x": "user@2130706433:80"},
        {"x": "017700000001:80"},
        {"x": "curl 2130706433:80, 017700000001:80"},
        {"x": "connect to metadata.google.internal."},
        {"x": "localhost."},
        {"x": "http://10.0.0.1./"},
        {"x": "0x7f000001"},
        {"x": "--host 0177.0.0.1"},
        {"x": ["127.1", "0x7f.1"]},
        {"x": "http:\t//evil.example/"},
        {"x": "http://evil.example\n.evil/"},
        {"x": "http:\\\\evil.example"},
        {"x": "http://evil.example\\@evil/"},
        {"x": "root@10.0.0.1:/folder"},
        {"x": "copy to root@10.0.0.1:/folder"},
        {"x": "git@evil.example:project.git"},
        {"x": "curl localhost:8080"},
        {"x": "ask METADATA.GOOGLE.INTERNAL:80"},
    ],
)
def test_no_arguments_name_a_host_that_the_installation_does_not_list(roots, arguments):
    spec = RunSpec.model_validate(with_arguments(ARGUMENTS, arguments))
    problems = strays(spec, roots)
    for path in paths_of_arguments(ARGUMENTS):
        assert any(problem.startswith(path) and "host" in problem for problem in problems), path
    hosts = (
        "evil.example",
        "10.0.0.1",
        "169.254.169.254",
        "fd00::1",
        "localhost",
        "evil",
        "evil.example.evil",
        "2130706433",
        "017700000001",
        "3232235777",
        "2852039166",
        "0",
        "metadata.google.internal",
        "kubernetes.default.svc",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0x7f.1",
    )
    assert not [stray for stray in strays(spec, roots, hosts=hosts) if "reward_hosts" in stray]


@pytest.mark.parametrize("word", ["a", "a.b-"])
def test_a_long_word_names_no_host_and_takes_no_minutes(roots, word):
    arguments = {"word": word * (200_000 // len(word))}
    spec = RunSpec.model_validate(with_arguments(ARGUMENTS, arguments))
    assert not [stray for stray in strays(spec, roots) if "reward_hosts" in stray]


def test_ordinary_arguments_name_no_hosts(roots):
    arguments = {
        "ratio": "16:9",
        "time": "1:30",
        "note": "see a: 1, b: 2",
        "column": "answer.text",
        "words": ["a.b", "x=1", "3.5", "v1.2", "v1.2.3.4", "std::vector", "a = b::c", ".env.local"],
        "program": "python -m x --n=3 --mask 10:30 --since 20261130:1200",
        "address_space": 5,
        "phone": "5551234567",
        "user": "user 1234567890, call 0301234567",
        "seed": 2130706433,
        "servers": 3,
        "num_hosts": 0,
        "origin": [0.0, 0.5],
        "image": "data:image/png;base64,aaaa",
        "numbers": ["0x1f", "20241129", "2021.03.05", "10.1", "0.25", "007", "2.13.0", "1.0.1"],
    }
    spec = RunSpec.model_validate(with_arguments(ARGUMENTS, arguments))
    assert not [stray for stray in strays(spec, roots) if "reward_hosts" in stray]


@pytest.mark.parametrize(
    ("image", "is_refused"),
    [
        ("python:3.12", False),
        ("library/python:3.12", False),
        ("ghcr.io/org/image:1", False),
        ("10.0.0.1:5000/image", True),
        ("localhost/image", True),
        ("registry:5000/image", True),
        ("registry.internal/image", True),
    ],
)
def test_an_image_names_a_public_or_listed_registry(roots, image, is_refused):
    sandbox = {"kind": "podman", "image": image}
    spec = spec_with(rollout__sandbox=sandbox, rollout__workflow="agent")
    assert any("sandbox" in problem for problem in strays(spec, roots)) == is_refused
    hosts = ("10.0.0.1", "localhost", "registry", "registry.internal")
    assert not [stray for stray in strays(spec, roots, hosts=hosts) if "sandbox" in stray]


def test_the_domain_that_gets_the_key_of_e2b_is_no_part_of_a_specification():
    arguments = {"api_key": {"secret": "e2b"}, "domain": "evil.example"}
    with pytest.raises(SpecError, match="domain"):
        spec_with(
            rollout__sandbox={"kind": "e2b", "arguments": arguments}, rollout__workflow="agent"
        )


def test_the_threat_model_lists_the_gate_of_each_key():
    page = Path(__file__).parents[4] / "docs" / "threat-model.md"
    table = page.read_text(encoding="utf-8").partition("## Which gate judges which key")[2]
    lines = {line.split("|")[1].strip(): line for line in table.splitlines() if line[:1] == "|"}
    for key, kind in KINDS.items():
        name = re.sub(r"^data\.(train|heldout)\.(NAME\.)?", "SET.", key)
        assert kind == "free" or f"`{name}`" in lines[f"`{kind}`"]


CODE = {
    "data.train.path": lambda name: source(name, "python"),
    "data.train.filters.0.function": lambda name: rows(filters=[{"function": name}]),
    "data.train.filters.0.arguments": lambda name: rows(
        filters=[{"function": "f", "arguments": {"a": [name]}}]
    ),
    "data.train.rewards.0.name": lambda name: rows(rewards=[{"name": name}]),
    "data.curriculum.function": lambda name: {"data__curriculum": {"function": name}},
    "rollout.rewards.0.name": reward,
    "rollout.rewards.0.arguments": lambda name: reward("exact_match", f=name),
    "rollout.workflow": lambda name: {"rollout__workflow": name},
    "rollout.workflow_arguments.tools": lambda name: workflow(tools=[name]),
    "rollout.workflow_arguments.tools (as keys)": lambda name: workflow(tools={name: 1}),
    "rollout.workflow_arguments.agent": lambda name: workflow(agent=name),
    "rollout.workflow_arguments.environment": lambda name: workflow(environment=name),
    "rollout.workflow_arguments.train": lambda name: workflow(train=name),
    "model.warm_start.examples": lambda name: {
        "model": {"path": "tiny:qwen2-0.4m", "warm_start": {"examples": name}}
    },
    "algorithm.loss": lambda name: {"algorithm__loss": name},
    "algorithm.advantage": lambda name: {"algorithm__advantage": name},
}


def rows(**keys):
    return {"data__train": {"source": "reasoning_gym", "path": "x", **keys}}


def workflow(**arguments):
    return {"rollout__workflow_arguments": arguments}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Creates a folder with allowed code and an outside folder whose code leaves a file when it runs."""
    code, outside = tmp_path / "code", tmp_path / "outside"
    for folder in (code, outside, tmp_path / "cwd"):
        folder.mkdir()
    (code / "good.py").write_text("def f(*_): ...\né = f\n")
    (code / "package_for_test").mkdir()
    (code / "package_for_test" / "__init__.py").write_text("")
    mark = f"open({str(tmp_path / 'ran')!r}, 'a').close()\n"
    (outside / "evil.py").write_text(f"{mark}def f(*_): ...\né = f\n")
    (code / "link.py").symlink_to(outside / "evil.py")
    (code / "folder").symlink_to(outside)
    (code / "circle.py").symlink_to(code / "circle.py")
    (code / "package_for_test" / "below.py").symlink_to(outside / "evil.py")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.syspath_prepend(str(code))
    yield code, outside
    for name in [name for name in sys.modules if name.startswith(("good", "package_for_test"))]:
        del sys.modules[name]


OUTSIDE = [
    "{outside}/evil.py:f",
    "{outside}/evil.py:é",
    "{outside}/a\nb/../evil.py:f",
    "{code}/../outside/evil.py:f",
    "{code}/link.py:f",
    "{code}/folder/evil.py:é",
    "../outside/evil.py:f",
    "http://../../outside/evil.py:f",
    "openenv+http://../../outside/evil.py:f",
    "package_for_test.below:f",
]


def problems_of(key, name, allowance):
    """Returns the problems of a specification that names code at a key."""
    try:
        return allowance.problems_here(spec_with(**{**rows(), **CODE[key](name)}))
    except SpecError as error:
        return error.problems


@pytest.mark.parametrize("key", CODE)
def test_no_code_outside_of_the_roots_is_imported(folders, tmp_path, key):
    code, outside = folders
    allowance = CodePolicy(roots=(tmp_path,), code_roots=(code,))
    assert problems_of(key, f"{code}/good.py:é", allowance) == []
    for name in OUTSIDE:
        named = name.format(code=code, outside=outside)
        if problems := problems_of(key, named, allowance):
            assert problems[0].startswith(key.partition(" ")[0])
        else:
            with pytest.raises(ValueError, match="import path"):
                load_callable(named)
            assert not (tmp_path / "ran").exists()


def test_the_gate_checks_all_code_that_the_loader_imports(folders, tmp_path):
    code, outside = folders
    draw = random.Random(5)
    ran = tmp_path / "ran"
    to_root = os.path.relpath(tmp_path)
    starts = ["", "/", "./", "~/", "file:", "file://", "http://", "grpc://a/", "é/", "a\nb/../"]
    starts += [f"http://../{to_root}/", "a\rb/../", "chars:", "tiny:", "\0", " ", "\ufeff", "-"]
    middles = [f"{outside}/evil", f"{code}/../outside/evil", f"{to_root}/outside/evil", "evil"]
    middles += [f"{code}/link", f"{code}/folder/evil", f"{code}/good", f"{code}/circle", "good"]
    middles += ["package_for_test.below", "package_for_test..below", f"{code}/x.zip/evil"]
    ends = [".py:f", ".py:é", ":f", ":é", ".py:", ".py::f", ".py:f:", ".py:f\n", ".py\n:f", ".PY:f"]
    ends += [".py/:f", ".py.:f", ".pyc:f", ".py:f.g", ".py:f ", ".py\0:f", "", ":", ".py:__doc__"]
    allowance, loaded = CodePolicy(roots=(tmp_path,), code_roots=(code,)), 0
    for _ in range(500):
        start = "".join(draw.choices(starts, k=draw.choice((0, 0, 1, 2))))
        name = start + draw.choice(middles) + draw.choice(ends)
        if not problems_of(draw.choice(list(CODE)), name, allowance):
            with suppress(ValueError):
                load_callable(name)
                loaded += 1
            assert not ran.exists(), name
    assert loaded, "nothing good was among them"


@pytest.mark.parametrize(
    "changes",
    [
        rows(arguments={"source": "/etc/passwd"}),
        rows(arguments={"split": "/etc/passwd"}),
        rows(arguments={"prompt_template": "/etc/passwd"}),
        rows(split="/etc/passwd"),
        rows(subset="../../etc"),
        rows(arguments={"filters": [{"column": "/etc/passwd"}]}),
        workflow(result_template={"a": "/etc/passwd"}),
        reward("exact_match", **{"/etc/passwd": 1}),
        {"model": {"path": "a/b", "revision": "../../x"}},
    ],
)
def test_names_of_arguments_are_no_names_of_keys(roots, changes):
    (problem,) = strays(spec_with(**{**rows(), **changes}), roots)
    assert "outside" in problem


def test_functions_of_verifiers_are_judged_as_verifiers_loads_them(folders, tmp_path):
    code, outside = folders
    allowance = CodePolicy(roots=(tmp_path,), code_roots=(code,))

    def problems(path="package_for_test", **arguments):
        return allowance.problems_here(spec_with(**source(path, "verifiers", **arguments)))

    for name in ("good.f", "good:f", f"{code}/good.py:f"):
        assert problems(taskset={"task": {"rewards": {"x": {"fn": name}}}}) == []
    for name in (
        f"{outside}/good.py:f",
        "os.system",
        "os:system",
        "package_for_test.below.f",
        "good",
        "..good.f",
        f"{outside}/evil.py:é",
    ):
        (problem,) = problems(taskset={"task": {"rewards": {"x": {"fn": name}}}})
        assert "rewards.x.fn" in problem
    for name in ("package_for_test.below", "../package_for_test", "a b", "os", "x/y/good"):
        (problem,) = problems(name)
        assert problem.startswith("data.train.path")


@pytest.mark.parametrize("path", ["~/../{inside}/x", "file:/{inside}/x", "~nobody{inside}/x"])
def test_paths_are_those_that_the_data_loader_opens(roots, path):
    path = path.format(inside=str(roots[0]).lstrip("/"))
    for judge in (strays, strays_here):
        assert len(judge(spec_with(**source(path)), roots)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"headers": {"Authorization": "x"}},
        {"headers": {"a": "Bearer abc"}},
        {"headers": [["X-Api-Key", "abc"]]},
        {"headers": [{"name": "authorization", "value": "x"}]},
        {"headers": ["Authorization: Basic eHk="]},
        {"x-api-key": "abc"},
        {"apiKey": "abc"},
        {"token": "abc"},
        {"hf_token": ["abc"]},
        {"credentials": {"user": "abc"}},
        {"url": "https://user:pw@host/x"},
        {"url": "postgresql://:pw@host"},
        {"url": "https://abcdef@host/x"},
        {"url": "https://host/x?token=abc"},
        {"url": "grpc://host:5?a=b&api_key=abc"},
        {"url": "https://host/x?X-Amz-Signature=abc"},
        {"command": ["judge", "--api-key", "abc"]},
        {"command": "judge --token=abc"},
        {"x": "sk-proj-0123456789abcdef01"},
        {"x": "hf_0123456789abcdefABCDEF"},
        {"x": "-----BEGIN RSA PRIVATE KEY-----"},
        {"secret": "abc", "also": 1},
        {"sk-proj-0123456789abcdef01": 1},
    ],
)
def test_secrets_are_found_under_any_name(arguments):
    (problem,) = find_plain_secrets(spec_with(**reward("exact_match", **arguments)))
    assert problem.startswith("rollout.rewards.0.arguments")
    assert '{"secret": "NAME"}' in problem
    for text in ("abc", "pw@", "0123456789"):
        assert text not in problem


def test_ordinary_texts_are_not_taken_for_secrets():
    arguments = {
        "tokens": "ok",
        "eos_token": "</s>",
        "max_tokens": 3,
        "template": "basic arithmetic, token sequences",
        "url": "https://host/a:b@c",
        "query": "https://host/x?max_tokens=5&page=2",
        "ssh": "ssh://git@host/x",
        "password": {"secret": "NAME"},
        "keys": ["token", "word", "x"],
        "sort_key": "a",
    }
    assert find_plain_secrets(spec_with(**reward("exact_match", **arguments))) == []
    named = spec_with(**reward("https://user:pw@judge.example/score"))
    (problem,) = find_plain_secrets(named)
    assert problem.startswith("rollout.rewards.0.name")


def test_a_confined_worker_adds_nothing_to_what_the_controller_allows():
    assert CodePolicy().settings() == {}
    policy = CodePolicy(roots=(Path("/data"),), hosts=("judge.internal",))
    assert policy.settings() == {
        "ALLOWED_ROOTS": '["/data"]',
        "ALLOWED_URLS": "[]",
        "CODE_ROOTS": "[]",
        "ALLOWED_COMMANDS": "[]",
        "REWARD_HOSTS": '["judge.internal"]',
    }
