"""Tensor lists of real models, from their published configurations; weights are random."""

from dataclasses import dataclass

from services.weightsync.weight_plan import TensorSpec


@dataclass(frozen=True)
class Qwen2Shape:
    """Dimensions of a Qwen2 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 151_936

    def tensors(self, dtype: str) -> list[TensorSpec]:
        """Returns all parameters with their Hugging Face names, tied ones once."""
        head = self.hidden // self.heads
        kv = self.kv_heads * head
        specs = [("model.embed_tokens.weight", (self.vocab, self.hidden))]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            specs += [
                (prefix + "self_attn.q_proj.weight", (self.hidden, self.hidden)),
                (prefix + "self_attn.q_proj.bias", (self.hidden,)),
                (prefix + "self_attn.k_proj.weight", (kv, self.hidden)),
                (prefix + "self_attn.k_proj.bias", (kv,)),
                (prefix + "self_attn.v_proj.weight", (kv, self.hidden)),
                (prefix + "self_attn.v_proj.bias", (kv,)),
                (prefix + "self_attn.o_proj.weight", (self.hidden, self.hidden)),
                (prefix + "mlp.gate_proj.weight", (self.intermediate, self.hidden)),
                (prefix + "mlp.up_proj.weight", (self.intermediate, self.hidden)),
                (prefix + "mlp.down_proj.weight", (self.hidden, self.intermediate)),
                (prefix + "input_layernorm.weight", (self.hidden,)),
                (prefix + "post_attention_layernorm.weight", (self.hidden,)),
            ]
        specs.append(("model.norm.weight", (self.hidden,)))
        return [TensorSpec(name, shape, dtype) for name, shape in specs]


SHAPES = {
    "qwen2.5-3b": Qwen2Shape(2048, 36, 16, 2, 11008),
    "qwen2.5-1.5b": Qwen2Shape(1536, 28, 12, 2, 8960),
    "qwen2.5-0.5b": Qwen2Shape(896, 24, 14, 2, 4864),
    "250m": Qwen2Shape(1024, 12, 16, 4, 4096, vocab=65_536),
    "smoke": Qwen2Shape(256, 4, 4, 2, 512, vocab=4096),
}
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def fused_name(name: str) -> str:
    """Returns the name of the engine's parameter that contains a tensor."""
    for module, fused_module in _FUSED.items():
        name = name.replace(f".{module}.", f".{fused_module}.")
    return name
