"""What a specification names stays inside what an installation allows."""

import sys

import pytest

from services.common.confinement import plain_secrets, strays, strays_here
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
    ],
)
def test_paths_out_of_the_roots_are_named(roots, changes):
    given = {**source(str(roots[0] / "train.jsonl")), **changes}
    (problem,) = strays(spec_with(**given), roots)
    assert str(roots[0]) in problem
    assert problem.startswith(("model.path", "data.train", "rollout.rewards.0"))


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
