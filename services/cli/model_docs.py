"""Writes ``docs/models.md``: which model families do what, from the table that the code uses."""

from services.common.models.families import COMPARED, FAMILIES

_HEAD = """# Models

Written by `make docs` from `services/common/models/families.py`.

A family is accepted because tests compare it with its own forward and backward pass, to 1e-5 in float32:
packed training (`tests/unit/trainer/test_families.py`), the torch engine's decoding
(`tests/unit/rollout/test_torch.py`), divided layers (`tests/integration/test_family_ranks.py`) and packs that
ranks share (`trainer.context_parallel`, `tests/integration/test_context_ranks.py`).
`slipstream validate` judges a model by its `config.json`, before anything is loaded: layers of another kind
than full or sliding attention, and rotary frequencies that depend on the longest sequence of a batch
(`dynamic`, `longrope`), are refused. Windows, capped scores and logits, and scales of logits are computed.

[Mixtures of experts](mixtures.md) are trained with all experts on every rank or with
`trainer.expert_parallel` (`tests/integration/test_expert_ranks.py`).

vLLM and SGLang are "compared" where `make test-families` (`tests/engines/test_families.py`) has sent two
versions of a tiny model's weights to the engine on a CPU, and its logprobs of prompts and responses were the
trainer's, to a mean of 1e-5 in float32 and 5e-3 in bfloat16. Others may well be served: nothing refuses them.

| `model_type` | trainer | torch engine | vLLM | SGLang | tensor parallel | expert parallel |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    """Print the page."""
    rows = []
    for name, family in FAMILIES.items():
        engines = [
            "compared" if name in COMPARED[engine] else "not compared"
            for engine in ("vllm", "sglang")
        ]
        divided = "yes" if family.tensor_parallel else "no"
        experts = "no experts" if family.routing is None else "yes"
        words = ["yes", "yes", *engines, divided, experts]
        rows.append(f"| `{name}` | {' | '.join(words)} |")
    print(_HEAD + "\n".join(rows))  # noqa: T201


if __name__ == "__main__":
    main()
