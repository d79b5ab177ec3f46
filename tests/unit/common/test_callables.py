"""Tests of loading user code by reference, and of errors of wrong references."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.callables import describe_error, load_callable, source_digest


def test_a_function_of_a_module_is_found() -> None:
    assert load_callable("math:floor")(1.5) == 1


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "tasks.py"
    file.write_text("def first():\n    return 1\n\ndef second():\n    return 2\n")
    first, second = load_callable(f"{file}:first"), load_callable(f"{file}:second")
    assert (first(), second()) == (1, 2)
    assert first.__module__ == second.__module__


def test_a_thread_waits_for_the_file_that_another_one_imports(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.05)\ndef function():\n    return 1\n")
    with ThreadPoolExecutor(4) as threads:
        functions = list(threads.map(load_callable, [f"{file}:function"] * 4))
    assert [function() for function in functions] == [1] * 4


@pytest.mark.parametrize(
    "reference",
    [
        "nothing",
        "no_such_module_here:f",
        "math:no_such_function",
        "math:pi",
        "missing.py:f",
    ],
)
def test_a_wrong_reference_is_rejected_by_name(reference: str) -> None:
    with pytest.raises(ValueError, match=reference):
        load_callable(reference)


def test_the_digest_follows_the_source(tmp_path: Path) -> None:
    digests = set()
    for name, body in (("a.py", "1"), ("b.py", "2")):
        (tmp_path / name).write_text(f"def task():\n    return {body}\n")
        digests.add(source_digest(f"{tmp_path / name}:task"))
    assert len(digests) == 2


@pytest.mark.parametrize(("name", "fix"), [("beside", "PYTHONPATH="), ("no_such", "install")])
def test_a_file_that_imports_an_unknown_module_is_named(
    tmp_path: Path, name: str, fix: str
) -> None:
    (tmp_path / "beside.py").touch()
    file = tmp_path / "tasks.py"
    file.write_text(f"import {name}\n")
    with pytest.raises(ValueError, match=rf"tasks\.py.*{name}.*{fix}"):
        load_callable(f"{file}:function")


def test_an_error_of_user_code_names_the_line_of_their_file(tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    file.write_text(
        "import json\n\ndef parsed(text):\n    return json.loads(text)\n\n"
        "def score(text):\n    return parsed(text)\n"
    )
    with pytest.raises(ValueError, match="Expecting") as caught:
        load_callable(f"{file}:score")("no JSON")
    error = caught.value
    assert error.__traceback__ is not None
    # without the frame of this test
    text = describe_error(error.with_traceback(error.__traceback__.tb_next))
    assert text.endswith("(scores.py, line 4)")
