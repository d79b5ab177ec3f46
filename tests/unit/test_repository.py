"""What every file of the repository keeps to; each test names all that do not."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PYTHON = {
    path: path.read_text(encoding="utf-8")
    for folder in ("services", "tests", "bench", "deploy")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
}
SERVICES = {
    path: text
    for path, text in PYTHON.items()
    if path.is_relative_to(REPOSITORY / "services")
    if "\n\nWritten by deploy/" not in text.split('"""')[1]  # nobody edits it
}
TREES = {path: ast.parse(text) for path, text in PYTHON.items()}
DOCUMENTS = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]

# A path, or the name of a source file: `controller/api/`, `deploy/docker/trainer.Dockerfile`, `objective.py`.
_PATH = re.compile(
    r"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w.-]+\.(?:py|proto|mk|sh)|(?:[\w.-]+/)+[\w.-]+\.\w{2,})`"
)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
# What documents say should not be there, is a user's, or is an address.
_NO_PATHS = {"utils.py", "helpers.py", "misc.py"}


def named(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_package_files_hold_a_docstring_only():
    packages = {
        path: TREES[path]
        for path in SERVICES
        if path.name == "__init__.py"
        if path.parent.name != "slipstream_client"  # users import from it
    }
    full = {named(path) for path, tree in packages.items() if len(tree.body) != 1}
    silent = {named(path) for path, tree in packages.items() if not ast.get_docstring(tree)}
    assert full | silent == set()


def test_every_path_that_a_document_names_exists():
    tracked = _tracked()
    folders = {parent.as_posix() for path in tracked for parent in path.parents}
    known = {"/" + path.as_posix() for path in tracked} | {f"/{folder}/" for folder in folders}
    dead = {
        f"{named(document)}: {path}"
        for document in DOCUMENTS
        for path in _PATH.findall(document.read_text(encoding="utf-8"))
        if path not in _NO_PATHS and not any(real.endswith("/" + path) for real in known)
    }
    assert dead == set()


def test_every_term_of_the_orientation_pages_is_in_the_code():
    code = "\n".join(SERVICES.values())
    words = set(re.findall(r"\w+", code))
    names = (REPOSITORY / "docs" / "names.md").read_text(encoding="utf-8")
    # The last column has names of older commits.
    names = "\n".join(line.rsplit("|", 2)[0] for line in names.splitlines())
    pages = {
        "names.md": names,
        "architecture.md": (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8"),
    }
    unknown = {
        f"{page}: {term}"
        for page, text in pages.items()
        for term in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)?)`", text)
        if not set(term.split(".")) <= words
    }
    assert unknown == set()


def test_every_link_between_documents_leads_somewhere():
    dead = {
        f"{named(document)}: {link}"
        for document in DOCUMENTS
        for link in _LINK.findall(document.read_text(encoding="utf-8"))
        if "://" not in link and not (document.parent / link).exists()
    }
    assert dead == set()


def _tracked() -> list[Path]:
    """Files of the repository; those made by builds and runs are none."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if (REPOSITORY / line).exists()]


def test_tests_and_benchmarks_do_not_import_each_other():
    wrong = {
        f"{named(path)} imports {module}"
        for path, tree in TREES.items()
        for module in _imports(tree)
        if {path.relative_to(REPOSITORY).parts[0], module.split(".")[0]} == {"tests", "bench"}
    }
    assert wrong == set(), "what both need is part of the product, or of tests/helpers"


def test_what_several_suites_use_is_in_helpers():
    wrong = {
        f"{named(path)} imports {module}"
        for path, tree in TREES.items()
        for module in _imports(tree)
        if module.startswith("tests.") and not module.startswith("tests.helpers")
        if path.relative_to(REPOSITORY).parts[:2] != tuple(module.split(".")[:2])
    }
    assert wrong == set()


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


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
