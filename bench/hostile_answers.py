"""Processor time that ``math_verify`` takes to judge responses that try to be expensive.

``python -m bench.hostile_answers [--responses 2000] [--seed 1]`` makes responses of thousands of brackets,
towers of powers, factorials, long sums, matrices, unions and random signs, in every form of a final answer.
It compares each with one of 22 expected answers. Bars: no response fails, and none takes more than 50 ms of
processor time. Writes ``bench/results/hostile_answers.json``.
"""

import argparse
import importlib.util
import sys
import time
from typing import Any

from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.extras.math_verify.answer import math_answer

RESULTS = REPOSITORY / "bench" / "results" / "hostile_answers.json"
_RESPONSES = REPOSITORY / "tests" / "helpers" / "hostile_answers.py"
BAR_S = 0.05


def _responses() -> Any:
    """Returns the generator of responses, which the tests use, too."""
    specification = importlib.util.spec_from_file_location("hostile_answers", _RESPONSES)
    if specification is None or specification.loader is None or not _RESPONSES.is_file():
        sys.exit(f"no responses at {_RESPONSES}; run this in a checkout of the repository")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.responses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for text in (
        "1",
        "x^2 < 3",
        "\\int_0^1 x dx",
        "\\lim_{n} n",
        "\\frac{d}{dx} x",
        "\\sum_{n=1}^9 n",
    ):
        math_answer("", text, "2", {})  # imports
    times, failures, slow = [], 0, []
    for question, answer, response in _responses()(options.responses, options.seed):
        started = time.process_time()
        try:
            math_answer(question, response, answer, {})
        except Exception as error:  # noqa: BLE001 -- each failure is counted
            failures += 1
            print(f"{type(error).__name__}: {answer} | {response[:60]!r}")
        times.append(time.process_time() - started)
        if times[-1] > BAR_S:
            slow.append((times[-1], answer, response[:60]))
    times.sort()
    for seconds, answer, response in sorted(slow, reverse=True)[:26]:
        print(f"{seconds:.3f} s: {answer} | {response!r}")
    result = {
        "responses": len(times),
        "seed": options.seed,
        "failures": failures,
        "median_ms": round(times[len(times) // 2] * 1e3, 2),
        "p99_ms": round(times[int(len(times) * 0.99)] * 1e3, 2),
        "max_ms": round(times[-1] * 1e3, 2),
        "over_50_ms": len(slow),
        "met": failures == 0 and not slow,
    }
    report_to(RESULTS, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
