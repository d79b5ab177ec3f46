"""Families of models whose logprobs in vLLM and SGLang ``make test-families`` compares with the trainer's."""

from collections.abc import Mapping

COMPARED: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        *("llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "olmo2", "olmo3", "glm"),
        *("glm4", "smollm3", "starcoder2", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "exaone4"),
        *("gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "granite", "falcon_h1"),
        *("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"),
    ),
    "sglang": (
        *("llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "olmo2", "olmo3", "glm4"),
        *("starcoder2", "seed_oss", "gemma2", "gemma3_text", "cohere", "cohere2", "granite"),
        *("qwen3_moe", "mixtral", "glm4_moe"),
    ),
}
"""Families whose logprobs in an engine equal the trainer's on a CPU; ``make test-families`` checks it."""

COMPARED_ROUNDED: Mapping[str, tuple[str, ...]] = {
    "vllm": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    "sglang": (),
}
"""Families that are compared in bfloat16 only, because an engine's kernels for CPUs refuse float32."""

TELLS_NOT: Mapping[str, tuple[str, ...]] = {"vllm": ("deepseek_v3",), "sglang": ("mixtral",)}
"""Compared mixtures whose experts an engine does not report on a CPU, by engine.

vLLM reports them only with prefix caching, which it lacks on a CPU for this family; SGLang exits.
"""

UNEQUAL: Mapping[str, Mapping[str, str]] = {
    "vllm": {},
    "sglang": {
        "gemma": "its loader adds 1 to norms, which transferred weights would bypass, and its GELU differs",
        "glm": "served through transformers, whose tensor-parallel plan is not supported",
        "smollm3": "served through transformers, whose tensor-parallel plan is not supported",
        "ernie4_5": "served through transformers, whose tensor-parallel plan is not supported",
        "hunyuan_v1_dense": "has no norms of queries and keys",
        "exaone4": "needs attention kernels that require a GPU",
        "qwen2_moe": "needs Triton",
        "deepseek_v3": "does not start on a CPU",
        "gpt_oss": "needs attention kernels that require a GPU",
    },
}
"""Families that failed the comparison in an engine on a CPU, with the reason."""
