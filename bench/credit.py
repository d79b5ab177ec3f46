"""Counts right replies that ``math_verify`` refuses, and wrong ones that it accepts, on word problems.

``python -m bench.credit GSM8K.jsonl [--every N]`` reads rows with ``question`` and ``answer`` in GSM8K's form
and makes replies of each by templates. Right ones say the row's number as the last sentence of the derivation
says it: with its noun, its dollar sign, or alone. Wrong ones say another number of the derivation with the
right noun, or the right number with another noun of the question, as dollars, or as per cents, where neither
question nor derivation has these. Bars: no right reply is refused, no wrong one accepted. A row whose
derivation contradicts itself or its question counts, too. Writes ``bench/results/credit.json``; ``--every N``
takes one of N rows and writes nothing.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.extras.math_verify.answer import math_answer

RESULTS = REPOSITORY / "bench" / "results" / "credit.json"
_CALCULATION = re.compile(r"<<[^<>]*>>")
_MARK = "\n#### "
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w%]|[.,]\d)")
_ASKED_NOUN = re.compile(r"\bhow many\s+((?:\w+[\s-]+){0,3}?\w+s)\b", re.IGNORECASE)
_COUNTED = re.compile(r"\b\d[\d,]*\s+((?!less\b)[a-z]{3,}s)\b")
_MONEY = re.compile(r"\b(?:dollars?|cents?|money|costs?|pays?|price)\b", re.IGNORECASE)
_MAX_NOUN_WORDS = 2
_PREPOSITION = r"(?:with|since|of|in|on|at|for|from|to|by|per|less|more|out|and|or)\b"


def replies(question: str, answer: str) -> Iterator[tuple[str, str, float]]:
    """Yields template, reply and score that the reply deserves."""
    derivation, _, number = answer.partition(_MARK)
    number = number.strip()
    sentences = _CALCULATION.sub("", derivation).strip().split("\n")
    last = sentences[-1].strip()
    before, separator, tail = last.rpartition(number)
    is_stated = (
        bool(separator)
        and not re.match(r"[\d%]|[.,]\d", tail)
        and not re.search(r"[\d.,]$", before)
    )
    yield "number after the mark", f"{last}\n#### {number}", 1.0
    yield "boxed number", f"\\boxed{{{number}}}", 1.0
    if not is_stated:
        return
    noun = tail.strip(" .")
    is_amount = before.rstrip().endswith("$")
    yield "last sentence", last, 1.0
    yield "derivation", "\n".join(sentences), 1.0
    if is_amount:
        yield "dollars", f"${number}", 1.0
        yield "dollars in words", f"The answer is {number} dollars.", 1.0
        yield "boxed dollars", f"\\boxed{{\\${number}}}", 1.0
    short = re.match(rf"(?:(?!{_PREPOSITION})[a-z]+\s*){{1,{_MAX_NOUN_WORDS}}}", noun)
    if noun and not re.search(r"\d", noun) and not is_amount:
        yield "number and rest of the sentence", f"{number} {noun}", 1.0
        if short and not is_amount:
            yield (
                "boxed number and words",
                f"\\boxed{{{number} \\text{{ {short[0].strip()}}}}}",
                1.0,
            )
    others = [
        text for text in _NUMBER.findall("\n".join(sentences)) if _value(text) != _value(number)
    ]
    if others and "=" not in noun and "because" not in before:
        sign = "$" * is_amount
        yield "another number", f"{before[: len(before) - len(sign)]}{sign}{others[-1]} {noun}", 0.0
        yield "another number alone", f"#### {others[0]}", 0.0
    yield from _other_quantities(question, number, f"{last} {noun}")


def _other_quantities(question: str, number: str, last: str) -> Iterator[tuple[str, str, float]]:
    asked_noun = _ASKED_NOUN.search(question)
    if not asked_noun or _value(number) == 1:
        return
    is_money = _MONEY.search(asked_noun[1]) or "$" in last or _MONEY.search(last)
    if not is_money:
        yield "number as dollars", f"${number}", 0.0
        yield "number and dollars", f"{number} dollars", 0.0
        yield "boxed number as dollars", f"\\boxed{{\\${number}}}", 0.0
    if "%" not in last and "percent" not in f"{question}{last}":
        yield "number as per cents", f"{number}%", 0.0
    text = f"{question[asked_noun.start() :]} {last}".casefold()
    for noun in dict.fromkeys(_COUNTED.findall(question)):
        if noun.removesuffix("s") not in text:
            yield "other noun", f"{number} {noun}", 0.0
            yield "other noun in a sentence", f"The answer is {number} {noun}.", 0.0


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _judged(row: dict[str, str]) -> list[tuple[str, str, float, bool]]:
    """Returns template, reply, deserved score of each reply to a row, and whether the reward agrees."""
    return [
        (template, reply, score, math_answer(row["question"], reply, row["answer"], {}) == score)
        for template, reply, score in replies(row["question"], row["answer"])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "rows", type=Path, help="JSON lines with question and answer, such as GSM8K's test split"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="take one of this many rows, and write nothing"
    )
    parser.add_argument("--examples", type=int, default=0, help="print this many misjudged replies")
    options = parser.parse_args()
    lines = options.rows.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][:: options.every]
    started = time.process_time()
    total, misjudged, examples = (
        Counter[tuple[str, float]](),
        Counter[tuple[str, float]](),
        list[list[str]](),
    )
    for row in rows:
        for template, reply, score, is_right in _judged(row):
            total[template, score] += 1
            if not is_right:
                misjudged[template, score] += 1
                examples.append([template, row["question"][-200:], reply[-200:]])
    for example in examples[: options.examples]:
        print(*example, sep=" | ")
    counts = {
        name: {
            "replies": sum(count for (_, score), count in total.items() if score == deserved),
            "misjudged": sum(count for (_, score), count in misjudged.items() if score == deserved),
            "by_template": {
                template: [misjudged[template, score], count]
                for (template, score), count in total.items()
                if score == deserved
            },
        }
        for name, deserved in (("right", 1.0), ("wrong", 0.0))
    }
    result = {
        "rows": len(rows),
        **counts,
        "processor_s": round(time.process_time() - started, 1),
        "met": not misjudged,
    }
    report_to(None if options.every > 1 else RESULTS, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
