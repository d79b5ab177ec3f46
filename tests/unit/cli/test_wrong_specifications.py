"""Tests that invalid specifications are rejected with the key of each problem, without network access.

The messages are in ``tests/golden/validate_errors.json``; ``pytest --update-golden`` rewrites it.
"""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from services.checks.start.preflight import read_checked
from services.common.runspec.loader import SpecError
from tests.helpers.golden import check_can_update
from tests.helpers.specs import changed

GONE = "(left out)"
RIGHT = changed(trainer={"steps": 10})
SET = {"source": "jsonl", "path": "prompts.jsonl"}
TASK = """
def reward(prompt, response, answer, row, *, scale=1.0): return scale
def narrow(prompt): return 0.0
def rows(count): return [{"prompt": "a", "answer": "b"}] * count
def nothing(): return []
value = 3
class Flow: pass
class Silent:
    def reset(self, task, seed): return "begin"
class Game(Silent):
    def __init__(self, size=4): pass
    def step(self, message): return "end"
class Broken:
    def __init__(self): raise RuntimeError("broken")
"""
TEACHER = {"path": "tiny:qwen2-3m"}
GROUPS = {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5]}

# Changes to a valid specification, and the key that the problem must name.
WRONG = [
    ({"nam": "x"}, "nam"),
    ({"trainer.stepz": 3}, "trainer.stepz"),
    ({"trainer.learning_rate": 1e-5}, "trainer.learning_rate"),
    ({"trainer.optimizer.lr": 1e-5}, "trainer.optimizer.lr"),
    ({"group_size": 8}, "group_size"),
    ({"trainer.batch_size": 8}, "trainer.batch_size"),
    ({"rollout.max_new_tokens": 8}, "rollout.max_new_tokens"),
    ({"trainer.activation_checkpointing": "selectiv"}, "trainer.activation_checkpointing"),
    (
        {"trainer.activation_checkpointing": -3, "trainer.cpu_offload": "all"},
        "trainer.activation_checkpointing",
    ),
    ({"rollout.engine_arguments": {"max_kv_tokens": 1e5}}, "rollout.engine_arguments.max_kv_tokens"),
    ({"rollout.segment_tokens": 0}, "rollout.segment_tokens"),
    ({"rollout.segment_tokens": 256}, "rollout.segment_tokens"),
    (
        {"transferqueue.quota_bytes": 1 << 20, "rollout.max_response_tokens": 4000},
        "transferqueue.quota_bytes",
    ),
    ({"rollout.rewards": [{"nam": "exact_match"}]}, "rollout.rewards.0.nam"),
    ({"name": GONE}, "name"),
    ({"model": GONE}, "model"),
    ({"trainer.steps": GONE}, "trainer.steps"),
    ({"data.epochs": 2}, "data.epochs"),
    ({"data.epochs": 0, "trainer.steps": GONE}, "data.epochs"),
    ({"data.train": {"a": {**SET, "weight": 2}, "b": SET}}, "data.train.b.weight"),
    ({"data.train": {"a": {**SET, "weight": 0}}}, "data.train.a.weight"),
    ({"data.train": {"a": {**SET, "weigth": 1}}}, "data.train.a.weigth"),
    ({"data.train": {"Not A Name": SET}}, "data.train.Not A Name"),
    ({"data.train": {"a": {"path": "x"}}}, "data.train.a.source"),
    ({"data.train": {"a": {**SET, "path": "gone.jsonl"}}}, "data.train.a.path"),
    ({"data.train": {"a": SET, "b": {**SET, "prompt_column": "question"}}}, "data.train.b.prompt_column"),
    ({"data.train": {"a": SET, "b": {**SET, "source": "python", "path": "task.py:nothing"}}}, "data.train.b"),
    ({"data.heldout": {"a": {**SET, "rewards": [{"name": "exactmatch"}]}}}, "data.heldout.a.rewards.0.name"),
    ({"data.heldout": {"a": {**SET, "rewards": [{"name": "gone.py:f"}]}}}, "data.heldout.a.rewards.0.name"),
    ({"data.train": {"a": {**SET, "prompt_template": "x"}}}, "data.train.a.prompt_template"),
    (
        {"data.train": {"a": SET, "b": {**SET, "filters": [{"column": "number", "at_least": 4}]}}},
        "data.train.b.filters",
    ),
    ({"data.train": {**SET, "filters": [{"column": "numbr", "at_least": 4}]}}, "data.train.filters.0.column"),
    ({"data.train": {**SET, "filters": [{"column": "number"}]}}, "data.train.filters.0"),
    ({"data.train": {**SET, "filters": [{"function": "task.py:gone"}]}}, "data.train.filters.0.function"),
    ({"data.curriculum": {"hopeless_to": 0.5, "solved_from": 0.5}}, "data.curriculum.hopeless_to"),
    ({"data.curriculum": {"hopeless_to": None, "solved_from": None}}, "data.curriculum"),
    ({"data.curriculum": {"function": "task.py:gone"}}, "data.curriculum.function"),
    ({"data.curriculum": {"arguments": {"x": 1}}}, "data.curriculum.arguments"),
    ({"data.curriculum": {}, "algorithm": "sft", "rollout.rewards": []}, "data.curriculum.solved_from"),
    (
        {"trainer.checkpoint": {"every": 4, "best": {}}, "validation.every": 6, "data.heldout": SET},
        "trainer.checkpoint.best",
    ),
    ({"trainer.checkpoint.best": {}}, "trainer.checkpoint.best"),
    ({"trainer.checkpoint": {"best": {}}, "data.heldout": SET}, "trainer.checkpoint.every"),
    ({"trainer.checkpoint.directory": "/proc/checkpoints"}, "trainer.checkpoint.directory"),
    ({"trainer.checkpoint.directory": "prompts.jsonl/inside"}, "trainer.checkpoint.directory"),
    ({"rollout.workflow": "task.py:Flow"}, "rollout.workflow"),
    ({"rollout.workflow": "task.py:Broken"}, "rollout.workflow"),
    ({"rollout.workflow": "task.py:rows", "rollout.workflow_arguments": {"count": 1}}, "rollout.workflow"),
    (
        {"trainer.checkpoint": {"every": 1, "best": {"set": "tset"}}, "data.heldout": {"test": SET}},
        "trainer.checkpoint.best.set",
    ),
    (
        {"trainer.checkpoint": {"every": 1, "best": {"metric": "maj"}}, "data.heldout": {"a": SET, "b": SET}},
        "trainer.checkpoint.best.metric",
    ),
    (
        {
            "trainer.checkpoint": {"every": 1, "best": {"metric": "pass@8"}},
            "validation.samples_per_prompt": 6,
            "data.heldout": SET,
        },
        "trainer.checkpoint.best.metric",
    ),
    ({"data.curriculum": {"newest_share": 0}}, "data.curriculum.newest_share"),
    ({"rollout.rewards": []}, "rollout.rewards"),
    ({"name": "Not A Label"}, "name"),
    ({"name": "große Läufe"}, "name"),
    ({"name": True}, "name"),
    ({"name": 7}, "name"),
    ({"rollout.rewards": None}, "rollout.rewards"),
    ({"rollout.rewards": [None]}, "rollout.rewards.0"),
    ({"data.train": {"a": {"source": "jsonl", "path": None}}}, "data.train.a.path"),
    (
        {"algorithm.advantage": "gdpo", "algorithm.advantage_arguments": None},
        "algorithm.advantage_arguments.weights",
    ),
    ({"rollout.rewards": "exact_match"}, "rollout.rewards"),
    ({"rollout.rewards": ["exact_match"]}, "rollout.rewards.0"),
    ({"model": "Qwen/Qwen3-8B"}, "model"),
    ({"trainer.optimizer.learning_rate": None}, "trainer.optimizer.learning_rate"),
    ({"trainer.prompts_per_step": None}, "trainer.prompts_per_step"),
    ({"algorithm": "sftt"}, "algorithm.loss"),
    ({"algorithm": "sft", "rollout.group_size": 4}, "rollout.group_size"),
    ({"algorithm": "sft", "rollout.sampling.temperature": 0.7}, "rollout.sampling.temperature"),
    ({"algorithm": "sft"}, "rollout.rewards"),
    ({"algorithm": "sft", "rollout.rewards": None}, "use []"),
    ({"algorithm": {"loss": "sft", "kl": {"coefficient": 0.1}}}, "algorithm.kl"),
    ({"algorithm": {"loss": "sft", "advantage": "grpo"}}, "algorithm.advantage"),
    ({"algorithm": "sft", "data.answer_column": None}, "data.answer_column"),
    ({"algorithm": "sft", "data.train.source": "environment"}, "data.train.source"),
    ({"rollout.engine": "none"}, "rollout.engine"),
    (
        {"data.model_inputs_column": "answer", "trainer.context_parallel": 2},
        "data.model_inputs_column",
    ),
    (
        {"data.model_inputs_column": "answer", "rollout.workflow": "agent"},
        "data.model_inputs_column",
    ),
    ({"data.model_inputs_column": "pixel"}, "data.model_inputs_column"),
    ({"algorithm": "dpo"}, "data.answer_column"),
    ({"algorithm": {"loss": "dpo", "kl": {"coefficient": 0.1}}}, "algorithm.kl"),
    ({"algorithm": {"loss": "dpo", "aggregation": "token-mean"}}, "algorithm.aggregation"),
    ({"algorithm": "reward_model", "trainer.lora": {}}, "data.heldout"),
    ({"algorithm": "dpo", "rollout.group_size": 4}, "rollout.group_size"),
    ({"algorithm": "dpo", "data.answer_column": "answer"}, "data.rejected_column"),
    (
        {"algorithm": "dpo", "data.answer_column": "answer", "data.rejected_column": "answer"},
        "data.rejected_column",
    ),
    ({"teacher": {"path": "tiny:qwen2-3m", "tokenizer": "chars:01"}}, "teacher"),
    ({"teacher": {"path": "./gone"}}, "teacher.path"),
    ({"teacher": {"path": "./small"}}, "teacher.path 'FOLDER/small': its tokenizer"),
    (
        {"teacher": {"path": "./small", "url": "http://teacher:8000"}},
        "teacher.path 'FOLDER/small': its tokenizer",
    ),
    ({"teacher": {"path": "tiny:qwen2-3m"}, "algorithm": "sft"}, "teacher"),
    ({"teacher": {"path": "tiny:qwen2-3m"}, "algorithm.kl": {"coefficient": 0}}, "teacher"),
    ({"algorithm.advantage": "none"}, "algorithm.advantage"),
    ({"seed": -1}, "seed"),
    ({"trainer.steps": "many"}, "trainer.steps"),
    ({"trainer": 5}, "trainer"),
    ({"data.shuffle": "maybe"}, "data.shuffle"),
    ({"rollout.sampling.temperature": 50}, "rollout.sampling.temperature"),
    ({"trainer.dtype": "bfloat"}, "trainer.dtype"),
    ({"data.train.source": "json"}, "data.train.source"),
    ({"weight_sync.mode": "shaddow"}, "weight_sync.mode"),
    ({"trainer.steps": 10**40}, "trainer.steps"),
    ({"rollout.engine": "vlm"}, "rollout.engine"),
    ({"rollout.engine": "vllm"}, "rollout.engine"),
    ({"rollout.workflow": "multiturn"}, "rollout.workflow"),
    ({"rollout.workflow_arguments": {"x": 1}}, "rollout.workflow_arguments"),
    ({"rollout.rewards": [{"name": "exactmatch"}]}, "rollout.rewards.0.name"),
    ({"report_to": "wandb"}, "report_to"),
    ({"trackers": [{"kind": "wandbb"}]}, "trackers.0.kind"),
    ({"trackers": [{"kind": "tensorboard"}, {"kind": "tensorboard"}]}, "trackers"),
    ({"trackers": [{"kind": "tensorboard", "project": "team/x"}]}, "trackers.0.project"),
    ({"trackers": [{"kind": "tensorboard", "project": "../x"}]}, "trackers.0.project"),
    ({"rollout.rewards": [{"name": "gone.py:f"}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "task.py:rewrd"}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "task.py:value"}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "task.py:narrow"}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "task.py:reward", "arguments": {"scal": 2}}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "no_module_x:f"}]}, "rollout.rewards.0.name"),
    ({"rollout.rewards": [{"name": "exact_match", "bounds": [1, 0]}]}, "rollout.rewards.0.bounds"),
    ({"rollout.rewards": [{"name": "reasoning_gym"}]}, "rollout.rewards"),
    ({"data.answer_column": None}, "rollout.rewards.0.name"),
    ({"algorithm.advantage": "grop"}, "algorithm.advantage"),
    ({"algorithm.loss": "pppo"}, "algorithm.loss"),
    ({"algorithm.loss": "no_module_y:f"}, "algorithm.loss"),
    ({"algorithm.correction": "none"}, "algorithm.correction"),
    ({"algorithm.rejection": [{"level": "token"}]}, "algorithm.rejection.0"),
    ({"critic.warmup_steps": 2}, "critic"),
    ({"rollout.group_size": 1}, "rollout.group_size"),
    ({"rollout.group_size": 1, "algorithm.min_group_size": 1}, "algorithm.advantage"),
    (
        {
            "rollout.group_size": 1,
            "algorithm": {
                "advantage": "opo",
                "min_group_size": 1,
                "dynamic_sampling": True,
            },
        },
        "algorithm.dynamic_sampling",
    ),
    ({"rollout.sampling.temperature": 0}, "rollout.sampling.temperature"),
    ({"rollout.sampling.top_p": 0.9}, "rollout.sampling.top_p"),
    ({"rollout.sampling.top_k": 5, "rollout.engine": "fake"}, "rollout.sampling.top_k"),
    ({"algorithm.gamma": 0.9}, "algorithm.gamma"),
    ({"algorithm.value_clip": 0.1}, "algorithm.value_clip"),
    ({"algorithm.entropy_step": 0.1}, "algorithm.entropy_step"),
    ({"algorithm": {"loss": "reinforce", "clip_low": 0.1}}, "algorithm.clip_low"),
    ({"algorithm": {"loss": "dppo", "ratio_max": 9.0}}, "algorithm.loss_arguments.ratio_max"),
    ({"algorithm.advantage": "gdpo"}, "polite: 0.2"),
    (
        {
            "algorithm.advantage": "gdpo",
            "algorithm.advantage_arguments": {"weights": {"a": 1.0}},
            "algorithm.overlong.buffer_tokens": 1,
        },
        "algorithm.overlong.buffer_tokens",
    ),
    ({"trainer.updates_per_step": 5}, "trainer.updates_per_step"),
    ({"trainer.tensor_parallel": 2}, "trainer.world_size"),
    ({"trainer.optimizer.betas": [0.9, 1.5]}, "trainer.optimizer.betas"),
    ({"validation.only": True}, "validation.only"),
    ({"validation.replicas": 2}, "validation.replicas"),
    ({"data.prompt_template": "no place"}, "data.prompt_template"),
    ({"data.prompt_column": "promt"}, "data.prompt_column"),
    ({"data.answer_column": "ansver"}, "data.answer_column"),
    ({"data.prompt_column": "number"}, "data.prompt_column"),
    ({"data.train.path": "gone.jsonl"}, "data.train.path"),
    ({"data.train.path": "empty.jsonl"}, "data.train"),
    ({"data.train.path": "task.py"}, "data.train"),
    ({"data.heldout": {"source": "jsonl", "path": "gone.jsonl"}}, "data.heldout.path"),
    ({"data.train": {"source": "python", "path": "task.py:row"}}, "data.train.path"),
    ({"data.train": {"source": "python", "path": "task.py:rows"}}, "data.train.arguments"),
    ({"model.path": "./gone"}, "model.path"),
    ({"model.path": "tiny:huge"}, "model.path"),
    ({"model.path": "gone/nowhere"}, "model.path"),
    ({"model.path": "small"}, "model.path"),
    ({"model.tokenizer": "chars:aab"}, "model.tokenizer"),
    (
        {"model.path": "small", "model.tokenizer": "bytes", "rollout.max_response_tokens": 100_000},
        "rollout.max_response_tokens",
    ),
    ({"trainer.checkpoint.start_from": "gone"}, "trainer.checkpoint.start_from"),
    ({"trainer.world_size": 64}, "trainer.world_size"),
    ({"topology": {**GROUPS, "gpus": 64}}, "topology.gpus"),
    ({"topology": GROUPS}, "topology.task_groups"),
    ({"topology": {**GROUPS, "gpus": 4, "ratios": [0.5]}}, "topology.task_groups"),
    ({"topology": {**GROUPS, "gpus": 4, "ratios": [0.9, 0.9]}}, "topology.task_groups"),
    ({"weight_sync.publish_every": 3}, "weight_sync.publish_every"),
    ({"weight_sync.backend": "nccl"}, "weight_sync.backend"),
    ({"weight_sync": {"mode": "inplace"}, "rollout.engine": "fake"}, "weight_sync.mode"),
    ({"algorithm.max_staleness": 2, "trainer.generate_ahead_steps": 1}, "trainer.generate_ahead_steps"),
    # Types: words that YAML converts, missing values, lists in place of mappings.
    ({"name": "x" * 64}, "name"),
    ({"seed": True}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"rollout.replicas": False}, "rollout.replicas"),
    ({"algorithm.dual_clip": True}, "algorithm.dual_clip"),
    ({"model": "tiny:qwen2-0.4m"}, "model"),
    ({"model.path": None}, "model.path"),
    ({"data.train": []}, "data.train"),
    ({"data.train": None}, "data.train"),
    ({"rollout": None}, "rollout"),
    ({"rollout.workflow_arguments": None}, "rollout.workflow_arguments"),
    ({"trainer.profile_steps": 3}, "trainer.profile_steps"),
    ({"trainer.optimizer.betas": [0.9]}, "trainer.optimizer.betas.1"),
    ({"topology": {"task_groups": "train"}}, "topology.task_groups"),
    ({"limits": []}, "limits"),
    (
        {
            "rollout.workflow": "task.py:rows",
            "rollout.sandbox": {"kind": "docker", "image": "--privileged"},
        },
        "rollout.sandbox.image",
    ),
    ({"limits.step_timeout_s": 1e300}, "limits.step_timeout_s"),
    ({"validation.timeout_s": 1e12}, "validation.timeout_s"),
    ({"trackers": {}}, "trackers"),
    # Ranges.
    ({"rollout.sampling.temperature": float("nan")}, "rollout.sampling.temperature"),
    ({"rollout.sampling.stop": "x"}, "rollout.sampling.stop"),
    ({"rollout.sampling.stop": [""]}, "rollout.sampling.stop"),
    (
        {"model.tokenizer": "chars:0123456789=+ab", "rollout.sampling.stop": ["<|nonsense|>"]},
        "rollout.sampling.stop",
    ),
    ({"rollout.sampling.stop_token_ids": [-1]}, "rollout.sampling.stop_token_ids.0"),
    ({"rollout.sampling.stop_token_ids": [999]}, "rollout.sampling.stop_token_ids"),
    ({"rollout.group_size": 2000}, "rollout.group_size"),
    ({"rollout.max_response_tokens": 10**6}, "rollout.max_response_tokens"),
    ({"rollout.rewards": [{"name": "exact_match", "weight": float("inf")}]}, "rollout.rewards.0.weight"),
    ({"rollout.rewards": [{"name": "exact_match", "weight": 0}]}, "rewards.0.weight"),
    ({"rollout.rewards": [{"name": "exact_match", "timeout_s": 0}]}, "rewards.0.timeout_s"),
    ({"algorithm.dual_clip": 1}, "algorithm.dual_clip"),
    ({"algorithm.max_staleness": 65}, "algorithm.max_staleness"),
    ({"algorithm.kl": {"target": 0}}, "algorithm.kl.target"),
    ({"trainer.zero_stage": 2}, "trainer.zero_stage"),
    ({"trainer.profile_steps": [99]}, "trainer.profile_steps"),
    ({"trainer.optimizer.max_grad_norm": 0}, "trainer.optimizer.max_grad_norm"),
    ({"weight_sync.bucket_bytes": 1}, "weight_sync.bucket_bytes"),
    ({"validation.temperature": 0}, "validation.temperature"),
    ({"samples.max_bytes": 1}, "samples.max_bytes"),
    ({"limits.step_timeout_s": float("inf")}, "limits.step_timeout_s"),
    # Contradictions.
    ({"data.train.source": "environment", "data.train.limit": 50}, "data.train.source"),
    ({"rollout.rewards": [{"name": "environment"}]}, "rewards.0.name"),
    ({"rollout.workflow": "agent"}, "rollout.workflow"),
    ({"rollout.workflow": "environment"}, "rollout.workflow"),
    ({"rollout.routing_replay": "replay"}, "rollout.routing_replay"),
    ({"trainer.balancing": {"kind": "loss"}}, "trainer.balancing.kind"),
    ({"trainer.expert_parallel": 2}, "trainer.expert_parallel"),
    ({"trainer.context_parallel": 2}, "trainer.context_parallel"),
    ({"trainer.lora": {"target_modules": []}}, "trainer.lora.target_modules"),
    ({"trainer.lora": {"target_modules": ["qproj"]}}, "trainer.lora.target_modules"),
    (
        {"trainer.lora": {"rank": 4, "target_modules": ["embed_tokens"]}},
        "trainer.lora.target_modules",
    ),
    ({"algorithm.overlong": {"buffer_tokens": 999}}, "algorithm.overlong.buffer_tokens"),
    ({"algorithm.advantage_arguments": {"x": 1}}, "algorithm.advantage_arguments"),
    ({"algorithm.min_group_size": 9}, "algorithm.min_group_size"),
    ({"trainer.prompts_per_step": 5}, "trainer.prompts_per_step"),
    ({"topology": {"placement": "mixed"}, "rollout.replicas": 1}, "topology.placement"),
    ({"topology": {"gpus": 4}}, "topology.gpus"),
    ({"topology": {"scoring_ranks": 2}}, "topology.scoring_ranks"),
    (
        {"topology": {"task_groups": [["train", "generate"]], "ratios": [1.0], "gpus": 1}},
        "topology.task_groups",
    ),
    ({"topology": {**GROUPS, "task_groups": ["train", "gen"], "gpus": 2}}, "topology.task_groups"),
    ({"topology": {**GROUPS, "gpus": 3, "granularity": "node"}}, "topology.task_groups"),
    (
        {
            "rollout.workflow": "environment",
            "rollout.workflow_arguments": {"environment": "task.py:Silent"},
        },
        "rollout.workflow_arguments.environment",
    ),
    (
        {
            "rollout.workflow": "environment",
            "rollout.workflow_arguments": {
                "environment": "task.py:Game",
                "arguments": {"siz": 3},
            },
        },
        "rollout.workflow_arguments.arguments",
    ),
    # Keys without effect, because another key disables the feature that they configure.
    ({"data.demonstration": {"turns": "last"}}, "data.demonstration"),
    ({"data.rejected_column": "worse"}, "data.rejected_column"),
    ({"data.chat_template_arguments": {"enable_thinking": False}}, "data.chat_template_arguments"),
    ({"rollout.max_segments": 3, "rollout.partial_rollout": False}, "rollout.max_segments"),
    ({"algorithm.correction_floor": 0.5}, "algorithm.correction_floor"),
    (
        {"algorithm": {"correction_cap_mode": "mask", "correction_floor": 2, "correction_cap": 2}},
        "algorithm.correction_floor",
    ),
    ({"algorithm.kl": {"target": 0.1}}, "algorithm.kl.target"),
    ({"teacher": {**TEACHER, "server": "sglang"}}, "teacher.server"),
    ({"teacher": {**TEACHER, "min_reward": 0.5}}, "teacher.min_reward"),
    ({"teacher": {**TEACHER, "demonstration": "no place"}}, "teacher.demonstration"),
    (
        {
            "teacher": {"demonstration": "{response}"},
            "algorithm": {"loss": "distill"},
            "rollout.group_size": 1,
        },
        "teacher.demonstration",
    ),
    ({"teacher": {**TEACHER, "prompt_column": "solution"}}, "teacher.prompt_column"),
    ({"teacher": {**TEACHER, "url": "teacher:8000"}}, "teacher.url"),
    # Paths, models and addresses.
    ({"model.path": ""}, "model.path"),
    ({"model.tokenizer": ""}, "model.tokenizer"),
    ({"model.tokenizer": "chars:"}, "model.tokenizer"),
    ({"model.path": "tiny:"}, "model.path"),
    ({"model.warm_start": {"examples": "task.py:gone"}}, "model.warm_start.examples"),
    ({"model.warm_start": {"examples": "task.py:nothing"}}, "model.warm_start.examples"),
    ({"rollout.rewards": [{"name": "http://"}]}, "rewards.0.name"),
    ({"rollout.rewards": [{"name": "grpc://host"}]}, "rewards.0.name"),
    ({"rollout.rewards": [{"name": "http://host:port/x"}]}, "rewards.0.name"),
    ({"rollout.rewards": [{"name": "http://a..b/x"}]}, "rewards.0.name"),
    ({"trainer.st\u0435ps": 3}, "CYRILLIC SMALL LETTER IE"),
    ({"s\u200beed": 3}, "ZERO WIDTH SPACE"),
    ({"model.path": {"tiny": None}}, "quotes"),
    (
        {"rollout.rewards": [{"name": "task.py:reward", "arguments": {"scale": [float("inf")]}}]},
        "rewards.0.arguments",
    ),
    ({"rollout.rewards": [{"name": "http://" + "h" * 300}]}, "rewards.0.name"),
    (
        {"rollout.workflow": "agent", "rollout.workflow_arguments": {"agent": "http://[::1"}},
        "workflow_arguments.agent",
    ),
    (
        {
            "rollout.workflow": "environment",
            "rollout.workflow_arguments": {"environment": "openenv+http://"},
        },
        "workflow_arguments.environment",
    ),
    ({"rollout.rewards": [{"name": "ftp://host/x"}]}, "rewards.0.name"),
    ({"rollout.answer_pattern": "("}, "rollout.answer_pattern"),
    ({"trainer.checkpoint.directory": "task.py"}, "trainer.checkpoint.directory"),
    # Errors in data.
    ({"data.train": {"source": "parquet", "path": "task.py"}}, "data.train"),
    ({"data.train": {**SET, "path": "small"}}, "data.train.path"),
    ({"data.train": {**SET, "filters": [{"column": "answer", "matches": "("}]}}, "filters.0"),
    ({"data.max_prompt_tokens": 1, "data.prompt_template": "{prompt}!"}, "data.max_prompt_tokens"),
    ({"model.tokenizer": "chars:xyz"}, "model.tokenizer"),
    ({"data.answer_column": "a.b"}, "data.answer_column"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder with the files that specifications name; tests add only their specification."""
    folder = tmp_path_factory.mktemp("files")
    row = {"prompt": "a", "answer": "b", "number": 3}
    (folder / "prompts.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    (folder / "empty.jsonl").write_text("")
    (folder / "task.py").write_text(TASK)
    small = {"model_type": "qwen2", "vocab_size": 300, "max_position_embeddings": 512}
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(small))
    return folder


@pytest.fixture
def _offline(monkeypatch):
    def nowhere(*_, **__):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.fixture
def folder(files, tmp_path, _offline):
    """Returns a copy of the folder with files."""
    return shutil.copytree(files, tmp_path, dirs_exist_ok=True)


def problems_of(folder, changes):
    document = json.loads(json.dumps(RIGHT))
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        target = document
        for parent in parents:
            target = target.setdefault(parent, {})
        if value is GONE:
            del target[leaf]
        else:
            target[leaf] = value
    (folder / "spec.yaml").write_text(yaml.dump(document, Dumper=yaml.CSafeDumper))
    with pytest.raises(SpecError) as caught:
        read_checked(folder / "spec.yaml")
    texts = (problem.replace(str(folder), "FOLDER") for problem in caught.value.problems)
    return [text.replace(str(Path.cwd()), "CWD") for text in texts]


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(("changes", "key"), WRONG, ids=lambda value: str(value)[:60])
def test_a_mistake_is_reported_with_its_key(files, golden, changes, key):
    problems = problems_of(files, changes)
    assert key in "\n".join(problems), problems
    golden("validate_errors", json.dumps(changes), problems)


def test_one_mistake_is_reported_once(folder):
    for changes in (
        {"trainer.steps": "many"},
        {"model": GONE},
        {"data.train.path": "gone.jsonl"},
        {"topology": {**GROUPS, "gpus": 4, "ratios": [0.9, 0.9]}},
        {"rollout.rewards": [{"name": "ftp://host/x"}]},
        {"rollout.workflow": "agent"},
    ):
        assert len(problems_of(folder, changes)) == 1, changes


def test_mistakes_of_all_kinds_are_reported_together(folder):
    problems = problems_of(
        folder,
        {
            "nam": "x",
            "seed": "no",
            "rollout.group_size": 1,
            "algorithm.loss": "pppo",
            "model.path": "./gone",
            "data.prompt_column": "question",
            "rollout.rewards": [{"name": "task.py:gone"}],
        },
    )
    keys = (
        "nam",
        "seed",
        "rollout.group_size",
        "algorithm.loss",
        "model.path",
        "data.prompt_column",
    )
    for key in (*keys, "rollout.rewards.0.name"):
        assert any(problem.startswith(key) for problem in problems), (key, problems)
    assert len(problems) == 7, problems


def test_a_valid_specification_passes_and_an_alias_is_noted_once(folder):
    document = {**RIGHT, "trainer": {**RIGHT["trainer"], "generate_ahead_steps": 2}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    draft = read_checked(folder / "spec.yaml")
    assert draft.examined.spec.algorithm.max_staleness == 2
    (note,) = draft.notes
    assert "trainer.generate_ahead_steps" in note
    assert "algorithm.max_staleness" in note


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("steps: 10", "steps: 1:30", "trainer.steps"),
        ("steps: 10", "steps: 010", "'010' would be octal"),
        ("steps: 10", "steps: 2024-01-01", "trainer.steps"),
        ("steps: 10", f"steps: {'9' * 5000}", "5000 digits"),
        ("name: plain", "name: !!binary cGxhaW4=", "binary"),
        ("name: plain", 'name: "pl\\0ain"', "name"),
        ("path: prompts.jsonl", 'path: "a\\0b"', "data.train.path"),
        ("path: prompts.jsonl", f"path: {'x' * 5000}", "data.train"),
        ("name: plain", "name: plain\n1: x", "1: is not a known key"),
        ("name: exact_match", "name: broken.py:reward", "rollout.rewards.0.name"),
        ("name: exact_match", "name: ends.py:reward", "rollout.rewards.0.name"),
        ("name: exact_match", "name: http://a b/c", "rollout.rewards.0.name"),
        ("steps: 10", "steps: 10\n  lora: {rank: 1000}", "trainer.lora.rank"),
        ("path: tiny:qwen2-0.4m", "path: ~nobodyx/model", "model.path"),
    ],
)
def test_a_mistake_of_writing_is_reported(folder, old, new, key):
    (folder / "broken.py").write_text("raise RuntimeError('at import')")
    (folder / "ends.py").write_text("raise SystemExit(4)")
    text = yaml.safe_dump({**RIGHT, "name": "plain"})
    assert old in text
    (folder / "spec.yaml").write_text(text.replace(old, new))
    with pytest.raises(SpecError) as caught:
        read_checked(folder / "spec.yaml")
    assert key in str(caught.value)


def test_dates_are_texts_and_home_is_the_users(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    document = {
        **RIGHT,
        "name": "2024-01-01",
        "data": {"train": {**SET, "path": "~/prompts.jsonl"}},
    }
    text = yaml.safe_dump(document).replace("'2024-01-01'", "2024-01-01")
    (folder / "spec.yaml").write_text(text)
    spec = read_checked(folder / "spec.yaml").examined.spec
    assert (spec.name, spec.data.train.path) == ("2024-01-01", str(folder / "prompts.jsonl"))


@pytest.mark.parametrize(
    ("changes", "is_offered"),
    [
        ({"algorithm": "dpo", "rollout.rewards": []}, False),
        ({"rollout.rewards": [{"name": "exact_match"}]}, False),
        ({"rollout.rewards": [{"name": "task.py:reward"}]}, True),
    ],
)
def test_null_is_offered_for_the_answers_only_where_it_is_valid(folder, changes, is_offered):
    problems = problems_of(folder, {**changes, "data.answer_column": "gone"})
    assert any("or to null" in problem for problem in problems) is is_offered, problems


def test_a_duplicate_key_is_rejected(folder):
    (folder / "spec.yaml").write_text("name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(SpecError, match="'seed'"):
        read_checked(folder / "spec.yaml")


def test_a_run_elsewhere_is_not_checked_against_this_machine(folder):
    document = {**RIGHT, "trainer": {**RIGHT["trainer"], "world_size": 64}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    assert read_checked(folder / "spec.yaml", is_here=False).examined.spec.trainer.world_size == 64


def test_several_processes_do_not_rewrite_the_messages():
    options = {"--update-golden": True, "numprocesses": 2}
    with pytest.raises(pytest.UsageError):
        check_can_update(
            SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
        )
