"""First cause of a worker's failure, read from the end of its log.

A worker's log holds the output of several processes: its ranks, or an engine with its own processes. When one
fails, the others fail as a consequence, often with longer tracebacks. The cause is therefore the first
exception of the last minute that does not refer to the failure of another process.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.callables import USER_CODE_BEGINS, USER_CODE_ENDED

_MAX_CHARACTERS = 500
_WINDOW_S = 60
_DAY_S = 24 * 3600
_LAST_LINES = 15
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Name of the process that wrote a line, by vLLM or torchrun.
_PROCESS = re.compile(r"\s*(\([\w .:-]*pid=\d+\)|\[[\w-]*rank\d+\]:) ?")
# vLLM repeats the head of a record in each line of a traceback, so that what follows is like raw output.
_VLLM_HEAD = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d (\d\d:\d\d:\d\d) \[[^\]]*\] ?"
)
_RECORD = re.compile(
    r"(?:\S+ ){0,4}(\d\d:\d\d:\d\d) (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"
    r"|\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)"
)
_JSON_TIME = re.compile(r'\{"time": "[\d-]+T(\d\d:\d\d:\d\d)')
_GROUP_MEMBER = re.compile(r"\s*\+[-+]+ \d+ -+$")
_GROUP_END = re.compile(r"\s*\+-+$")
_GROUP_BAR = re.compile(r"\s*[|+] ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s.*)?$")
_MESSAGE_FOLLOWS = re.compile(r":$|\berrors? for \w+$")

# Exceptions and messages of processes that end because another one did.
_CONSEQUENCE = re.compile(
    r"^[\w.]*(?:ExceptionGroup|KeyboardInterrupt|SystemExit|CancelledError|EOFError|BrokenPipeError"
    r"|ConnectionResetError|ConnectionAbortedError|EngineDeadError|ChildFailedError)\b"
    r"|\babove\b|see its log|root cause|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError",
    re.IGNORECASE,
)
# Both records of user code of one process differ by time and message only.
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\dT)?\d\d:\d\d:\d\d(?:[+-]\d{4})?")
_USER_CODE = re.compile(
    rf"(?m)^(?P<head>.*?)(?P<message>{USER_CODE_BEGINS}|{USER_CODE_ENDED})"
    r"(?P<tail>\b.*?\breference(?:=|\": \")(?P<reference>.+?:\w+)\b)"
)
# Report of :mod:`faulthandler` about a crash of native code.
_CRASH = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_LIBRARY = re.compile(r"/lib/python\d|/services/|<frozen")
_ERROR_WORD = re.compile(r"error|fatal|fail|cannot|what\(\):|abort|refused|cause=", re.IGNORECASE)


@dataclass(slots=True)
class _Failure:
    """Exception that ended a traceback."""

    text: str
    time_s: int
    is_logged: bool
    """True if the process logged it and went on."""
    root: str = ""
    """First exception of its chain; empty if it is the only one."""

    def cause(self) -> str:
        """Returns what to report; empty if another process's failure is the cause."""
        if _CONSEQUENCE.search(self.text):
            return "" if _CONSEQUENCE.search(self.root) else self.root
        has_other_root = self.root and self.root != self.text
        return f"{self.text}; caused by {self.root}" if has_other_root else self.text


@dataclass(slots=True)
class _ProcessState:
    """State of the output of one process."""

    is_in_traceback: bool = False
    follows_record: bool = False
    """True if the last line before the traceback was a log record."""
    is_chained: bool = False
    """True if the next traceback continues the chain of ``failure``."""
    failure: _Failure | None = None
    """Exception of the newest traceback."""


@dataclass(slots=True)
class _LogReader:
    """Collects the exceptions in the lines of a log."""

    failures: list[_Failure] = field(default_factory=list)
    time_s: int = 0
    """Time of day of the newest log record."""
    _states: dict[str, _ProcessState] = field(default_factory=dict)

    def read(self, line: str) -> None:
        process, text, is_record = self._split(line)
        state = self._states.setdefault(process, _ProcessState())
        if text.endswith(_TRACEBACK) or _GROUP_MEMBER.match(text):
            state.is_in_traceback = True
        elif is_record:
            state.follows_record = not state.is_in_traceback
        elif state.is_in_traceback:
            if text and not text[0].isspace():
                state.is_in_traceback = False
                self._end_traceback(state, text)
        elif text.startswith(_CHAINED):
            state.is_chained = True
        elif text and state.failure is not None and _MESSAGE_FOLLOWS.search(state.failure.text):
            state.failure.text = _shortened(f"{state.failure.text} {text.strip()}")

    def _end_traceback(self, state: _ProcessState, text: str) -> None:
        if not _EXCEPTION.match(text):
            return
        failure = _Failure(_shortened(text), self.time_s, state.follows_record)
        if state.is_chained and state.failure is not None:
            self.failures.remove(state.failure)
            failure.root = state.failure.root or state.failure.text
            failure.is_logged = state.failure.is_logged
        state.failure, state.is_chained, state.follows_record = failure, False, False
        self.failures.append(failure)

    def _split(self, line: str) -> tuple[str, str, bool]:
        """Splits a line into its process, its text, and whether it is a log record of this project."""
        process = ""
        if prefix := _PROCESS.match(line):
            process, line = prefix[1], line[prefix.end() :]
        if head := _VLLM_HEAD.match(line):
            self._note_time(head[1])
            return f"{process} logger", line[head.end() :], False
        if head := _RECORD.match(line) or _JSON_TIME.match(line):
            self._note_time(head[head.lastindex or 1])
            return process, line, True
        while bar := _GROUP_BAR.match(line):
            line = line[bar.end() :]
        return process, line, False

    def _note_time(self, clock: str) -> None:
        hours, minutes, seconds = map(int, clock.split(":"))
        self.time_s = 3600 * hours + 60 * minutes + seconds


def first_cause(output: str, *, is_exit: bool = True) -> str:
    """Returns the first cause of a worker's failure in one line; empty if its output names none.

    Args:
        output: End of its log, with the lines of all its processes.
        is_exit: True if the worker ended itself, so that its last line may be the message of ``sys.exit``.
    """
    reader, lines = _LogReader(), [_COLOR.sub("", line).rstrip() for line in output.splitlines()]
    for line in lines:
        reader.read(line)
    failures = [
        failure
        for failure in reader.failures
        if (reader.time_s - failure.time_s) % _DAY_S <= _WINDOW_S
    ]
    raised = [failure.cause() for failure in failures if not failure.is_logged]
    logged = [failure.cause() for failure in failures if failure.is_logged]
    num_before = next((i for i, line in enumerate(lines) if line.startswith(_CRASH)), len(lines))
    crash = _crash(lines[num_before:])
    if "Aborted" in crash:  # the library that aborts has printed why
        crash = _last_error(lines[:num_before]) or crash
    exit_message = _exit_message(lines) if is_exit and not crash else ""
    candidates = (*raised, crash, exit_message, *logged, _last_error(lines))
    return next(filter(None, candidates), "")


def unfinished_user_code(output: str) -> str:
    """Returns the reference of the code of the user that ended a process; empty if none did.

    Code that ran while an exception ended the process did not end it.
    """
    begins: dict[str, re.Match[str]] = {}
    for record in _USER_CODE.finditer(output):
        call = _TIME.sub("", record["head"]) + record["tail"]
        begins.pop(call, None)
        if record["message"] == USER_CODE_BEGINS:
            begins[call] = record
    for record in reversed(begins.values()):
        reader = _LogReader()
        for line in output[record.end() :].splitlines():
            reader.read(_COLOR.sub("", line).rstrip())
        if not any(failure.cause() for failure in reader.failures if not failure.is_logged):
            return record["reference"]
    return ""


def _crash(report: list[str]) -> str:
    """Returns the head of a report about a crash and its newest line outside libraries; empty without one."""
    if not report:
        return ""
    begin = next((i for i, line in enumerate(report) if line.startswith("Current thread ")), 0)
    frames = [frame for line in report[begin:] if (frame := _FRAME.match(line))]
    own_frames = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    where = (own_frames or frames)[:1]
    return report[0] + "".join(f" ({frame['file']}, line {frame['line']})" for frame in where)


def _exit_message(lines: list[str]) -> str:
    """Returns the last line if it is the message of ``sys.exit``; else an empty text."""
    last = next((line for line in reversed(lines) if line and not _GROUP_END.match(line)), "")
    is_record = _RECORD.match(last) or _JSON_TIME.match(last) or _VLLM_HEAD.match(last)
    return "" if is_record or _CONSEQUENCE.search(last) else _shortened(last.strip())


def _last_error(lines: list[str]) -> str:
    """Returns the newest line that reads like an error; empty without one."""
    for line in reversed(lines[-_LAST_LINES:]):
        if _ERROR_WORD.search(line):
            return _shortened(_record_text(line))
    return ""


def _record_text(line: str) -> str:
    """Returns the message of a log record, and its cause if it names one."""
    if not _JSON_TIME.match(line):
        return line.strip()
    try:
        record: Mapping[str, object] = json.loads(line)
    except ValueError:
        return line
    return ": ".join(str(record[name]) for name in ("message", "cause") if name in record)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
