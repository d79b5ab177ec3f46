"""Measures how long a new user sees no output: ``python -m bench.silence [--smoke]``.

``slipstream run examples/sort4.yaml`` is started in a terminal and in a pipe, until it shows its
first step. The benchmark reports the seconds to the first output, the longest silence after it, the
seconds to the first step, and the time of ``slipstream --help``. Bars: 1 s, 2 s, and 1 s for the
help. Writes ``bench/results/silence.json``.
"""

import argparse
import itertools
import os
import pty
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import report_to

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "bench" / "results" / "silence.json"
SLIPSTREAM = Path(sys.executable).with_name("slipstream")
_FIRST_STEP = re.compile(rb"step +1/|\b1/\d+,")
_MOST_S = 300.0
_COLUMNS = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}


def silences(*, in_terminal: bool) -> dict[str, object]:
    """Measures when a starting run prints output."""
    with tempfile.TemporaryDirectory() as folder:
        reading, writing = pty.openpty() if in_terminal else os.pipe()
        begin = time.monotonic()
        process = subprocess.Popen(
            [SLIPSTREAM, "run", "examples/sort4.yaml", "--state-directory", folder],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            env=os.environ | _COLUMNS,  # noqa: TID251  a child process inherits it
        )
        os.close(writing)
        moments, output = [begin], b""
        try:
            while not _FIRST_STEP.search(output) and time.monotonic() - begin < _MOST_S:
                piece = os.read(reading, 1 << 16)
                if not piece:
                    raise RuntimeError(f"the run ended:\n{output.decode(errors='replace')}")
                output += piece
                moments.append(time.monotonic())
        finally:
            process.send_signal(signal.SIGTERM)
            _drain(reading)
            process.wait()
    gaps = [(after - before, before - begin) for before, after in itertools.pairwise(moments[1:])]
    longest, since = max(gaps)
    return {
        "first_output_s": round(moments[1] - begin, 2),
        "longest_silence_s": round(longest, 2),
        "longest_silence_after_s": round(since, 2),
        "first_step_s": round(moments[-1] - begin, 2),
    }


def _drain(descriptor: int) -> None:
    """Reads until all writers have closed."""
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:  # a terminal that is closed
        pass


def help_s(times: int) -> dict[str, float]:
    """Returns the seconds of ``slipstream --help``, elapsed and of CPU."""
    walls, busy = [], []
    for _ in range(times):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([SLIPSTREAM, "--help"], check=True, stdout=subprocess.DEVNULL)
        walls.append(time.monotonic() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return {
        "median_s": round(statistics.median(walls), 2),
        "cpu_s": round(statistics.median(busy), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="in a pipe alone; writes no results")
    is_smoke = parser.parse_args().smoke
    report: dict[str, object] = {
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    report["help"] = help_s(3 if is_smoke else 7)
    report["pipe"] = silences(in_terminal=False)
    if not is_smoke:
        report["terminal"] = silences(in_terminal=True)
    report_to(None if is_smoke else RESULTS, report)


if __name__ == "__main__":
    main()
