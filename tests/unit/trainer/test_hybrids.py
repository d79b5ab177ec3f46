"""Hybrid models: random packs with and without shared prefixes, compared with single sequences."""

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from services.common.models.configs import read_config
from services.common.models.families import FAMILIES, check_trainer, recurrent_shape
from services.common.models.loading import build_model, load_folder, stored_tensors
from services.common.models.weight_files import stored_names
from services.common.runspec.run import ModelSpec
from services.common.runspec.trainer import LoraSpec
from services.trainer.batch import recurrence
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.build import fill
from services.trainer.engines.fsdp.lora import add_adapters
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU
from tests.helpers.mixtures import tiny_config
from tests.helpers.tries import random_trie

_HYBRIDS = [name for name, family in FAMILIES.items() if family.recurrent is not None]


@pytest.mark.parametrize("num_packs", [4, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", _HYBRIDS)
@pytest.mark.timeout(1800)
def test_packed_logprobs_and_gradients_are_those_of_single_sequences(
    family: str, num_packs: int
) -> None:
    worst = [0.0, 0.0]
    for seed in range(num_packs):
        rng = random.Random(seed)
        model = build_model(_config(family, rng), dtype=torch.float32, device="cpu", seed=seed)
        # Sequences are shorter or longer than a chunk of the recurrent layer.
        longest = rng.choice((4, 24, 80))
        rows = random_trie(rng, vocabulary=61, most_samples=6, longest=longest)
        factors = torch.randn(len(rows[1].values), generator=torch.Generator().manual_seed(seed))
        weights = list(model.parameters())
        single_logprobs = [
            _own(model, *row) for row in zip(*(columns.unbind() for columns in rows), strict=True)
        ]
        expected = torch.cat(single_logprobs)
        expected_gradient = _gradient(expected @ factors, weights)

        packed = pack(*rows, device=CPU, shares_prefixes=seed % 2 == 1)
        actual, _ = Policy(model, temperature=1.0)(packed)
        gradient = _gradient(actual @ factors, weights)

        difference = (actual - expected).detach().abs().max()
        error = (gradient - expected_gradient).norm() / expected_gradient.norm()
        worst = [max(worst[0], float(difference)), max(worst[1], float(error))]
        assert difference <= 1e-5, f"seed {seed}"
        assert error <= 1e-5, f"seed {seed}"
    print(f"{family}: logprobs {worst[0]:.1e}, gradients {worst[1]:.1e} over {num_packs} packs")


def _rule_of_sequences(*states: Tensor, cu_seqlens: Tensor, **gates: Any) -> tuple[Tensor, None]:
    """Computes the gated delta rule of each sequence of a pack separately."""
    flags = {name: gates.pop(name) for name in ("use_qk_l2norm_in_kernel",)}
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(tensor.split(lengths, 1) for tensor in (*states, *gates.values())), strict=True)
    outputs = [
        torch_chunk_gated_delta_rule(
            *states_of_one[:3], **dict(zip(gates, states_of_one[3:], strict=True)), **flags
        )
        for states_of_one in parts
    ]
    return torch.cat([output for output, _ in outputs], 1), None


@pytest.mark.parametrize("num_packs", [4, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", [name for name in _HYBRIDS if name != "falcon_h1"])
@pytest.mark.timeout(1800)
def test_kernels_for_whole_packs_get_sequences_that_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, family: str, num_packs: int
) -> None:
    monkeypatch.setattr(recurrence, "computes_packs", lambda _: True)
    monkeypatch.setattr(recurrence, "delta_rule", lambda: _rule_of_sequences)
    test_packed_logprobs_and_gradients_are_those_of_single_sequences(family, num_packs)


@pytest.mark.parametrize("family", _HYBRIDS)
def test_lengths_around_the_sizes_of_kernels_and_chunks_are_exact(family: str) -> None:
    """Convolutions see 4 tokens; chunks have 64 tokens in gated delta nets and 16 in these mixers."""
    model = build_model(
        tiny_config(family, initializer_range=0.05, max_position_embeddings=512),
        dtype=torch.float32,
        device="cpu",
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    lengths = (2, 3, 4, 5, 6, 15, 16, 17, 18, 31, 33, 63, 64, 65, 66, 127, 129)
    texts = [torch.randint(3, 61, (length,), generator=generator) for length in lengths]
    expected = torch.cat([_own(model, text[:1], text[1:]) for text in texts])
    factors = torch.randn(len(expected), generator=generator)
    weights = list(model.parameters())
    expected_gradient = _gradient(expected @ factors, weights)

    rows = (Jagged.from_list([text[cut] for text in texts]) for cut in (slice(1), slice(1, None)))
    actual, _ = Policy(model, temperature=1.0)(pack(*rows, device=CPU))
    gradient = _gradient(actual @ factors, weights)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multipliers_of_mixers_have_values_and_the_dtype_of_the_pass(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    config = tiny_config("falcon_h1")
    model = build_model(config, dtype=dtype, device="cpu", seed=0)
    model.save_pretrained(tmp_path)
    policy = Policy(build_model(config, dtype=torch.float32, device="meta"), temperature=1.0)
    fill(policy, tmp_path, device=CPU)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)  # the dtype of a pass with mixed precision
    rows = random_trie(random.Random(0), vocabulary=61, most_samples=6, longest=24)
    packed = pack(*rows, device=CPU)
    assert torch.equal(policy(packed)[0], Policy(model, temperature=1.0)(packed)[0])


def test_a_saved_state_space_model_is_loaded_again(tmp_path: Path) -> None:
    model = build_model(tiny_config("falcon_h1"), dtype=torch.float32, device="cpu", seed=0)
    model.save_pretrained(tmp_path)
    assert check_trainer(read_config(ModelSpec(path=str(tmp_path)), None)) == []
    loaded = load_folder(tmp_path, dtype=torch.float32, device="cpu")
    assert loaded.config.time_step_limit == model.config.time_step_limit == (0.0, math.inf)
    saved_tensors = stored_tensors(model)
    for name, value in stored_tensors(loaded).items():
        assert torch.equal(value, saved_tensors[name]), name
    assert stored_names(tmp_path) == set(saved_tensors)


@pytest.mark.parametrize("family", _HYBRIDS)
def test_sizes_of_recurrent_layers_are_those_of_their_modules(family: str) -> None:
    config = tiny_config(family)
    model = build_model(config, dtype=torch.float32, device="cpu")
    shape, name = recurrent_shape(config.to_dict()), FAMILIES[family].recurrent
    assert shape is not None
    modules: list[Any] = [
        module for path, module in model.named_modules() if path.rpartition(".")[2] == name
    ]
    assert len(modules) == shape.num_layers
    cache = DynamicCache(config=config)
    model(torch.arange(3, 9)[None], past_key_values=cache, use_cache=True)
    for module in modules:
        assert module.conv1d.weight.shape[0] == shape.channels
        assert module.out_proj.in_features == shape.width
        assert cache.get_recurrent_state(module.layer_idx).numel() == shape.state


def test_adapters_that_kernels_would_ignore_are_refused() -> None:
    for family, ignored in (("falcon_h1", "out_proj"), ("qwen3_5_text", "conv1d")):
        model = build_model(tiny_config(family), dtype=torch.float32, device="meta")
        with pytest.raises(ValueError, match=rf"trainer\.lora\.target_modules .*{ignored}"):
            add_adapters(model, LoraSpec(target_modules=("q_proj", ignored)))


def _config(family: str, rng: random.Random) -> Any:
    further: dict[str, Any] = {}
    if family == "qwen3_next":
        further["num_experts"] = rng.choice((0, 8))
    if family == "falcon_h1":
        further |= {
            "mamba_rms_norm": rng.choice((True, False)),
            "mamba_norm_before_gate": False,
            "mamba_d_conv": rng.choice((2, 4)),
            "mamba_n_groups": rng.choice((1, 3)),
            "mamba_chunk_size": rng.choice((8, 64)),
        }
    else:
        further["full_attention_interval"] = rng.choice((2, 4))
        further["linear_num_value_heads"] = rng.choice((2, 4))
    return tiny_config(
        family,
        **further,
        num_hidden_layers=4,
        initializer_range=0.05,
        max_position_embeddings=512,
    )


def _own(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, response[:, None]).squeeze(1)


def _gradient(total: Tensor, weights: list[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(total, weights, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_kernels_that_cannot_be_imported_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    recurrence.delta_rule.cache_clear()
    try:
        assert recurrence.delta_rule() is None
    finally:
        recurrence.delta_rule.cache_clear()
    (record,) = caplog.records
    assert "slipstream[linear-attention]" in record.message
    assert "fla" in getattr(record, "error", "")
