"""Worker process that calls user code: one JSON request per line in, one JSON answer per line out.

Rewards and tools run only here: they may hang, crash or print without affecting the engine.
"""

import base64
import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from services.common.callables import describe_error, load_callable
from services.common.parent import die_with_parent, disconnect_forks


def main() -> None:
    """Answers requests until the input ends."""
    die_with_parent()
    # Answers use the original standard output; output of user code goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # User code that reads standard input must not wait for, or take, the next request.
    requests = os.fdopen(os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    disconnect_forks(answers.fileno(), requests.fileno())
    # One event loop for all calls: user code may keep a client with open connections. Most functions need
    # none, and asyncio is more than half of all imports.
    with ExitStack() as stack:
        runner = functools.cache(lambda: stack.enter_context(import_module("asyncio").Runner()))
        for line in requests:
            answers.write(_answer(json.loads(line), runner) + "\n")


def _answer(request: dict[str, Any], runner: Callable[[], Any]) -> str:
    """Calls the function that a request names; only loads it if there are no arguments."""
    try:
        function = _load(request["name"])
        if "arguments" not in request:
            return json.dumps({"value": None})
        value = function(*request["arguments"], **request["keywords"])
        if inspect.isawaitable(value):
            value = runner().run(_wait_for(value))
        return json.dumps({"value": value}, default=_plain)
    except BaseException as error:  # noqa: BLE001 -- the edge to user code: every fault becomes an answer
        kind = "timeout" if isinstance(error, TimeoutError) else "exception"
        return json.dumps({"error": describe_error(error), "kind": kind})


_load = functools.cache(load_callable)


async def _wait_for(value: Any) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """Converts numpy and torch values and iterators to numbers and lists, images to URLs, others to text."""
    if isinstance(value, Iterator):
        return list(value)
    if (url := image_url(value)) is not None:
        return url
    as_list = getattr(value, "tolist", None)
    if not callable(as_list):
        return repr(value)
    plain = as_list()
    while isinstance(plain, list) and len(plain) == 1:  # models return arrays of one number
        (plain,) = plain
    return plain


def image_url(value: Any) -> str | None:
    """Returns a Pillow image as a data URL; None for any other value."""
    pillow: Any = sys.modules.get("PIL.Image")  # only user code that has images imports Pillow
    if pillow is None or not isinstance(value, pillow.Image):
        return None
    buffer = io.BytesIO()
    value.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


if __name__ == "__main__":
    main()
