"""Tests of the program that runs as the first process of a container."""

import signal
import subprocess
import sys
from pathlib import Path


def _start(folder: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(source, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "services.common.start", "program", *arguments],
        env={"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_program_runs_as_the_main_module_with_its_arguments(tmp_path: Path) -> None:
    source = "import sys; print(__name__, sys.modules['__main__'].__spec__.name, *sys.argv[1:])"
    output, _ = _start(tmp_path, source, "one", "two").communicate(timeout=30)
    assert output.split() == ["__main__", "program", "one", "two"]


def test_a_program_that_is_still_imported_ends_at_the_signal(tmp_path: Path) -> None:
    source = "import signal; print('importing', flush=True); signal.pause()"
    with _start(tmp_path, source) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        # A handler ends the process, because PID 1 ignores signals without a handler.
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
