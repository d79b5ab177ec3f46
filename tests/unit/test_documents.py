"""Tests that commands, options, keys and examples in the documentation exist."""

import ast
import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pkgutil import iter_modules

import jsonschema
import pytest
import typer
import yaml

from services.cli.command import COMMANDS
from services.cli.main import _COMMANDS, load
from services.common.runspec.loader import parse_spec
from tests.helpers.commands import Command, blocks, commands
from tests.helpers.pages import ROOT
from tests.helpers.specs import spec_with
from tests.unit.test_repository import DOCUMENTS, named

PAGES = [
    *DOCUMENTS,
    ROOT / "deploy" / "helm" / "slipstream" / "README.md",
    ROOT / "services" / "client" / "README.md",
]
SHOWN = [
    (page, command)
    for page in PAGES
    for command in commands(page, {"slipstream", "make", "helm", "python"})
]
NAMES = {name for panel in _COMMANDS.values() for name in panel} | {*COMMANDS}
_MAKE_FILES = [ROOT / "Makefile", *(ROOT / "bench").glob("*.mk"), *(ROOT / "deploy").glob("*.mk")]
MAKE = "".join(path.read_text() for path in [*_MAKE_FILES, ROOT / "tests/engines/engines.mk"])
RUNSPEC = (ROOT / "docs" / "runspec.md").read_text()
VALUES = ROOT / "deploy" / "helm" / "slipstream" / "values.yaml"
SCHEMA = yaml.safe_load(VALUES.with_name("values.schema.json").read_text())
# Options of the command itself.
_OWN_OPTIONS = {"--help", "--version", "--install-completion", "--show-completion"}
# Options of helm that the documents use.
_HELM_OPTIONS = {
    *("--install", "--namespace", "-n", "--create-namespace", "--wait", "--logs", "-f", "--values", "--set"),
    *("--reset-then-reuse-values", "--reuse-values", "--timeout", "--version", "--set-string"),
}  # fmt: skip


def wrong(program: str, check: Callable[[Command], None]) -> dict[str, str]:
    """Returns the commands of a program that fail a check, by page, with the error."""
    errors = {}
    for page, command in dict.fromkeys(SHOWN):
        if command.program == program:
            try:
                check(command)
            except AssertionError as error:
                errors[f"{named(page)}: {command}"] = str(error)
    return errors


def test_commands_are_found_wherever_a_document_shows_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Say `make run SPEC=a.yaml`, or\n\n"
        "  ```sh\n"
        "  cd x && A=1 .venv/bin/slipstream run a.yaml \\\n"
        "    --set 'seed=1' > log; slipstream watch \"$(slipstream submit b.yaml)\" | head\n"
        "  ```\n"
    )
    assert sorted(map(str, commands(page, {"slipstream", "make"}))) == [
        "make run SPEC=a.yaml",
        "slipstream run a.yaml --set seed=1",
        "slipstream submit b.yaml",
        "slipstream watch SUBSTITUTED",
    ]
    for text in ("slipstream runn", "slipstream run a.yaml --sett x=1", "slipstream run a b"):
        command = Command("slipstream", tuple(text.split()[1:]), is_whole=True)
        with pytest.raises(AssertionError):
            check_own_command(command)


def options(command: Command) -> list[str]:
    return [word.partition("=")[0] for word in command.arguments if re.match(r"--?[A-Za-z]", word)]


def test_every_command_of_ours_exists_with_its_options_and_arguments():
    assert wrong("slipstream", check_own_command) == {}


def check_own_command(command: Command) -> None:
    if not command.arguments or command.arguments[0].startswith("-"):
        assert set(options(command)) <= _OWN_OPTIONS
        return
    name, *words = command.arguments
    for option, value in pairwise(words):
        if option == "--set":
            assert_key_exists(value.partition("=")[0])
    assert name in NAMES, f"commands are {sorted(NAMES)}"
    parameters = load(name).params
    options_by_name = {
        option: parameter
        for parameter in parameters
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set(options(command)) <= {*options_by_name, "--help"}
    positional = []
    remaining = iter(words)
    for word in remaining:
        if word.startswith("-") and word != "-":
            option, has_value, _ = word.partition("=")
            if not has_value and not getattr(options_by_name.get(option), "is_flag", True):
                next(remaining, None)
        else:
            positional.append(word)
    arguments = [
        parameter for parameter in parameters if isinstance(parameter, typer.core.TyperArgument)
    ]
    assert len(positional) <= len(arguments), (
        f"it takes {[argument.name for argument in arguments]}"
    )
    if command.is_whole and "--example" not in words:
        assert len(positional) >= sum(argument.required for argument in arguments)


def assert_key_exists(key: str) -> None:
    parts = key.split(".")
    keys = [".".join(parts[: n + 1]) for n in range(len(parts))]
    # Keys below a mapping of user arguments have no row.
    documented_key = next((prefix for prefix in keys if prefix.endswith("_arguments")), key)
    assert f"| `{documented_key}` |" in RUNSPEC, f"a specification has no key {key}"


_ROW = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)
_SAME_KEYS = re.compile(r"^## ([\w.]+)\n\n.*\n\nIt has the keys of \[([\w.]+)\]", re.MULTILINE)
_KEY = re.compile(r"`([a-z_]+(?:\.\w+)+)(?:[:=][^`]*)?`")
_METRIC = re.compile(r"`(slipstream_[a-z_]+?)(?:_bucket|_count|_sum)?(?:\{[^`]*)?`")
_NO_KEYS = {"controller.slipstream", "transferqueue.slipstream", "tls.crt", "tls.key"}
_NO_METRICS = {"slipstream_client"}


def _prefixes(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


@pytest.mark.parametrize(
    "page",
    [page for page in DOCUMENTS if page.name not in ("coming-from.md", "seeds.md")],
    ids=named,
)
def test_every_key_and_metric_that_a_document_names_exists(page):
    """Keys are those of a specification or the chart; the two excluded pages have keys of other systems."""
    chart = (VALUES.parent / "README.md").read_text()
    keys = set().union(*map(_prefixes, _ROW.findall(RUNSPEC) + _ROW.findall(chart)))
    for section, other in _SAME_KEYS.findall(RUNSPEC):
        keys |= {section + key.removeprefix(other) for key in keys if key.startswith(other)}
        keys |= _prefixes(section)
    files = re.compile(r"\.(py|md|yaml|json|jsonl|db|png|proto|Dockerfile)$")
    text = page.read_text()
    unknown = {
        key
        for key in _KEY.findall(text)
        if key.split(".")[0] in keys and key not in keys | _NO_KEYS and not files.search(key)
        if find_spec(key.split(".")[0]) is None
        # Keys below a mapping of arguments are chosen by the user.
        if not any(prefix in keys and prefix.endswith("arguments") for prefix in _prefixes(key))
    }
    metrics = _ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    unknown |= set(_METRIC.findall(text)) - {*metrics} - _NO_METRICS
    assert unknown == set()


def test_every_target_and_variable_of_make_exists():
    assert wrong("make", check_make_command) == {}


def check_make_command(command: Command) -> None:
    for word in command.arguments:
        variable, separator, _ = word.partition("=")
        if separator:
            assert f"$({variable})" in MAKE, f"no target uses {variable}"
        elif not word.startswith("-"):
            assert re.search(rf"^{re.escape(word)}:", MAKE, re.MULTILINE), f"there is no {word}"


def test_every_helm_command_names_files_and_values_that_are_there():
    assert wrong("helm", check_helm_command) == {}


def check_helm_command(command: Command) -> None:
    assert set(options(command)) <= _HELM_OPTIONS
    for option, value in pairwise(command.arguments):
        if option in ("-f", "--values") and value.startswith("deploy/"):
            assert (ROOT / value).exists()
        if option == "--set":
            for assignment in re.split(r",(?=[\w.]+=)", value):
                assert_value_exists(assignment.partition("=")[0])
    for word in command.arguments:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists()


def assert_value_exists(key: str) -> None:
    schema = SCHEMA
    for name in key.split("."):
        schema = {**SCHEMA, **schema}
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        assert inner, f"the chart has no value {key}"
        schema = inner if isinstance(inner, dict) else {}


def test_every_module_that_is_run_exists():
    assert wrong("python", check_modules) == {}


def check_modules(command: Command) -> None:
    modules = [
        module
        for option, module in pairwise(command.arguments)
        if option == "-m" and module.split(".")[0] in ("services", "bench", "tests", "deploy")
    ]
    assert [module for module in modules if find_spec(module) is None] == []


def test_code_of_a_command_imports_what_exists():
    assert wrong("python", check_imports) == {}


def check_imports(command: Command) -> None:
    codes = [code for option, code in pairwise(command.arguments) if option == "-c"]
    for node in ast.walk(ast.parse("\n".join(codes))):
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module)
            folders = getattr(module, "__path__", ())
            names = {*dir(module), *(submodule.name for submodule in iter_modules(folders))}
            assert {name.name for name in node.names} <= names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_of_shells_and_of_yaml_are_well_formed(page):
    for block in blocks(page, "sh", "bash"):
        result = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert result.stderr == "", block
    for block in blocks(page, "yaml"):
        list(yaml.safe_load_all(block))
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=0x2000)  # allows await at top level


def example(page: str, name: str) -> dict:
    texts = blocks(ROOT / "docs" / page, "yaml")
    return yaml.safe_load(next(text for text in texts if text.startswith(f"# {name}\n")))


def test_values_for_the_chart_are_values_of_the_chart():
    application = example("schedulers.md", "application.yaml")
    source = application["spec"]["source"]
    for file in source["helm"]["valueFiles"]:
        assert (ROOT / source["path"] / file).exists()
    defaults = yaml.safe_load(VALUES.read_text())
    for values in (source["helm"]["valuesObject"], example("schedulers.md", "kueue-values.yaml")):
        jsonschema.validate(merged(defaults, values), SCHEMA)


def merged(defaults: dict, values: dict) -> dict:
    both = {**defaults, **values}
    for name, value in values.items():
        if isinstance(value, dict):
            both[name] = merged(defaults.get(name) or {}, value)
    return both


COUNTERPARTS = [
    pair
    for line in (ROOT / "docs" / "coming-from.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| ---")
    for pair in re.findall(r"`([a-z_]+(?:\.\w+)+)(?:: ([^`]+))?`", line.split("|")[-2])
]


def test_the_counterparts_of_other_systems_settings_are_keys_and_values():
    for key, value in dict.fromkeys(COUNTERPARTS):
        check_counterpart(key, value)


def check_counterpart(key: str, value: str) -> None:
    if f"## {key}" not in RUNSPEC:  # a list has a section of its items
        assert_key_exists(key)
    if value:
        section, _, name = key.partition(".")
        model = {"path": "Qwen/Qwen2-7B-Instruct"}  # a model that an engine on a GPU decodes
        spec = spec_with(model=model, **{section: {name: yaml.safe_load(value)}})
        assert getattr(getattr(spec, section), name) == value, key


def test_the_translated_verl_command_is_a_specification():
    spec = parse_spec(example("coming-from.md", "from-verl.yaml"))
    assert (spec.rollout.replicas, spec.engine_gpus, spec.trainer.world_size) == (4, 2, 8)
    assert spec.trainer.prompts_per_step == 1024
