"""Adapts a model's ``config.json`` for vLLM and SGLang."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig


def engine_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration with which external engines compute the same as the model.

    Only Cohere 2 differs: engines do not count the current token in a sliding window.
    """
    if config.model_type != "cohere2":
        return config
    config = deepcopy(config)
    config.sliding_window -= 1
    return config


def write_sglang_config(config: PretrainedConfig, folder: str) -> None:
    """Writes the ``config.json`` for SGLang into a folder.

    It has no end-of-text token: each request names its stop tokens, and the model's must not apply as well.
    """
    content = json.loads(engine_config(config).to_json_string())
    content["eos_token_id"] = None
    if config.model_type == "olmo3":
        content |= _rotary(content)
    Path(folder, "config.json").write_text(json.dumps(content), encoding="utf-8")


def _rotary(content: dict[str, Any]) -> dict[str, Any]:
    """Returns Olmo 3's rotary settings in the form of its checkpoints; SGLang scales only full attention.

    SGLang ignores settings given by layer type and would use another base.
    """
    by_kind = content.get("rope_parameters") or {}
    full, window = (dict(by_kind.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    base = full.pop("rope_theta", None)
    if window != {"rope_type": "default", "rope_theta": base}:
        return {}
    scaling = None if full == {"rope_type": "default"} else full
    return {"rope_parameters": None, "rope_theta": base, "rope_scaling": scaling}
