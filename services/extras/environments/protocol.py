"""Protocol between rollouts and environments, version 1: JSON over HTTP.

::

    GET    /healthz                                     -> 200
    GET    /v1                                          -> {"protocol": 1, "name", "version"}
    POST   /v1/episodes        {"task", "seed"}         -> {"episode", ...observation}
    POST   /v1/episodes/ID     {"step": n, "message"}   -> {"step": n, ...observation}
    DELETE /v1/episodes/ID                              -> {"reward", "metrics"}

A message is the policy's reply with ``role``, ``content`` and any ``tool_calls``. An observation is
``{"messages", "tools", "done", "reward", "metrics"}``. If the run has sandboxes, a new episode also gets
``"sandbox": {"url", "key"}``. Status 429 and 503 ask the client to retry later. A repeated step gets the
answer that it got before.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.rollout.calls.worker import image_url
from services.rollout.failures import CallError

PROTOCOL: Final = 1
MAX_ANSWER_BYTES: Final = 16 << 20
"""Max size of one answer of an environment, which may have images."""
FIRST_DELAY_S, MAX_DELAY_S = 0.05, 2.0
"""Arguments of ``delays`` for repeated requests to environments."""
_KEYS: Final = frozenset({"messages", "tools", "done", "reward", "metrics"})
_ROLES: Final = frozenset({"system", "user", "tool"})
Message = Mapping[str, Any]
"""``role``, ``content`` and, for a tool's result, ``tool_call_id`` and ``name``. The content is text, or a
list of parts ``{type: text, text}`` and ``{type: image, image: URL}``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Answer of an environment."""

    messages: tuple[Message, ...] = ()
    """Messages that the policy sees next."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools that the policy may call from here on, in the format of OpenAI's API; None keeps the tools."""
    is_done: bool = False
    """True if the episode is over."""
    reward: Mapping[str, float] = field(default_factory=dict)
    """Named reward terms of this step; the terms of all steps are added up."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are only recorded; the last value of each counts."""


def parse_observation(answer: object, *, source: str) -> Observation:
    """Parses an answer: a mapping, or a text that stands for one message of the role ``user``.

    Args:
        source: Name of the sender in error messages.

    Raises:
        CallError: ``invalid_value`` with the faulty key and value.
    """
    # Imported here, because hosts of environments, which only answer, start twice as fast without it.
    from services.rollout.rewards.base import named_numbers

    if isinstance(answer, str):
        answer = {"messages": answer}
    if not isinstance(answer, Mapping):
        raise _wrong(source, "an answer", "an object or text", answer)
    if unknown := sorted(map(str, set(answer) - _KEYS)):
        raise _wrong(source, "an answer", f"the keys {', '.join(sorted(_KEYS))}", unknown)
    is_done, tools = answer.get("done", False), answer.get("tools")
    if not isinstance(is_done, bool):
        raise _wrong(source, "done", "true or false", is_done)
    if tools is not None and not (_is_list(tools) and all(isinstance(t, Mapping) for t in tools)):
        raise _wrong(source, "tools", "a list of objects", tools)
    observation = Observation(
        messages=_messages(answer.get("messages", ()), source),
        tools=None if tools is None else tuple(tools),
        is_done=is_done,
        reward=named_numbers(answer.get("reward"), subject="reward", source=source),
        metrics=named_numbers(answer.get("metrics"), subject="metrics", source=source),
    )
    if not is_done and not observation.messages:
        raise _wrong(source, "messages", "at least one message until the episode ends", "none")
    return observation


def parse_end(answer: object, *, source: str) -> Observation:
    """Parses the answer to the end of an episode, which has only reward and metrics. Raises CallError."""
    names = {"reward", "metrics"}
    if not isinstance(answer, Mapping) or set(answer) - names:
        raise _wrong(source, "an end", "an object with reward and metrics", answer)
    return parse_observation({**answer, "done": True}, source=source)


def as_json(answer: object) -> bytes:
    """Returns an answer as JSON, with Pillow images as data URLs and values of NumPy and torch as numbers.

    Raises:
        ValueError: If a number is not finite, or a text has a lone surrogate.
        TypeError: If it has another value that JSON cannot represent.
    """
    text = json.dumps(answer, allow_nan=False, ensure_ascii=False, default=_plain)
    return text.encode()


def _plain(value: object) -> object:
    if (url := image_url(value)) is not None:
        return url
    as_list = getattr(value, "tolist", None)  # of NumPy and torch, scalars included
    if not callable(as_list):
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    return as_list()


def _messages(value: object, source: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not _is_list(value):
        raise _wrong(source, "messages", "text or a list of messages", value)
    assert isinstance(value, Sequence)
    for message in value:
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in _ROLES
            or not (isinstance(message.get("content"), str) or _is_list(message.get("content")))
        ):
            roles = ", ".join(sorted(_ROLES))
            form = f"a role ({roles}), and text or a list of parts as content"
            raise _wrong(source, "a message", form, message)
    return tuple(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _wrong(source: str, name: str, form: str, came: object) -> CallError:
    return CallError("invalid_value", f"{source}: {name} must be {form}, got {came!r:.200}")
