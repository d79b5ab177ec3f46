"""Specifications: error messages, overrides, aliases, paths and digests."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from services.common.runspec import loader
from services.common.runspec.base import in_yaml
from services.common.runspec.keys import flat
from services.common.runspec.loader import (
    SpecError,
    canonical_json,
    draft_of,
    load_spec,
    parse_spec,
    spec_digest,
)
from services.common.runspec.trainer import LoraSpec
from slipstream_client.specification import read_spec
from tests.helpers.specs import SMALLEST, changed


@pytest.mark.parametrize("value", [None, True, 2, 0.5, "auto", "a: b", {"rank": 4}])
def test_a_value_in_a_message_can_be_copied_into_a_specification(value: object) -> None:
    setting = LoraSpec.model_validate(value) if isinstance(value, dict) else value
    assert yaml.safe_load(in_yaml(setting)) == value


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(trainer={"stepz": 3}), ["trainer.stepz", "trainer.steps"]),
        (
            changed(trainer={"checkpoint": {"directory": "\ud800"}}),
            ["trainer.checkpoint.directory"],
        ),
        (changed(rollout={"sampling": {"stop": ["a\ud800"]}}), ["rollout.sampling.stop"]),
        ({**SMALLEST, "model": "\ud800"}, ["model"]),
        ({**SMALLEST, "\ud800": 1}, ["the specification"]),
        (
            changed(rollout={"workflow_arguments": {"x": [{"\udfff": 1}]}}),
            ["rollout.workflow_arguments"],
        ),
        (
            changed(rollout={"workflow_arguments": {"x": [float("nan")]}}),
            ["rollout.workflow_arguments"],
        ),
        (
            changed(weight_sync={"mode": "inplace"}, rollout={"engine": "fake"}),
            ["inplace", "fake", "shadow"],
        ),
        (
            changed(trainer={"lora": {"sync": "adapter", "target_modules": ["experts.down_proj"]}}),
            ["trainer.lora.sync", "trainer.lora.target_modules"],
        ),
        (
            changed(weight_sync={"mode": "inplace"}, trainer={"lora": {"sync": "adapter"}}),
            ["trainer.lora.sync", "inplace", "shadow"],
        ),
        (
            changed(trainer={"dtype": "bfloat16", "loss_scale": {"initial": 1024}}),
            ["trainer.loss_scale", "trainer.dtype float16"],
        ),
        (
            changed(trainer={"lora": {"base_dtype": "nf4"}}),
            ["trainer.lora.base_dtype", "preset", "folder"],
        ),
        (
            changed(trainer={"lora": {"base_dtype": "nf4"}, "world_size": 2}),
            ["trainer.lora.base_dtype", "trainer.zero_stage to 1"],
        ),
        (
            changed(trainer={"lora": {"base_dtype": "int8"}, "cpu_offload": True}),
            ["trainer.lora.base_dtype", "trainer.cpu_offload to false"],
        ),
        (
            changed(
                trainer={
                    "engine": "reference",
                    "lora": {"base_dtype": "nf4"},
                }
            ),
            ["trainer.engine", "trainer.lora"],
        ),
        (changed(algorithm={"loss": "distill"}), ["algorithm.loss", "teacher"]),
        (changed(teacher={}), ["teacher.path", "teacher.prompt_column", "distill"]),
        (
            changed(
                teacher={"prompt_column": "x"}, algorithm={"loss": "distill", "advantage": "grpo"}
            ),
            ["algorithm.advantage", "distill"],
        ),
        (
            changed(
                teacher={"path": "tiny:qwen2-3m", "url": "http://teacher:8000"},
                rollout={"sampling": {"temperature": 0.7}},
            ),
            ["rollout.sampling.temperature", "teacher"],
        ),
        (
            changed(
                teacher={"path": "tiny:qwen2-3m", "url": "http://teacher:8000"},
                algorithm={"loss": "distill", "loss_arguments": {"top_k": None}},
            ),
            ["algorithm.loss_arguments.top_k", "server"],
        ),
        (changed(teacher={"path": "tiny:qwen2-3m", "url": "teacher:8000"}), ["teacher.url"]),
        (
            changed(
                teacher={"path": "tiny:qwen2-3m"},
                algorithm={"loss": "distill"},
                rollout={"sampling": {"top_k": 8}},
            ),
            ["rollout.sampling.top_k", "distill"],
        ),
        (
            changed(
                teacher={"demonstration": "{response}"},
                algorithm={"loss": "distill", "loss_arguments": {"top_k": None}},
                trainer={"updates_per_step": 2},
            ),
            ["algorithm.loss_arguments.top_k", "trainer.updates_per_step"],
        ),
        (
            changed(weight_sync={"mode": "cpu_async", "backend": "nccl"}),
            ["weight_sync", "cpu_async", "auto"],
        ),
        (
            changed(weight_sync={"backend": "storage"}),
            ["'storage'", "weight_sync.storage.directory", "s3://bucket/folder"],
        ),
        (
            changed(weight_sync={"storage": {"directory": "/weights"}}),
            ["weight_sync.storage", "'auto'", "'storage'"],
        ),
        (
            changed(
                weight_sync={
                    "backend": "storage",
                    "storage": {"directory": "s3://key:secret@bucket/weights"},
                }
            ),
            ["weight_sync.storage.directory", "credentials"],
        ),
        (
            changed(
                weight_sync={
                    "backend": "storage",
                    "mode": "inplace",
                    "storage": {"directory": "/weights"},
                }
            ),
            ["'storage'", "'inplace'", "'shadow'"],
        ),
        (
            changed(
                weight_sync={"backend": "storage", "storage": {"directory": "/weights"}},
                topology={"placement": "colocated"},
            ),
            ["'storage'", "topology.placement", "'auto'"],
        ),
        (
            changed(algorithm={"correction_normalize": True, "correction": "bypass"}),
            ["algorithm.correction_normalize", "'bypass'", "'decoupled'"],
        ),
        (
            changed(algorithm={"score_centering": 8}),
            ["algorithm.score_centering", "'ppo'", "'reinforce'"],
        ),
        (
            changed(
                algorithm={
                    "score_centering": 8,
                    "loss": "reinforce",
                    "correction": "decoupled",
                }
            ),
            ["algorithm.score_centering", "'decoupled'", "'bypass'"],
        ),
        (
            changed(
                algorithm={
                    "score_centering": 8,
                    "loss": "reinforce",
                    "correction_level": "sequence",
                }
            ),
            ["algorithm.score_centering", "algorithm.correction_level", "'token'"],
        ),
        (
            changed(
                algorithm={
                    "score_centering": 8,
                    "loss": "reinforce",
                    "rejection": [{"level": "token", "upper": 2.0}],
                }
            ),
            ["algorithm.score_centering", "algorithm.rejection.0", "correction_cap_mode"],
        ),
        (
            changed(
                algorithm={"score_centering": 8, "loss": "reinforce"}, rollout={"engine": "fake"}
            ),
            ["algorithm.score_centering", "'fake'", "torch"],
        ),
        (
            changed(algorithm={"rejection_denominator": "kept"}),
            ["algorithm.rejection_denominator", "algorithm.rejection "],
        ),
        (
            changed(
                algorithm={
                    "correction": "decoupled",
                    "proximal": "interpolated",
                    "correction_normalize": True,
                }
            ),
            ["algorithm.proximal 'interpolated'", "'computed'"],
        ),
        (
            changed(rollout={"engine": "sglang", "quantization": "fp8"}),
            ["rollout.quantization", "'sglang'", "vllm"],
        ),
        (
            changed(rollout={"engine": "torch", "kv_cache_dtype": "fp8"}),
            ["rollout.kv_cache_dtype", "'torch'", "vllm or sglang"],
        ),
        (
            changed(rollout={"engine": "vllm", "engine_arguments": {"quantization": "fp8"}}),
            ["rollout.engine_arguments.quantization", "rollout.quantization"],
        ),
        (
            changed(rollout={"quantization": "fp8", "reproducible": "batch_invariant"}),
            ["rollout.reproducible", "rollout.quantization"],
        ),
        (
            changed(
                rollout={
                    "engine": "vllm",
                    "reproducible": "batch_invariant",
                    "engine_arguments": {"compilation_config": {"mode": 3}},
                }
            ),
            ["rollout.engine_arguments.compilation_config", "rollout.reproducible"],
        ),
        (
            changed(
                algorithm={"correction": "none", "max_staleness": 0},
                rollout={"quantization": "fp8"},
            ),
            ["algorithm.correction", "rollout.quantization"],
        ),
        (changed(rollout={"max_mismatch": 0.5}), ["rollout.max_mismatch", "rollout.quantization"]),
        (
            changed(rollout={"unquantized_layers": 2}),
            ["rollout.unquantized_layers", "rollout.quantization"],
        ),
        (changed(trainer={"steps": 0}), ["trainer.steps", "greater than or equal to 1", "0"]),
        (changed(rollout={"engine": "tgi"}), ["rollout.engine", "'vllm'", "tgi"]),
        ({key: value for key, value in SMALLEST.items() if key != "model"}, ["model", "missing"]),
        (changed(name="Not A Label"), ["name", "Not A Label"]),
        (
            changed(algorithm={"correction": "none"}),
            ["algorithm.correction", "algorithm.max_staleness", "set"],
        ),
        (changed(rollout={"sandbox": {}}), ["rollout.sandbox", "single_turn", "agent"]),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"kind": "podman"}}),
            ["rollout.sandbox.image", "podman", "image_column"],
        ),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"kind": "kubernetes"}}),
            ["rollout.sandbox.image", "kubernetes", "image_column"],
        ),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"kind": "e2b"}}),
            ["rollout.sandbox.arguments.api_key", "e2b", "secret"],
        ),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"arguments": {"api_key": {}}}}),
            ["rollout.sandbox.arguments", "api_key", "bubblewrap"],
        ),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"folders": ["/app", "/proc/x"]}}),
            ["rollout.sandbox.folders", "/proc/x"],
        ),
        (
            changed(rollout={"workflow": "agent", "sandbox": {"image_column": "task"}}),
            ["rollout.sandbox.image_column", "rollout.sandbox.image"],
        ),
        (
            changed(
                rollout={
                    "workflow": "environment",
                    "workflow_arguments": {"environment": "openenv+http://games:80"},
                    "sandbox": {},
                }
            ),
            ["rollout.sandbox", "OpenEnv"],
        ),
        (changed(rollout={"group_size": 1}), ["rollout.group_size", "algorithm.min_group_size"]),
        (changed(rollout={"sampling": {"temperature": 0}}), ["temperature", "greedy"]),
        (changed(rollout={"sampling": {"top_p": 0.9}}), ["top_p", "top_k"]),
        (
            changed(
                rollout={
                    "engine": "vllm",
                    "sampling": {"top_k": 8},
                    "speculation": {"method": "ngram"},
                }
            ),
            ["rollout.sampling.top_k", "'vllm'", "rollout.speculation"],
        ),
        (
            changed(rollout={"engine": "vllm", "engine_arguments": {"return_sampling_mask": True}}),
            ["rollout.engine_arguments.return_sampling_mask", "rollout.sampling.top_k"],
        ),
        (
            changed(rollout={"engine": "fake", "sampling": {"top_k": 8}}),
            ["rollout.sampling.top_k", "'fake'", "torch, vllm, sglang"],
        ),
        (
            changed(
                rollout={
                    "engine": "sglang",
                    "engine_arguments": {"sampling_mask_max_tokens": 8},
                }
            ),
            ["rollout.engine_arguments.sampling_mask_max_tokens", "rollout.sampling.top_k"],
        ),
        (changed(trainer={"updates_per_step": 5}), ["updates_per_step", "prompts_per_step"]),
        (changed(trainer={"accumulate_early": True}), ["accumulate_early", "max_staleness", "0"]),
        (
            changed(
                trainer={"accumulate_early": True},
                algorithm={"max_staleness": 0, "advantage": "reinforce_pp"},
            ),
            ["accumulate_early", "reinforce_pp", "grpo", "rloo"],
        ),
        (
            changed(
                trainer={"accumulate_early": True},
                algorithm={"max_staleness": 0, "correction_normalize": True},
            ),
            ["accumulate_early", "correction_normalize"],
        ),
        (changed(trainer={"world_size": 3, "tensor_parallel": 2}), ["world_size", "multiple"]),
        (
            changed(trainer={"world_size": 4, "tensor_parallel": 2, "context_parallel": 4}),
            ["world_size (4)", "multiple", "trainer.context_parallel (4)"],
        ),
        (
            changed(trainer={"engine": "stages", "world_size": 3, "pipeline_parallel": 2}),
            ["world_size (3)", "multiple", "trainer.pipeline_parallel (2)"],
        ),
        (
            changed(topology={"scoring": {"cpu_offload": True}}),
            ["topology.scoring", "ref_logp", "topology.task_groups"],
        ),
        (changed(trainer={"zero_stage": 1, "cpu_offload": True}), ["zero_stage", "cpu_offload"]),
        *(
            (changed(trainer={"keep_gathered": False, **others}), ["trainer.keep_gathered", "auto"])
            for others in ({"lora": {}}, {"cpu_offload": True}, {"world_size": 2})
        ),
        (
            changed(trainer={"keep_gathered": True, "world_size": 2}),
            ["trainer.keep_gathered", "trainer.world_size is 2", "zero_stage"],
        ),
        (changed(validation={"only": True}), ["data.heldout"]),
        (
            changed(rollout={"rewards": [{"name": "exact_match", "sees": "group"}]}),
            ["rollout.rewards.0.sees", "module:function"],
        ),
        (
            changed(
                rollout={
                    "rewards": [{"name": "a.py:b", "sees": "pairs"}],
                    "max_running_samples": 2,
                }
            ),
            ["rollout.rewards", "rollout.max_running_samples"],
        ),
        (changed(data={"prompt_template": "no place"}), ["prompt_template", "{prompt}"]),
        (changed(trainer={"steps": "1e3"}), ["trainer.steps", "write 1000"]),
        (
            changed(model={"path": "org/model", "warm_start": {"examples": "a.py:b"}}),
            ["model.warm_start", "org/model"],
        ),
    ],
)
def test_a_problem_names_key_expectation_and_fix(document, words):
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(trainer={"steps": 0, "prompts_per_step": 0}, seed=-1))
    assert len(caught.value.problems) == 3


def test_a_wrong_type_and_a_broken_rule_are_reported_together():
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(trainer={"cpu_offload": "all", "updates_per_step": 5}))
    first, second = caught.value.problems
    assert first.startswith("trainer.cpu_offload:")
    assert "trainer.updates_per_step" in second


def test_generate_ahead_steps_is_an_alias_of_max_staleness():
    assert parse_spec(changed(algorithm={"generate_ahead_steps": 3})).algorithm.max_staleness == 3
    with pytest.raises(SpecError, match=r"algorithm\.generate_ahead_steps"):
        parse_spec(changed(algorithm={"generate_ahead_steps": 3, "max_staleness": 1}))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"trainer": {"test_freq": 5}}, {"validation.every": 5}),
        ({"trainer": {"test_freq": -1}}, {"validation.every": 0}),
        ({"trainer": {"val_before_train": False}}, {"validation.before_train": False}),
        (
            {
                "trainer": {"val_only": True},
                "data": {"heldout": {"source": "jsonl", "path": "heldout.jsonl"}},
            },
            {"validation.only": True},
        ),
        ({"trainer": {"save_freq": 20}}, {"trainer.checkpoint.every": 20}),
        (
            {"trainer": {"save_freq": -1}},
            {"trainer.checkpoint.every": 0, "trainer.checkpoint.every_s": 0.0},
        ),
        (
            {"trainer": {"save_freq": 0, "test_freq": 0}},
            {
                "trainer.checkpoint.every": 0,
                "trainer.checkpoint.every_s": 0.0,
                "validation.every": 0,
            },
        ),
        ({"trainer": {"max_actor_ckpt_to_keep": 5}}, {"trainer.checkpoint.keep": 5}),
        ({"trainer": {"default_local_dir": "/c"}}, {"trainer.checkpoint.directory": "/c"}),
        (
            {"trainer": {"resume_mode": "resume_path", "resume_from_path": "/c/step-3"}},
            {"trainer.checkpoint.start_from": "/c/step-3"},
        ),
        (
            {"trainer": {"resume_mode": "auto", "resume_from_path": "/c/step-3"}},
            {"trainer.checkpoint.start_from": None},
        ),
        (
            {"rollout": {"param_update_preduce_bucket_size_mb": 256}},
            {"weight_sync.bucket_bytes": 256 << 20},
        ),
        (
            {"rollout": {"param_update_preduce_bucket_size_mb": "256"}},
            {"weight_sync.bucket_bytes": 256 << 20},
        ),
        (
            {"weight_sync": {"param_update_consume_bucket_size_mb": 128}},
            {"weight_sync.staging_bytes": 128 << 20},
        ),
    ],
)
def test_keys_of_other_systems_are_aliases(parts, expected):
    values = dict(flat(parse_spec(changed(**parts)).model_dump()))
    assert {key: values[key] for key in expected} == expected


def test_an_override_wins_over_the_alias_of_its_key():
    document = changed(trainer={"save_freq": 20})
    draft = draft_of(document, ["trainer.checkpoint.every=5"], folder=Path())
    assert not draft.examined.problems
    assert draft.examined.spec.trainer.checkpoint.every == 5
    document = changed(trainer={"checkpoint": {"every": 20}})
    draft = draft_of(document, ["trainer.save_freq=5"], folder=Path())
    assert not draft.examined.problems
    assert draft.examined.spec.trainer.checkpoint.every == 5


def test_a_wrong_value_of_an_alias_is_reported_under_its_key():
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(rollout={"param_update_preduce_bucket_size_mb": "large"}))
    (problem,) = caught.value.problems
    assert problem.startswith("weight_sync.bucket_bytes:")


def test_the_lag_of_generate_ahead_steps_is_noted():
    draft = draft_of(changed(trainer={"generate_ahead_steps": 2}), [], folder=Path())
    (note,) = draft.notes
    assert "at most 2 weight versions" in note


def test_buckets_fit_into_the_staging_buffers_of_a_receiver():
    sync = parse_spec(changed(weight_sync={"staging_bytes": 64 << 20})).weight_sync
    assert sync.staged_bucket_bytes(512 << 20, num_sources=4) == 8 << 20
    assert sync.staged_bucket_bytes(1 << 20, num_sources=4) == 1 << 20
    plain = parse_spec(SMALLEST).weight_sync
    assert plain.staged_bucket_bytes(512 << 20, num_sources=64) == 512 << 20
    with pytest.raises(SpecError, match=r"^weight_sync\.staging_bytes"):
        parse_spec(changed(weight_sync={"staging_bytes": 1 << 18}, trainer={"world_size": 8}))


def test_equal_specifications_have_equal_digests():
    written_out = yaml.safe_load(canonical_json(parse_spec(SMALLEST)))
    assert spec_digest(parse_spec(written_out)) == spec_digest(parse_spec(SMALLEST))
    assert spec_digest(parse_spec(changed(seed=1))) != spec_digest(parse_spec(SMALLEST))


TWO_GROUPS = {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5], "gpus": 4}


@pytest.mark.parametrize(
    ("in_file", "overrides", "values"),
    [
        (
            {"algorithm": {"max_staleness": 1}},
            ["algorithm.generate_ahead_steps=3"],
            {"algorithm.max_staleness": 3},
        ),
        (
            {"algorithm": {"generate_ahead_steps": 1}},
            ["algorithm.max_staleness=3"],
            {"algorithm.max_staleness": 3},
        ),
        (
            {"trainer": {"generate_ahead_steps": 1}},
            ["algorithm.generate_ahead_steps=3"],
            {"algorithm.max_staleness": 3},
        ),
        (
            {"algorithm": "dpo"},
            ["algorithm.loss=ppo"],
            {"algorithm.loss": "ppo"},
        ),
        ({"trainer": {"steps": 4}}, ["data.epochs=2"], {"trainer.steps": None, "data.epochs": 2}),
        (
            {"trainer": {"steps": None}, "data": {"epochs": 2}},
            ["trainer.steps=3"],
            {"trainer.steps": 3, "data.epochs": None},
        ),
        (
            {"rollout": {"replicas": 1}, "topology": {}},
            [
                "topology.task_groups=[train, generate]",
                "topology.ratios=[0.5, 0.5]",
                "topology.gpus=4",
            ],
            {"rollout.replicas": 2, "trainer.world_size": 2},
        ),
        (
            {"topology": TWO_GROUPS},
            ["rollout.replicas=3"],
            {"rollout.replicas": 3, "trainer.world_size": 2, "topology.task_groups": ()},
        ),
        (
            {
                "topology": TWO_GROUPS,
                "rollout": {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 4}},
            },
            ["trainer.world_size=1"],
            {"rollout.replicas": 1, "trainer.world_size": 1, "topology.task_groups": ()},
        ),
        (
            {"topology": TWO_GROUPS, "rollout": {"replicas": 2}},
            ["topology.separated_node_ratios=[0.25, 0.75]"],
            {"rollout.replicas": 3, "trainer.world_size": 1},
        ),
    ],
)
def test_an_override_wins_over_the_file_under_any_name_of_its_key(
    tmp_path, in_file, overrides, values
):
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(changed(**in_file)))
    spec = load_spec(path, overrides)
    actual = {key: attrgetter(key)(spec) for key in values}
    assert actual == values


def test_overrides_are_applied_in_order_and_typed(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    spec = load_spec(
        path,
        [
            "trainer.steps=7",
            "algorithm.max_staleness=2",
            "algorithm.max_staleness=0",
            "trainer.optimizer.learning_rate=2e-5",
            "rollout.rewards.0.weight=0.5",
        ],
    )
    assert spec.trainer.steps == 7
    assert spec.algorithm.max_staleness == 0
    assert spec.trainer.optimizer.learning_rate == 2e-5
    assert spec.rollout.rewards[0].weight == 0.5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.steps", r"trainer\.steps"),
        ("trainer.steps.deep=1", r"trainer\.steps\.deep"),
        ("rollout.rewards.4.weight=1", r"rollout\.rewards\.4"),
        ("rollout.rewards.²=1", r"rollout\.rewards\.²"),
        (f"rollout.rewards.{'9' * 5000}.weight=1", r"rollout\.rewards\.9"),
        (".=1", "KEY=VALUE"),
        ("trainer..steps=1", "KEY=VALUE"),
        (f"trainer{'.steps' * 5000}=1", "levels deep"),
        (f"trainer.steps={'[' * 5000}", "levels deep"),
    ],
)
def test_bad_overrides_are_rejected(tmp_path, override, words):
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    with pytest.raises(SpecError, match=words):
        load_spec(path, [override])


def _bomb(form: str) -> str:
    """Returns a few lines of YAML that expand to more values than fit into memory."""
    lines = [
        f"a{level}: &a{level} {form.format(', '.join([f'*a{level - 1}'] * 9))}"
        for level in range(1, 15)
    ]
    return "\n".join(["a0: &a0 {x: 1}", *lines])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "mapping"),
        ("{apiVersion: slipstream.dev/v1alpha1, kind: RLRun, spec: {}}", "kubectl"),
        ("a: [", "not valid YAML"),
        (None, "cannot be read"),
        (f"a: {'[' * 5000}", "levels deep"),
        ("a: &a [*a, *a, *a, *a, *a, *a, *a, *a, *a]", "contains itself"),
        (_bomb("[{}]"), "values"),
        (_bomb("{{<<: [{}]}}"), "values"),
        ("#" * (256 << 10) + "\n{}", "larger than"),
    ],
)
def test_unreadable_files_are_rejected(tmp_path, text, words):
    path = tmp_path / "spec.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=words):
        load_spec(path)


def test_paths_that_cannot_be_resolved_are_kept_for_who_opens_them(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for name in ("circle", "x" * 5000):
        document = changed(data={"train": {"source": "jsonl", "path": name}}, model={"path": name})
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(document))
        spec = load_spec(path)
        assert spec.data.train.path == str(tmp_path / name)
        assert spec.model.path == name


def test_paths_are_relative_to_the_file(tmp_path):
    document = changed(
        model={"path": "tiny:qwen2-0.4m", "warm_start": {"examples": "task.py:examples"}},
        rollout={"rewards": [{"name": "task.py:reward"}]},
    )
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    spec = load_spec(path)
    assert spec.data.train.path == str(tmp_path / "prompts.jsonl")
    assert spec.model.warm_start.examples == f"{tmp_path}/task.py:examples"
    assert spec.rollout.rewards[0].name == f"{tmp_path}/task.py:reward"


@pytest.mark.parametrize("is_folder", [True, False])
def test_folders_of_tokenizers_and_data_sets_are_relative_to_the_file_and_ids_are_kept(
    tmp_path, is_folder
):
    if is_folder:
        (tmp_path / "own").mkdir()
    train = {"source": "huggingface", "path": "own"}
    document = changed(model={"path": "own", "tokenizer": "own"}, data={"train": train})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    spec = load_spec(tmp_path / "run.yaml")
    paths = {spec.model.path, spec.model.tokenizer, spec.data.train.path}
    assert paths == {str(tmp_path / "own") if is_folder else "own"}


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("example", sorted({*EXAMPLES.glob("*.yaml")} - {EXAMPLES / "rlrun.yaml"}))
def test_every_example_is_valid(example):
    load_spec(example)


def test_the_object_of_kubernetes_is_the_example_sort4_with_its_code_in_a_module():
    body = yaml.safe_load((EXAMPLES / "rlrun.yaml").read_text())
    run_fields = {"suspend", "priority", "labels"}
    spec = {key: value for key, value in body["spec"].items() if key not in run_fields}
    text = (EXAMPLES / "sort4.yaml").read_text().replace("sort4.py:", "sort4:")
    assert parse_spec({"name": body["metadata"]["name"], **spec}) == parse_spec(
        yaml.safe_load(text)
    )


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 10, 5), (1, 11, 6), (0.3, 10, 2), (3, 7, 11), (0.01, 10, 1)]
)
def test_epochs_end_with_a_batch_that_is_filled_up(epochs, rows, steps):
    document = changed(data={"epochs": epochs}, trainer={"steps": None, "prompts_per_step": 2})
    assert parse_spec(document).num_steps(rows) == steps
    assert parse_spec(SMALLEST).num_steps(rows) == 1


def test_one_set_and_several_sets_have_keys_of_their_own():
    dataset = {"source": "jsonl", "path": "a.jsonl", "rewards": [{"name": "exact_match"}]}
    spec = parse_spec(changed(data={"train": {"a": dataset, "b": {**dataset, "rewards": None}}}))
    assert list(spec.data.sets) == ["train.a", "train.b"]
    assert list(spec.rewards) == ["rollout.rewards", "data.train.a.rewards"]
    assert list(parse_spec(SMALLEST).data.sets) == ["train"]
    assert parse_spec(canonical_json(spec)) == spec


def test_paths_of_every_set_are_relative_to_the_file(tmp_path):
    dataset = {"source": "jsonl", "path": "a.jsonl", "rewards": [{"name": "r.py:f"}]}
    document = changed(data={"train": {"a": dataset}, "heldout": {"b": dataset}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    spec = load_spec(tmp_path / "run.yaml")
    for split in spec.data.sets.values():
        assert split.path == str(tmp_path / "a.jsonl")
        assert split.rewards[0].name == f"{tmp_path}/r.py:f"


def test_rows_that_bring_their_answers_need_an_engine_for_held_out_ones_alone():
    held_out = {"heldout": SMALLEST["data"]["train"]}
    for loss, column in (("sft", "answer"), ("dpo", "chosen")):
        demonstrations = changed(algorithm={"loss": loss}, rollout={"rewards": []})
        assert parse_spec(demonstrations).rollout.engine == "none"
        assert parse_spec(demonstrations).data.answer_column == column
        assert (
            parse_spec({**demonstrations, "data": {**SMALLEST["data"], **held_out}}).rollout.engine
            == "torch"
        )
    assert parse_spec(SMALLEST).rollout.engine == "torch"


def test_quantized_rollouts_are_corrected_by_weights_also_with_one_update() -> None:
    assert parse_spec(changed()).correction == "bypass"
    quantized = parse_spec(changed(rollout={"quantization": "fp8"}))
    assert quantized.correction == "decoupled"
    assert not quantized.needs_proximal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[yes, no]", ["yes", "no"]),
        ("[On, off, Yes, NO, y, n]", ["On", "off", "Yes", "NO", "y", "n"]),
        ("[true, False]", [True, False]),
        ("1e-3", 1e-3),
        ("[1E5, -2e+3, 1.5e2, .5e1]", [1e5, -2e3, 150.0, 5.0]),
        ("1e-3s", "1e-3s"),
        ("[=, +]", ["=", "+"]),
    ],
)
def test_values_of_yaml_are_what_they_look_like(tmp_path: Path, text: str, value: object) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"rollout: {{rewards: [{{name: exact_match, arguments: {{value: {text}}}}}]}}")
    for document in (loader.load_yaml(file.read_text()), read_spec(file)):
        actual = document["rollout"]["rewards"][0]["arguments"]["value"]
        assert (actual, type(actual)) == (value, type(value))


def test_yes_and_no_are_booleans_where_a_key_is_one() -> None:
    assert parse_spec(changed(trainer={"compile": "no"})).trainer.compile is False
