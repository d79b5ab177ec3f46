"""Generates the table of model families and their support, from the table that the code uses."""

from collections.abc import Iterator

from services.common.models.families import COMPARED, FAMILIES, TELLS_NOT, UNEQUAL, WINDOWED, Family

_HEAD = """# Models

Written by `make docs` from `services/common/models/families.py`.

A family is accepted because tests compare it with its own forward and backward pass, to 1e-5 in float32:
packed training, and with adapters of attention (`tests/unit/trainer/test_families.py`), the torch engine's
decoding (`tests/unit/rollout/test_torch.py`), divided layers (`tests/integration/test_family_ranks.py`) and
packs that ranks share (`trainer.context_parallel`, `tests/integration/test_context_ranks.py`).
`slipstream validate` judges a model by its `config.json`, before anything is loaded: layers of another kind
than full or sliding attention, and rotary frequencies that depend on the longest sequence of a batch
(`dynamic` without HunYuan's `alpha`, `longrope`), are refused. Windows, capped scores and logits, and scales
of logits are computed. It also reads the heads of the weight files: what is missing, cut off, of another
kind or quantized is named. Weights that a folder lacks, or has in another shape, end a run before it trains.

Where a family's attention is not made of `q_proj`, `k_proj`, `v_proj` and `o_proj`, the column LoRA has
what `trainer.lora.target_modules` must name. The weight plane sends every family under the names that its
checkpoints have.

[Mixtures of experts](mixtures.md) are trained with all experts on every rank or with
`trainer.expert_parallel` (`tests/integration/test_expert_ranks.py`).

vLLM and SGLang are "compared" where `make test-families` (`tests/engines/test_families.py`) has sent five
versions of a tiny model's weights to the engine on a CPU, and its logprobs of prompts and responses were the
trainer's, to a mean of 1e-5 in float32 and 5e-3 in bfloat16; those of the same weights, sent before and after
others, were equal bit for bit. Where the last column names an engine, its
experts were the trainer's too ([replay](mixtures.md#routing-replay)). "no" did not pass there, for the
reason [below](#what-did-not-pass). Others may well be served: nothing refuses them.

SGLang computes the sliding windows of {windowed} only (those
that did not pass below, by its source and not by a test). With other models its context ends
where the window does, and `slipstream validate` refuses longer prompts and responses.

| `model_type` | trainer | torch | vLLM | SGLang | LoRA | tensor parallel | expert parallel | routing replay |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
_UNEQUAL = """
## What did not pass
vLLM 0.32 and SGLang 0.5.21 with tiny models on a CPU. On GPUs they have other kernels; every run compares
logprobs of its own model before it samples.

| engine | `model_type` | why |
| --- | --- | --- |
"""
_ENGINES = {"torch": "torch", "vllm": "vLLM", "sglang": "SGLang"}


def page() -> str:
    """Returns the page: a row for each family, and the reasons why engines did not pass."""
    rows = []
    for name, family in FAMILIES.items():
        divided = "yes" if family.tensor_parallel else "no"
        experts = "no experts" if family.routing is None else "yes"
        engines = [_compared(engine, name) for engine in COMPARED]
        told = "no experts" if family.routing is None else ", ".join(_telling(name))
        words = ["yes", "yes", *engines, _adapted(family), divided, experts, told]
        rows.append(f"| `{name}` | {' | '.join(words)} |")
    failed = [
        f"| {_ENGINES[engine]} | `{name}` | {why} |"
        for engine, families in UNEQUAL.items()
        for name, why in families.items()
    ]
    windowed = ", ".join(f"`{name}`" for name in WINDOWED["sglang"])
    return _HEAD.format(windowed=windowed) + "\n".join([*rows, _UNEQUAL.rstrip("\n"), *failed, ""])


def _adapted(family: Family) -> str:
    if family.attention_modules == Family().attention_modules:
        return "yes"
    return f"yes: {', '.join(f'`{name}`' for name in family.attention_modules)}"


def _compared(engine: str, family: str) -> str:
    if family in COMPARED[engine]:
        return "compared"
    return "no" if family in UNEQUAL[engine] else "not compared"


def _telling(family: str) -> Iterator[str]:
    """Yields the engines that report the experts of a mixture."""
    yield _ENGINES["torch"]
    for engine, families in COMPARED.items():
        if family in families and family not in TELLS_NOT[engine]:
            yield _ENGINES[engine]
