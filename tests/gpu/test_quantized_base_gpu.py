"""LoRA on a quantized base on a GPU: the same bits as on a CPU, and runs whose rollouts verify the base."""

import json
from pathlib import Path

import pytest
import torch

from services.common.models.loading import build_model, load_config
from services.common.models.quantization import BaseDtype, dequantize, quantize
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.trainer.model.quantized import QuantizedLinear
from tests.helpers.gpu_runs import train_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_quantizes_to_the_bits_of_a_cpu(kind: BaseDtype, dtype: torch.dtype) -> None:
    weight = torch.randn(1000, 3001, dtype=dtype)
    values, scales = quantize(weight, kind)
    on_gpu = quantize(weight.cuda(), kind)
    assert torch.equal(on_gpu[0].cpu(), values)
    assert torch.equal(on_gpu[1].cpu(), scales)
    shape = tuple(weight.shape)
    assert torch.equal(dequantize(*on_gpu, shape).cpu(), dequantize(values, scales, shape))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_compiled_layer_multiplies_by_its_rounded_weight(kind: BaseDtype) -> None:
    plain = torch.nn.Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    layer = QuantizedLinear(plain, kind, dtype=torch.bfloat16)
    inputs = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = torch.compile(layer)(inputs)
    weight = layer.weight.double()
    torch.testing.assert_close(output.double(), inputs.double() @ weight.T, rtol=2e-2, atol=2e-2)
    output.backward(torch.ones_like(output))
    assert inputs.grad is not None
    expected = weight.sum(0).expand_as(inputs)
    torch.testing.assert_close(inputs.grad.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_run_trains_adapters_on_a_quantized_base(
    tmp_path: Path, engine: str, kind: BaseDtype
) -> None:
    folder = tmp_path / "model"
    spec = ModelSpec(path="tiny:qwen2-3m", tokenizer="chars:0123456789=")
    tokenizer = load_tokenizer(spec)
    config = load_config(spec, tokenizer)
    build_model(config, dtype=torch.bfloat16, device="cpu").save_pretrained(folder)
    tokenizer.save(folder)
    settings = (
        f"model.path={folder}",
        "model.tokenizer=null",
        "model.warm_start=null",
        f"trainer.lora={{rank: 8, base_dtype: {kind}}}",
        "trainer.steps=4",
        "trainer.compile=true",
        "validation.every=0",
    )
    finished = train_on_gpus(tmp_path, engine, *settings, timeout=500)
    assert finished.summary["state"] == "SUCCEEDED"
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["rollout_logprob_abs_diff"] for line in lines) < 0.05
