"""The ``config.json`` that vLLM and SGLang read."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig


def engine_config(config: PretrainedConfig) -> PretrainedConfig:
    """A model's configuration that has an engine compute what the model does.

    In Cohere 2's windows, engines do not count the token itself.
    """
    if config.model_type != "cohere2":
        return config
    config = deepcopy(config)
    config.sliding_window -= 1
    return config


def write_sglang_config(config: PretrainedConfig, folder: str) -> None:
    """Write SGLang's into a folder.

    What ends a response is said in each request, so the model's own end tokens must not.
    """
    content = json.loads(engine_config(config).to_json_string())
    content["eos_token_id"] = None
    if config.model_type == "olmo3":
        content |= _rotary(content)
    Path(folder, "config.json").write_text(json.dumps(content), encoding="utf-8")


def _rotary(content: dict[str, Any]) -> dict[str, Any]:
    """Olmo 3's rotary embeddings in the form of its checkpoints, which SGLang scales in full attention only.

    It does not see those that are named by the kind of layer, and would take another base.
    """
    by_kind = content.get("rope_parameters") or {}
    full, window = (dict(by_kind.get(f"{kind}_attention") or {}) for kind in ("full", "sliding"))
    base = full.pop("rope_theta", None)
    if window != {"rope_type": "default", "rope_theta": base}:
        return {}
    scaling = None if full == {"rope_type": "default"} else full
    return {"rope_parameters": None, "rope_theta": base, "rope_scaling": scaling}
