"""Tries every cheat on every form of tests: ``python -m bench.cheats [--every N]``.

Forms and cheats are those of ``tests/unit/extras/code_tests``, which tries two forms for each cheat.
Bars: no cheat scores, and each right program scores 1 within the same time. A pair that uses up its time
is tried again with ten times as much, so that no cheat counts as refused that was only slow; those that
use up that, too, such as endless loops, are listed apart. A form that refuses a program with an error
gives it nothing, but counts as an error here. Writes ``bench/results/cheats.json``; ``--every N`` tries
one of N pairs and writes nothing.
"""

import argparse
import importlib.util
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.extras.code_tests.reward import code_tests

RESULTS = REPOSITORY / "bench" / "results" / "cheats.json"
_TESTS = REPOSITORY / "tests" / "unit" / "extras" / "code_tests" / "test_code_answers.py"
_SECONDS = 1.0
_MORE_TIME = 10
"""Factor of the time with which a pair is tried again that used up its time."""


def _cases() -> Any:
    specification = importlib.util.spec_from_file_location("code_answers", _TESTS)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(
            f"no tests of code_tests at {_TESTS}; run this in a checkout of the repository"
        )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _score(program: str, answer: Any, row: dict[str, Any], seconds: float) -> float | str:
    try:
        return code_tests("", f"```python\n{program}\n```", answer, row, seconds=seconds)
    except ValueError as error:
        return f"{error}"[:200]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--every", type=int, default=1, help="try one of this many pairs, and write nothing"
    )
    every = parser.parse_args().every
    cases = _cases()
    started = time.perf_counter()
    pairs = [*product(cases.CHEATS, cases.FORMS)][::every]

    def judge(pair: tuple[str, str], seconds: float = _SECONDS) -> tuple[float | str, bool]:
        answer, program, row = cases.FORMS[pair[1]]
        start = time.perf_counter()
        score = _score(cases.adapted(cases.CHEATS[pair[0]], program), answer, row, seconds)
        return score, time.perf_counter() - start >= seconds

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        judged = dict(zip(pairs, pool.map(judge, pairs), strict=True))
        slow = [pair for pair, (_, is_slow) in judged.items() if is_slow]
        again = pool.map(lambda pair: judge(pair, _MORE_TIME * _SECONDS), slow)
        judged |= dict(zip(slow, again, strict=True))
        rights = pool.map(
            lambda form: _score(form[1], form[0], form[2], _SECONDS), cases.FORMS.values()
        )
        lost_programs = [
            name for name, score in zip(cases.FORMS, rights, strict=True) if score != 1.0
        ]
    scores = {pair: score for pair, (score, _) in judged.items()}
    timed_out = [list(pair) for pair, (score, is_slow) in judged.items() if is_slow and not score]
    credited = [
        list(pair) for pair, score in scores.items() if isinstance(score, float) and score > 0
    ]
    failed = [[*pair, score] for pair, score in scores.items() if isinstance(score, str)]
    result = {
        "cheats": len(cases.CHEATS),
        "forms": len(cases.FORMS),
        "pairs": len(pairs),
        "credited": credited,
        "errors": failed,
        "tried_again_with_more_time": len(slow),
        "timed_out_again": timed_out,
        "right_programs_lost": lost_programs,
        "wall_s": round(time.perf_counter() - started, 1),
        "host": f"{os.cpu_count()} CPU cores, shared with other work",
        "met": not credited and not failed and not lost_programs,
    }
    report_to(None if every > 1 else RESULTS, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
