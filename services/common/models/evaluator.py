"""Evaluates files of a model in a separate process, with a deadline and a memory limit.

A chat template is a program, and a ``config.json`` has numbers that its family loops over: either may run
forever, or use all memory of its process. Requests and answers are JSON with a length prefix of eight bytes.
"""

import atexit
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from services.common.parent import module_command

_Kind = Literal["template", "config"]
_START_TIMEOUT_S: Final = 300.0
_TIMEOUT_S: Final[Mapping[_Kind, float]] = {"template": 5.0, "config": 60.0}
_MEMORY_BYTES: Final = 1 << 30
_MAX_ANSWER_BYTES: Final = 16 << 20
# A template that was stopped this often is not tried again in this process.
_MAX_STOPS: Final = 3
_LENGTH_BYTES: Final = 8


def parse_config(text: str) -> Any:
    """Returns the content of a ``config.json``, where infinity is ``{"__float__": "Infinity"}``."""
    return json.loads(text, object_hook=_plain_float)


class EvaluationStoppedError(ValueError):
    """Reports that an evaluation exceeded the deadline or the memory limit."""


def _plain_float(value: dict[str, Any]) -> Any:
    tag = value.get("__float__")
    is_float = len(value) == 1 and tag in ("NaN", "Infinity", "-Infinity")
    return float(tag) if is_float else value  # type: ignore[arg-type]


class Evaluator:
    """Process that evaluates templates or configs; started on demand, and again after it was stopped.

    Thread-safe; evaluations run one after the other.

    Args:
        kind: ``template`` renders chats; ``config`` builds a family's configuration.
    """

    def __init__(self, kind: _Kind, *, timeout_s: float | None = None) -> None:
        self._kind = kind
        self._timeout_s = _TIMEOUT_S[kind] if timeout_s is None else timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._owner = 0
        self._stops: Counter[str] = Counter()

    def begin(self) -> None:
        """Starts the process if it is not running, and does not wait for its imports."""
        with self._lock:
            self._running()

    def evaluate(self, source: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Evaluates a file; returns the result as JSON values.

        Args:
            source: The template, or the text of ``config.json``.
            arguments: Arguments of :func:`render`.

        Raises:
            ValueError: If it fails; the message has the reason.
            EvaluationStoppedError: If it exceeds the deadline or the memory limit.
        """
        with self._lock:
            if self._stops[source] >= _MAX_STOPS:
                raise EvaluationStoppedError(
                    f"its evaluation was stopped {_MAX_STOPS} times and is not tried again"
                )
            try:
                answer = self._ask(source, dict(arguments or {}))
            except (TimeoutError, EOFError, OSError) as error:
                self._stops[source] += 1
                self._stop()
                raise EvaluationStoppedError(str(error)) from error
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ask(self, source: str, arguments: dict[str, Any]) -> dict[str, Any]:
        process = self._started()
        request = json.dumps([source, arguments, self._timeout_s], default=str).encode()
        assert process.stdin is not None
        try:
            process.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
            process.stdin.flush()
            return self._answer(process, self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"its evaluation took longer than {self._timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            raise EOFError(
                f"its evaluation ended the process that ran it; the limits are {self._timeout_s:g} s and "
                f"{_MEMORY_BYTES >> 20} MiB"
            ) from error

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._running()
        if self._is_ready:
            return process
        try:
            self._answer(process, _START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self._stop()
            raise EOFError(
                f"the process that evaluates a model's {self._kind} did not start"
            ) from error
        self._is_ready = True
        return process

    def _running(self) -> subprocess.Popen[bytes]:
        # A fork of this process must not use its parent's pipes.
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._process, self._owner = _spawn(self._kind), os.getpid()
            self._is_ready = False
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        length = int.from_bytes(_read(process, _LENGTH_BYTES, deadline), "big")
        if length > _MAX_ANSWER_BYTES + 1024:
            raise EOFError("the answer is too long")
        answer: dict[str, Any] = json.loads(_read(process, length, deadline))
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # unwritten bytes are of no use
                continue


def _spawn(kind: _Kind) -> subprocess.Popen[bytes]:
    environment = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 -- the child's, without secrets
        if not name.startswith("SLIPSTREAM_")
    }
    environment["TRANSFORMERS_VERBOSITY"] = "error"  # otherwise it warns that torch is missing
    return subprocess.Popen(  # noqa: S603 -- this module
        module_command(__spec__.name, kind),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    """Reads ``size`` bytes from a process. Raises TimeoutError, or EOFError if it ends before."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    content = bytearray()
    while len(content) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError
        chunk = os.read(pipe, size - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


def render(
    template: str, *, printed_time: float | None = None, **arguments: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Renders a chat in this process, with a template that is known to terminate.

    Args:
        printed_time: Time that the template prints, in seconds since 1970 (UTC); None for the present one.
        arguments: Arguments of transformers' ``render_jinja_template``; one conversation.

    Returns:
        The text, and the character ranges that the template marks as generated.
    """
    from transformers.utils import chat_template_utils as chats

    # A template is compiled once. Its own globals precede those of the environment.
    names: Any = chats._compile_jinja_template(template).globals  # noqa: SLF001 -- the only way
    names.pop("strftime_now", None)
    if printed_time is not None:
        names["strftime_now"] = datetime.fromtimestamp(printed_time, UTC).strftime
    # transformers' annotation lists only the text.
    rendered: Any = chats.render_jinja_template(chat_template=template, **arguments)
    (text,), positions_of_texts = rendered
    return text, positions_of_texts[0] if positions_of_texts else []


CHATS: Final = Evaluator("template")
"""Renders the chats of this process."""
atexit.register(CHATS.close)


def main() -> None:
    """Runs the evaluating process: ``python -m services.common.models.evaluator KIND``."""
    requests: io.BufferedIOBase = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    evaluate = render if sys.argv[1] == "template" else _config()
    if evaluate is render:
        render("", conversations=[[]])  # imports the modules that rendering needs
    _write(answers, {"value": None})
    _limit_memory()
    while length := requests.read(_LENGTH_BYTES):
        request = requests.read(int.from_bytes(length, "big"))
        source, arguments, timeout_s = json.loads(request)
        # The client may have been killed, and nothing else would end this process.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)
        _write(answers, _result(evaluate, source, arguments))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _result(evaluate: Callable[..., Any], source: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = evaluate(source, **arguments)
        if len(json.dumps(value)) > _MAX_ANSWER_BYTES:
            return {"error": f"its result has more than {_MAX_ANSWER_BYTES >> 20} MiB of text"}
    except MemoryError:
        return {"error": f"its evaluation took more than {_MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 -- the file is untrusted
        text = " ".join(str(error).split())
        return {"error": (text or type(error).__name__)[:2000]}
    return {"value": value}


def _write(answers: io.BufferedIOBase, answer: dict[str, Any]) -> None:
    content = json.dumps(answer).encode()
    answers.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    answers.flush()


def _config() -> Callable[..., Any]:
    # No configuration needs torch, whose import would take most of the start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING["qwen2"]()  # imports the modules that all families need

    def make(text: str) -> None:
        config = parse_config(text)
        kind = config.get("model_type")
        if kind in CONFIG_MAPPING:
            CONFIG_MAPPING[kind].from_dict(config)

    return make


def _limit_memory() -> None:
    used_bytes = (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _MEMORY_BYTES, used_bytes + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
