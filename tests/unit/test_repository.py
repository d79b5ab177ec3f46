"""What every file of the repository keeps to."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted((REPOSITORY / "services").rglob("*.py"))
MAX_LINES = 360


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_file_fits_one_subject(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.name == "__init__.py"],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_package_files_hold_a_docstring_only(path):
    body = ast.parse(path.read_text()).body
    assert len(body) == 1
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_controller_process_never_loads_a_tensor_library():
    code = (
        "import sys, services.controller.__main__\n"
        "print(sorted({'torch', 'numpy', 'zmq', 'vllm', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_transferqueue_process_never_loads_torch():
    code = "import sys, services.transferqueue.__main__\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
