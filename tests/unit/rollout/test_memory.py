"""Tests of the memory plan of each GPU, and of the rejection of runs that do not fit."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from services.common.memory.rollout import (
    MemoryPlan,
    WeightPlane,
    engine_share,
    other_workers_bytes,
    plan_memory,
    plan_of,
)
from services.common.memory.sizes import ModelSize, required_kv_tokens
from services.common.memory.trainer import (
    ROOM,
    compiles_asleep,
    resident_memory,
    state_memory,
    trainer_memory,
)
from services.common.runspec.engines import ENGINES
from services.common.runspec.run import RunSpec
from services.extras.handle import transport as handle
from tests.helpers.configs import qwen_7b
from tests.helpers.specs import spec_with

GB = 10**9
VLLM = ENGINES["vllm"]
BF16 = spec_with(trainer={"dtype": "bfloat16"})


def llama_70b() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def planned(
    model: ModelSize, *, gpu_gb: float = 80, sources: int = 1, copies: int = 1, **arguments: Any
) -> MemoryPlan:
    plane = WeightPlane(num_copies=copies, num_sources=sources, bucket_bytes=512 << 20)
    return plan_memory(model, plane, gpu_bytes=int(gpu_gb * GB), kind=VLLM, arguments=arguments)


def test_7b_fits_on_one_gpu_of_80_gb_with_its_shadow() -> None:
    size = ModelSize.of(qwen_7b(), BF16)
    assert size.weights == 2 * 7_615_616_512
    assert size.kv_per_token == 2 * 2 * 28 * 4 * 128
    plan = planned(size)
    assert plan.weights == plan.shadow == size.weights
    # vLLM's default of 0.9 would leave 8 GB for a shadow of 15.2 GB.
    assert engine_share(plan, VLLM, {}) == {"gpu_memory_utilization": 0.75}
    assert plan.kv_tokens > 500_000
    assert plan.used <= 0.97 * plan.total
    plan.check(most_tokens=32_768)


def test_70b_fits_on_eight_gpus_and_not_on_four() -> None:
    size = ModelSize.of(llama_70b(), BF16)
    plan = planned(size, sources=8, tensor_parallel_size=8)
    assert plan.weights == plan.shadow == size.weights / 8
    plan.check(most_tokens=32_768)
    assert plan.kv_tokens > 500_000
    with pytest.raises(ValueError, match=r"has 80.0 GB, but 8\d\.\d GB are needed .* 32768 tokens"):
        planned(size, sources=8, tensor_parallel_size=4).check(most_tokens=32_768)


def test_quantized_weights_and_cache_take_half_the_memory() -> None:
    quantized = spec_with(
        trainer={"dtype": "bfloat16"},
        rollout={"engine": "vllm", "quantization": "fp8", "kv_cache_dtype": "fp8"},
    )
    whole, half = ModelSize.of(qwen_7b(), BF16), ModelSize.of(qwen_7b(), quantized)
    # Quantization does not change the dtype of the embeddings and the output layer.
    outer = 2 * 2 * 152_064 * 3584
    assert half.weights == pytest.approx((whole.weights - outer) / 2 + outer, rel=1e-3)
    assert half.kv_per_token * 2 == whole.kv_per_token
    plan = planned(half)
    assert plan.shadow == planned(whole).shadow == whole.weights
    layer = 2 * 2 * 18_944 * 3584
    assert plan.slots == planned(whole).slots + 4 * layer
    all_exact = quantized.rollout.model_copy(update={"unquantized_layers": 28})
    exact = quantized.model_copy(update={"rollout": all_exact})
    assert ModelSize.of(qwen_7b(), exact).weights == whole.weights
    rounding = spec_with(
        trainer={"dtype": "bfloat16"}, rollout={"engine": "torch", "quantization": "fp8"}
    )
    assert ModelSize.of(qwen_7b(), rounding) == whole


def test_a_shadow_that_does_not_fit_falls_back_to_inplace() -> None:
    small = ModelSize(weights=50 * GB, sent_weights=50 * GB, kv_per_token=1000, num_kv_heads=8)
    with pytest.raises(ValueError, match=r"shadow +50\.0 GB"):
        planned(small).check(most_tokens=1000)
    planned(small, copies=0).check(most_tokens=1000)


def test_replicas_hold_all_weights_and_stages_their_layers() -> None:
    size = ModelSize(weights=8 * GB, sent_weights=8 * GB, kv_per_token=8000, num_kv_heads=2)
    assert planned(size, data_parallel_size=4).weights == 8 * GB
    staged = planned(size, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert staged.weights == 1 * GB
    # Two key heads cannot be split among four ranks, so each rank holds one of them.
    assert staged.kv_per_token == 2000


def test_an_argument_that_leaves_too_little_is_rejected_with_the_figure() -> None:
    plan = planned(
        ModelSize(weights=15 * GB, sent_weights=15 * GB, kv_per_token=57_344, num_kv_heads=4)
    )
    assert engine_share(plan, VLLM, {"gpu_memory_utilization": 0.3}) == {}
    message = r"gpu_memory_utilization is 0.9.*17.0 of 80.0 GB.*0.75"
    with pytest.raises(ValueError, match=message):
        engine_share(plan, VLLM, {"gpu_memory_utilization": 0.9})


def test_an_argument_whose_memory_is_not_planned_is_rejected() -> None:
    document = spec_of().model_dump(exclude_unset=True, mode="json")
    document["rollout"]["engine_arguments"] = {"num_gpu_blocks_override": 90_000}
    message = r"num_gpu_blocks_override is 90000.*kv_cache_memory_bytes"
    with pytest.raises(ValueError, match=message):
        plan_of(RunSpec.model_validate(document), qwen_7b(), gpu_bytes=300 * GB)


def spec_of(**trainer: Any) -> RunSpec:
    return spec_with(
        rollout={"engine": "vllm"},
        trainer={
            "prompts_per_step": 8,
            "dtype": "bfloat16",
            "activation_checkpointing": False,
            **trainer,
        },
    )


def test_a_rollout_that_shares_its_gpu_leaves_the_trainer_its_peak() -> None:
    spec, config = spec_of(tokens_per_micro_batch=8192), qwen_7b()
    trainer = trainer_memory(spec, config, gpu_bytes=262 * GB)
    others = other_workers_bytes(["trainer"], spec, config, gpu_bytes=262 * GB)
    assert others == pytest.approx(trainer.reserved)
    assert trainer.used < trainer.reserved < 1.05 * trainer.used
    plan = plan_of(spec, config, gpu_bytes=262 * GB, roles=["trainer"])
    assert plan.kv_cache < plan.kv_token_limit * plan.kv_per_token
    total = plan.weights + plan.kv_cache + 4 * GB + plan.plane + others
    # 3 % stay free, and the engine's share is rounded down to a hundredth.
    assert 0.96 * 262 * GB <= total <= 0.97 * 262 * GB
    # An engine that measures free memory would count memory that the trainer allocates later.
    share = engine_share(plan, VLLM, {})
    assert share["kv_cache_memory_bytes"] == int(plan.kv_cache)
    assert share["gpu_memory_utilization"] == plan.engine_share


def test_an_engine_on_a_trainers_gpu_has_no_more_cache_than_its_slots_can_fill() -> None:
    document = spec_of().model_dump(exclude_unset=True, mode="json")
    for slots in (8, 64):
        document["rollout"]["max_running_samples"] = slots
        spec = RunSpec.model_validate(document)
        plan = plan_of(spec, qwen_7b(), gpu_bytes=500 * GB, roles=["trainer"])
        longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
        least = max(slots * longest, qwen_7b().max_position_embeddings)
        assert least <= plan.kv_tokens <= 1.2 * least
        share = engine_share(plan, VLLM, {})
        assert share["kv_cache_memory_bytes"] == int(plan.kv_cache)
        needed_fraction = (plan.weights + 4 * GB + plan.kv_cache) / (500 * GB)
        assert needed_fraction <= share["gpu_memory_utilization"] <= needed_fraction + 0.01


def test_sglang_on_a_shared_gpu_is_bounded_by_tokens() -> None:
    sglang, config = ENGINES["sglang"], qwen_7b()
    spec = spec_of(tokens_per_micro_batch=8192)
    plan = plan_of(spec, config, gpu_bytes=300 * GB, roles=["trainer"])
    share = engine_share(plan, sglang, {})
    assert share == {"mem_fraction_static": 0.9, "max_total_tokens": plan.kv_tokens}
    alone = planned(ModelSize.of(config, BF16))
    assert engine_share(alone, sglang, {}) == {"mem_fraction_static": 0.7}


def test_two_rollouts_on_a_trainers_gpu_share_the_rest_equally() -> None:
    spec, config = spec_of(), qwen_7b()
    alone = other_workers_bytes(["trainer"], spec, config, gpu_bytes=300 * GB)
    both = other_workers_bytes(["trainer", "rollout"], spec, config, gpu_bytes=300 * GB)
    assert 300 * GB - both == pytest.approx((300 * GB - alone) / 2)


def test_a_gpu_too_small_for_trainer_and_engine_is_rejected() -> None:
    message = r"141.0 GB.* 2\d\d\.\d GB"
    with pytest.raises(ValueError, match=message):
        plan_of(spec_of(), qwen_7b(), gpu_bytes=141 * GB, roles=["trainer"])


def test_an_engine_without_a_share_has_its_cache_bounded() -> None:
    torch_engine = ENGINES["torch"]
    plan = planned(ModelSize.of(qwen_7b(), BF16))
    assert engine_share(plan, torch_engine, {}) == {"max_kv_tokens": plan.kv_tokens}
    assert engine_share(plan, torch_engine, {"max_kv_tokens": 1000}) == {}


def in_turns(**rollout: Any) -> RunSpec:
    document = spec_of().model_dump(exclude_unset=True, mode="json")
    document["topology"] = {"placement": "colocated"}
    document["rollout"] |= rollout
    document["algorithm"] = {"max_staleness": 0}
    return RunSpec.model_validate(document)


def test_a_colocated_engine_has_the_gpu_minus_the_sleeping_trainer() -> None:
    apart, turns = spec_of(), in_turns()
    config, total = qwen_7b(), 80 * GB
    beside = other_workers_bytes(["trainer"], apart, config, gpu_bytes=total)
    asleep = other_workers_bytes(["trainer"], turns, config, gpu_bytes=total)
    assert 15 * GB < asleep < 20 * GB < beside
    assert resident_memory(turns, config, gpu_bytes=total) == "nothing"
    trainer = trainer_memory(turns, config, gpu_bytes=total)
    assert trainer.used - trainer_memory(apart, config, gpu_bytes=total).used == pytest.approx(
        trainer.parts["sleeping rollouts"] + ROOM
    )


def test_the_shared_buffer_is_counted_if_one_gpu_has_all() -> None:
    assert ROOM == handle._HALVES * handle._CHUNK_BYTES
    config, total = qwen_7b(), 80 * GB

    def sent(spec: RunSpec, **sync: Any) -> float:
        sync_spec = spec.weight_sync.model_copy(update=sync)
        changed = spec.model_copy(update={"weight_sync": sync_spec})
        return trainer_memory(changed, config, gpu_bytes=total).parts["weights in transfer"]

    apart = sent(spec_of())
    assert sent(in_turns()) == sent(spec_of(), backend="handle") == apart + ROOM
    assert sent(in_turns(), backend="gloo") == apart


def test_state_that_fits_with_a_colocated_engine_stays() -> None:
    turns, config = in_turns(max_running_samples=56), qwen_7b()
    state = state_memory(turns, config, gpu_bytes=300 * GB)
    assert state == 3 * 4 * 7_615_616_512
    totals = [gb * GB for gb in (141, 300, 600)]
    residents = [resident_memory(turns, config, gpu_bytes=total) for total in totals]
    assert residents == ["nothing", "state", "all"]
    resident_bytes = [
        other_workers_bytes(["trainer"], turns, config, gpu_bytes=total) for total in totals
    ]
    peak = trainer_memory(spec_of(), config, gpu_bytes=600 * GB).used
    assert resident_bytes[1:] == [
        pytest.approx(resident_bytes[0] + 1.05 * state),
        pytest.approx(1.05 * (peak + ROOM)),
    ]

    def compiles(spec: RunSpec, total: int) -> bool:
        stays = resident_memory(spec, config, gpu_bytes=total)
        return compiles_asleep(spec, config, contents=stays, gpu_bytes=total)

    # A trainer whose state stays compiles only in less memory than an engine releases.
    assert [compiles(turns, total) for total in totals] == [False, False, True]
    larger = in_turns(engine_arguments={"kv_cache_memory_bytes": 60 * GB})
    assert resident_memory(larger, config, gpu_bytes=300 * GB) == "state"
    assert compiles(larger, 300 * GB)
    offloaded = larger.trainer.model_copy(update={"cpu_offload": True})
    assert compiles(larger.model_copy(update={"trainer": offloaded}), 300 * GB)
    plans = [plan_of(turns, config, gpu_bytes=total, roles=["trainer"]) for total in totals]
    assert [plan.stays_awake for plan in plans] == [False, False, True]
    assert {plan.kv_tokens for plan in plans} == {required_kv_tokens(turns, config)}
    # Only turns on shared GPUs release memory; otherwise each worker keeps its memory all the time.
    assert resident_memory(spec_of(), config, gpu_bytes=600 * GB) == "nothing"


def test_a_cache_that_is_given_counts_as_it_is() -> None:
    bounded_spec = in_turns(engine_arguments={"kv_cache_memory_bytes": 350 * GB})
    assert resident_memory(bounded_spec, qwen_7b(), gpu_bytes=600 * GB) == "state"
    tokens = in_turns(engine="torch", engine_arguments={"max_kv_tokens": 6_000_000})
    assert resident_memory(tokens, qwen_7b(), gpu_bytes=600 * GB) == "state"


@pytest.mark.parametrize(
    ("engine", "argument", "fits"),
    [("vllm", "kv_cache_memory_bytes", 40 * GB), ("sglang", "max_total_tokens", 700_000)],
)
def test_a_cache_that_is_given_must_fit(engine: str, argument: str, fits: int) -> None:
    def spec(size: int) -> RunSpec:
        rollout = {"engine": engine, "engine_arguments": {argument: size}}
        document = spec_of().model_dump(exclude_unset=True, mode="json")
        return RunSpec.model_validate(document | {"rollout": document["rollout"] | rollout})

    plan_of(spec(fits), qwen_7b(), gpu_bytes=80 * GB)
    with pytest.raises(ValueError, match=rf"{argument} takes \d\d\.\d GB"):
        plan_of(spec(2 * fits), qwen_7b(), gpu_bytes=80 * GB)


def test_an_engine_with_a_given_cache_needs_no_more_free_memory_than_that() -> None:
    plan = plan_of(spec_of(), qwen_7b(), gpu_bytes=80 * GB)
    share = engine_share(plan, VLLM, {"kv_cache_memory_bytes": 8 * GB})
    needed_fraction = (plan.weights + 4 * GB + 8 * GB) / (80 * GB)
    assert needed_fraction <= share["gpu_memory_utilization"] <= needed_fraction + 0.01


def test_an_engine_in_turns_maps_no_more_cache_than_its_places_can_fill() -> None:
    config, total = qwen_7b(), 300 * GB
    few, many = in_turns(max_running_samples=8), in_turns(max_running_samples=512)
    longest = few.data.max_prompt_tokens + few.rollout.max_response_tokens
    for spec in (few, many):
        plan = plan_of(spec, config, gpu_bytes=total, roles=["trainer"])
        share = engine_share(plan, VLLM, {})
        assert share["kv_cache_memory_bytes"] == int(plan.kv_cache)
        # vLLM starts only if this share is free, and the trainer may hold more memory than planned.
        needed_fraction = (plan.weights + 4 * GB + plan.kv_cache) / total
        assert needed_fraction <= share["gpu_memory_utilization"] <= needed_fraction + 0.01
        # An engine starts only if its cache fits the longest context that it accepts.
        least = max(spec.rollout.max_running_samples * longest, config.max_position_embeddings)
        assert least <= plan.kv_tokens <= 1.2 * least
    apart = plan_of(spec_of(), config, gpu_bytes=total)
    assert apart.kv_token_limit == float("inf")


ADAPTERS = {
    "model": {"path": "/models/qwen-7b"},
    "trainer": {"dtype": "bfloat16", "lora": {"rank": 32}},
    "rollout": {"engine": "vllm"},
}
LORA_7B = spec_with(**ADAPTERS)


def test_adapters_are_merged_ahead_in_memory_that_the_kv_cache_can_spare() -> None:
    roles, weights = ["trainer"], 2 * 7_615_616_512
    large = plan_of(LORA_7B, qwen_7b(), gpu_bytes=140 * GB, roles=roles)
    assert weights < large.merged_slots < weights + 2.5 * GB
    assert large.kv_tokens >= required_kv_tokens(LORA_7B, qwen_7b())
    filled = plan_of(LORA_7B, qwen_7b(), gpu_bytes=60 * GB, roles=roles)
    assert filled.merged_slots < large.merged_slots
    # Half of the cache for all slots with the longest responses stays, as far as there is memory.
    assert filled.kv_tokens >= min(
        required_kv_tokens(LORA_7B, qwen_7b()) // 2,
        replace(filled, merged_slots=0.0).kv_tokens,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"topology": {"placement": "colocated"}},
        {"rollout": {"engine_arguments": {"gpu_memory_utilization": 0.3}}},
        {"trainer": {"lora": {"rank": 32, "sync": "merged"}}},
    ],
)
def test_no_memory_is_taken_for_merging_ahead_where_it_has_no_use(changes: dict[str, Any]) -> None:
    changed = {key: ADAPTERS.get(key, {}) | value for key, value in changes.items()}
    spec = spec_with(**ADAPTERS | changed)
    plan = plan_of(spec, qwen_7b(), gpu_bytes=140 * GB, roles=["trainer"])
    assert plan.merged_slots == 0


def test_stages_that_divide_experts_send_their_own_rows() -> None:
    changes = {"engine": "stages", "world_size": 8, "pipeline_parallel": 2}
    senders = [
        WeightPlane.of(spec_with(trainer={**changes, "expert_parallel": size}), qwen_7b())
        for size in (1, 2, 4)
    ]
    assert [plane.num_sources for plane in senders] == [8, 8, 8]
