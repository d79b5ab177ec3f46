"""Models of Hugging Face: whether a run needs the hub, and whether the hub answers."""

import threading
import time
import urllib.error
import urllib.request
from typing import Any

from services.common.models.configs import is_folder, missing_folder
from services.common.models.made_tokenizers import is_builtin_tokenizer, tokenizer_name
from services.common.runspec.run import RunSpec

_REACH_TIMEOUT_S = 2.0
# Seconds for which an answer of the hub counts, also for forks: checks of one command ask once.
_FRESH_S = 60.0
_answered_at: dict[str, float] = {}


def model_config(spec: RunSpec) -> Any:
    """Returns the model's configuration, from Hugging Face if the model is there."""
    from services.common.models.loading import load_config
    from services.common.models.tokenizer import load_tokenizer

    if hub_is_needed(spec):
        go_offline_unless_reachable()
    return load_config(spec.model, load_tokenizer(spec.model))


def hub_is_needed(spec: RunSpec) -> bool:
    """Returns True if a model, a tokenizer or data comes from Hugging Face."""
    for model in (spec.model, spec.of_reference.model):
        name = tokenizer_name(model)
        if not (is_builtin_tokenizer(name) or is_folder(name) or missing_folder(name)):
            return True
        if not (model.is_tiny or is_folder(model.path) or missing_folder(model.path)):
            return True
    return any(source.source == "huggingface" for source in spec.data.sets.values())


def go_offline_unless_reachable() -> bool:
    """Restricts Hugging Face's libraries to their cache if the hub does not answer within two seconds.

    They would otherwise retry for most of a minute, for every file.

    Returns:
        True if the hub answered.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if time.monotonic() - _answered_at.get(constants.ENDPOINT, -_FRESH_S) < _FRESH_S:
        return True
    is_reachable = threading.Event()
    # Name resolution itself has no time-out.
    threading.Thread(target=_probe, args=(constants.ENDPOINT, is_reachable), daemon=True).start()
    if is_reachable.wait(_REACH_TIMEOUT_S):
        _answered_at[constants.ENDPOINT] = time.monotonic()
        return True
    constants.HF_HUB_OFFLINE = True
    return False


def _probe(url: str, is_reachable: threading.Event) -> None:
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 -- the user's own endpoint
        with urllib.request.urlopen(request, timeout=_REACH_TIMEOUT_S):  # noqa: S310
            is_reachable.set()
    except urllib.error.HTTPError:
        is_reachable.set()
    except (OSError, ValueError):
        return
