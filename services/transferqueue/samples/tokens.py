"""Converts token columns from the data plane's bytes to the API's JSON."""

import math
from array import array
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

_DIGITS = 5
# Avoids overflow; a larger ratio means nothing.
_MAX_LOG_RATIO = 80.0


def token_columns(columns: Mapping[str, bytes], vocabulary: Mapping[str, str]) -> dict[str, Any]:
    """Returns columns with one entry per token of a response.

    Args:
        columns: Little-endian values by field: ``response_ids`` and ``version_runs`` int32,
            ``rollout_logprobs`` float32; after training also ``advantages`` and
            ``trained_logprobs`` float32, and ``loss_mask`` one byte each.
        vocabulary: Text of each token that occurs, by its id.
    """
    ids = _values("i", columns["response_ids"])
    logprobs = _values("f", columns["rollout_logprobs"])
    runs = _values("i", columns["version_runs"])
    pairs = zip(runs[::2], runs[1::2], strict=True)
    versions = list(chain.from_iterable(repeat(version, count) for version, count in pairs))
    shown: dict[str, Any] = {
        "ids": ids,
        "texts": [vocabulary.get(str(token), "") for token in ids],
        "logprobs": _rounded(logprobs),
        "weight_versions": versions,
    }
    if "trained_logprobs" in columns:
        trained = _values("f", columns["trained_logprobs"])
        shown |= {
            "is_trained": [byte != 0 for byte in columns["loss_mask"]],
            "advantages": _rounded(_values("f", columns["advantages"])),
            "trained_logprobs": _rounded(trained),
            "ratios": [
                round(math.exp(min(after - before, _MAX_LOG_RATIO)), _DIGITS)
                if version >= 0
                else 1.0
                for after, before, version in zip(trained, logprobs, versions, strict=True)
            ],
        }
    return shown


def _values(code: str, data: bytes) -> list[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return values.tolist()


def _rounded(values: list[float]) -> list[float | None]:
    """Rounds values; None replaces values that are not finite, which JSON cannot express."""
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in values]
