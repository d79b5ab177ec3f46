"""What a specification names stays inside what an installation allows."""

import sys

import pytest

from services.common.confinement import Allowance, plain_secrets
from services.common.errors import FailedPreconditionError
from services.common.secrets import with_secrets
from services.common.spec.loader import parse_spec


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
    return Allowance(roots=tuple(roots), code_roots=tuple(roots), **also).problems(spec)


def strays_here(spec, roots, **also):
    return Allowance(roots=tuple(roots), code_roots=tuple(roots), **also).problems_here(spec)


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
    given = {**source(str(roots[0] / "train.jsonl")), **changes}
    (problem,) = strays(spec_with(**given), roots)
    assert str(roots[0]) in problem
    assert problem.startswith(("model.", "data.train", "rollout.", "trainer."))


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "tiny:qwen2-0.4m"])
def test_what_lies_inside_is_allowed(roots, model):
    spec = spec_with(model__path=model, **source(str(roots[0] / "a" / "train.jsonl")))
    assert strays(spec, roots) == []


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


def test_rows_do_not_say_what_verifiers_runs(roots):
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


def test_values_that_look_like_secrets_are_refused():
    spec = spec_with(**reward("exact_match", api_key="abc", nested={"password": "x"}, tokens="ok"))
    problems = plain_secrets(spec)
    assert [problem.partition(":")[0] for problem in problems] == [
        "rollout.rewards.0.arguments.api_key",
        "rollout.rewards.0.arguments.nested.password",
    ]
    assert "abc" not in "".join(problems)
    assert plain_secrets(spec_with(**reward("exact_match", api_key={"secret": "KEY"}))) == []


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
    """A model cache holds what strangers wrote."""
    (roots[0] / "downloaded_for_test.py").write_text("def score(): ...\n")
    monkeypatch.syspath_prepend(str(roots[0]))
    allowance = Allowance(roots=tuple(roots), code_roots=(roots[0] / "code",))
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


@pytest.mark.parametrize("path", ["~nobody-there/x", "a\0b", "/" * 5000, "http://../../etc"])
def test_strange_paths_are_refused_and_raise_nothing(roots, path):
    for judge in (strays, strays_here):
        assert judge(spec_with(**source(path)), roots)
        assert judge(spec_with(model__path=path, **source(str(roots[0] / "x.jsonl"))), roots)


def test_sets_of_prompts_are_looked_at_one_by_one(roots):
    inside = {
        "source": "jsonl",
        "path": f"{roots[0]}/a.jsonl",
        "prompt_template": "/think {prompt}",
    }
    assert strays(spec_with(data__train={"a": inside, "b": inside}), roots) == []
    outside = {**inside, "path": "/etc/passwd"}
    found = strays(
        spec_with(data__train={"a": inside, "b": outside}, data__heldout={"c": outside}), roots
    )
    assert [problem.split(":")[0] for problem in found] == [
        "data.train.b.path",
        "data.heldout.c.path",
    ]
    filters = [
        {"column": "a", "matches": "/x"},
        {"column": "a", "one_of": ["/y"]},
        {"function": "os:getcwd"},
    ]
    found = strays(spec_with(data__train={"a": {**inside, "filters": filters}}), roots)
    assert [problem.split(":")[0] for problem in found] == ["data.train.a.filters.2.function"]
    chosen = spec_with(data__train=inside, data__curriculum={"function": "/tmp/mine.py:f"})
    found = strays(chosen, roots)
    assert [problem.split(":")[0] for problem in found] == ["data.curriculum.function"]
    code = {**inside, "rewards": [{"name": "/tmp/judge.py:f"}, {"name": "os:getcwd"}]}
    found = strays(spec_with(data__train={"a": code}), roots)
    assert [problem.split(":")[0] for problem in found] == [
        "data.train.a.rewards.0.name",
        "data.train.a.rewards.1.name",
    ]
