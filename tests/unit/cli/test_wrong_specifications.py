"""Wrong specifications: each mistake is named with its key and what would do, without the network."""

import json
import socket

import pytest
import yaml

from services.cli.preflight import read_checked
from services.common.runspec.loader import SpecError
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
"""
GROUPS = {"task_groups": ["train", "generate"], "ratios": [0.5, 0.5]}

# What is set, and what is told: the key, then words of the fix.
WRONG = [
    ({"nam": "x"}, ["nam:", "name"]),
    ({"trainer.stepz": 3}, ["trainer.stepz", "'trainer.steps'"]),
    ({"trainer.learning_rate": 1e-5}, ["trainer.learning_rate", "trainer.optimizer.learning_rate"]),
    ({"trainer.optimizer.lr": 1e-5}, ["trainer.optimizer.lr", "learning_rate"]),
    ({"group_size": 8}, ["group_size", "rollout.group_size"]),
    ({"trainer.batch_size": 8}, ["trainer.batch_size", "trainer.prompts_per_step"]),
    ({"rollout.max_new_tokens": 8}, ["rollout.max_new_tokens", "rollout.max_response_tokens"]),
    (
        {"trainer.activation_checkpointing": "selectiv"},
        ["trainer.activation_checkpointing: ", "true or false or 'auto' or 'selective' or a whole number",
         "got 'selectiv'; did you mean 'selective'?"],
    ),
    (
        {"trainer.activation_checkpointing": -3, "trainer.cpu_offload": "all"},
        ["trainer.activation_checkpointing: ", "or equal to 2, got -3", "'optimizer', got 'all'"],
    ),
    ({"rollout.engine_arguments": {"max_kv_tokens": 1e5}}, ["max_kv_tokens", "number of tokens"]),
    ({"rollout.segment_tokens": 0}, ["rollout.segment_tokens", "greater than or equal to 1, got 0"]),
    (
        {"rollout.segment_tokens": 256},
        ["rollout.segment_tokens (256)", "below rollout.max_response_tokens (256)"],
    ),
    (
        {"transferqueue.quota_bytes": 1 << 20, "rollout.max_response_tokens": 4000},
        # 4 prompts of 1,024 tokens, each with 8 responses of 9 bytes a token.
        ["transferqueue.quota_bytes is 1,048,576", "1,168,384", "raise it, to 2336768"],
    ),
    ({"rollout.rewards": [{"nam": "exact_match"}]}, ["rollout.rewards.0.nam", "name"]),
    ({"name": GONE}, ["name:", "required"]),
    ({"model": GONE}, ["model:", "required"]),
    ({"trainer.steps": GONE}, ["trainer.steps", "required"]),
    ({"data.epochs": 2}, ["data.epochs", "trainer.steps", "remove one"]),
    ({"data.epochs": 0, "trainer.steps": GONE}, ["data.epochs", "greater than 0"]),
    (
        {"data.train": {"a": {**SET, "weight": 2}, "b": SET}},
        ["data.train.b.weight", "for all"],
    ),
    ({"data.train": {"a": {**SET, "weight": 0}}}, ["data.train.a.weight", "greater than 0"]),
    ({"data.train": {"a": {**SET, "weigth": 1}}}, ["data.train.a.weigth", "'data.train.NAME.weight'"]),
    ({"data.train": {"Not A Name": SET}}, ["data.train.Not A Name", "lower-case"]),
    ({"data.train": {"a": {"path": "x"}}}, ["data.train.a.source", "required"]),
    ({"data.train": {"a": {**SET, "path": "gone.jsonl"}}}, ["data.train.a.path", "gone.jsonl"]),
    (
        {"data.train": {"a": SET, "b": {**SET, "prompt_column": "question"}}},
        ["data.train.b.prompt_column is 'question'", "'prompt'"],
    ),
    (
        {"data.train": {"a": SET, "b": {**SET, "source": "python", "path": "task.py:nothing"}}},
        ["data.train.b", "no rows"],
    ),
    (
        {"data.heldout": {"a": {**SET, "rewards": [{"name": "exactmatch"}]}}},
        ["data.heldout.a.rewards.0.name", "'exact_match'?"],
    ),
    (
        {"data.heldout": {"a": {**SET, "rewards": [{"name": "gone.py:f"}]}}},
        ["data.heldout.a.rewards.0.name", "gone.py"],
    ),
    ({"data.train": {"a": {**SET, "prompt_template": "x"}}}, ["data.train.a.prompt_template"]),
    (
        {"data.train": {"a": SET, "b": {**SET, "filters": [{"column": "number", "at_least": 4}]}}},
        ["data.train.b.filters", "none of 4 rows"],
    ),
    (
        {"data.train": {**SET, "filters": [{"column": "numbr", "at_least": 4}]}},
        ["data.train.filters.0.column", "'number'"],
    ),
    ({"data.train": {**SET, "filters": [{"column": "number"}]}}, ["data.train.filters.0", "condition"]),
    (
        {"data.train": {**SET, "filters": [{"function": "task.py:gone"}]}},
        ["data.train.filters.0.function", "'gone'"],
    ),
    (
        {"data.curriculum": {"hopeless_to": 0.5, "solved_from": 0.5}},
        ["data.curriculum.hopeless_to", "below", "data.curriculum.solved_from"],
    ),
    ({"data.curriculum": {"hopeless_to": None, "solved_from": None}}, ["data.curriculum", "nothing"]),
    (
        {"data.curriculum": {"function": "task.py:gone"}},
        ["data.curriculum.function", "'gone'"],
    ),
    (
        {"data.curriculum": {"arguments": {"x": 1}}},
        ["data.curriculum.arguments", "data.curriculum.function"],
    ),
    (
        {"trainer.checkpoint": {"every": 4, "best": {}}, "validation.every": 6, "data.heldout": SET},
        ["trainer.checkpoint.best", "validation.every", "multiple"],
    ),
    ({"trainer.checkpoint.best": {}}, ["trainer.checkpoint.best", "data.heldout"]),
    (
        {"trainer.checkpoint": {"every": 1, "best": {"set": "tset"}}, "data.heldout": {"test": SET}},
        ["trainer.checkpoint.best.set", "'test'?"],
    ),
    (
        {
            "trainer.checkpoint": {"every": 1, "best": {"metric": "maj"}},
            "data.heldout": {"a": SET, "b": SET},
        },
        ["trainer.checkpoint.best.metric", "one set", "a, b"],
    ),
    (
        {
            "trainer.checkpoint": {"every": 1, "best": {"metric": "pass@8"}},
            "validation.samples_per_prompt": 6,
            "data.heldout": SET,
        },
        ["trainer.checkpoint.best.metric", "pass@4, pass@6"],
    ),
    ({"data.curriculum": {"newest_share": 0}}, ["data.curriculum.newest_share", "greater than 0"]),
    ({"rollout.rewards": []}, ["rollout.rewards", "at least 1"]),
    ({"name": "Not A Label"}, ["name: ", "lower-case", "'not-a-label'"]),
    ({"name": "große Läufe"}, ["name: ", "lower-case", "'grosse-laufe'"]),
    ({"name": True}, ["name: ", "got true", "quotes"]),
    ({"name": 7}, ["name: ", '"7"']),
    ({"rollout.rewards": None}, ["rollout.rewards: ", "a list", "got null"]),
    ({"rollout.rewards": "exact_match"}, ["rollout.rewards: ", "a list", "[...]"]),
    ({"rollout.rewards": ["exact_match"]}, ["rollout.rewards.0: ", "{name: exact_match}"]),
    ({"model": "Qwen/Qwen3-8B"}, ["model: ", "{path: Qwen/Qwen3-8B}"]),
    (
        {"trainer.optimizer.learning_rate": None},
        ["trainer.optimizer.learning_rate: ", "a number", "got null", "leave it out"],
    ),
    ({"trainer.prompts_per_step": None}, ["trainer.prompts_per_step: ", "it is required"]),
    ({"algorithm": "sftt"}, ["algorithm.loss", "'sft'?"]),
    ({"algorithm": "sft", "rollout.group_size": 4}, ["rollout.group_size", "leave it out"]),
    ({"algorithm": "sft", "rollout.sampling.temperature": 0.7}, ["temperature", "sft", "leave"]),
    ({"algorithm": "sft"}, ["rollout.rewards", "data.heldout", "remove"]),
    ({"algorithm": {"loss": "sft", "kl": {"coefficient": 0.1}}}, ["algorithm.kl", "leave it out"]),
    ({"algorithm": {"loss": "sft", "advantage": "grpo"}}, ["algorithm.advantage", "'grpo'"]),
    ({"algorithm": "sft", "data.answer_column": None}, ["data.answer_column", "'user'"]),
    ({"algorithm": "sft", "data.train.source": "environment"}, ["data.train.source", "answers"]),
    ({"rollout.engine": "none"}, ["rollout.engine", "sampled", "'torch'"]),
    (
        {"data.model_inputs_column": "answer", "trainer.context_parallel": 2},
        ["data.model_inputs_column", "trainer.context_parallel", "1"],
    ),
    (
        {"data.model_inputs_column": "answer", "rollout.workflow": "agent"},
        ["data.model_inputs_column", "'agent'", "leave it out"],
    ),
    ({"data.model_inputs_column": "pixel"}, ["data.model_inputs_column", "'pixel'", "null"]),
    ({"algorithm": "dpo"}, ["data.answer_column", "'chosen'", "'answer'"]),
    ({"algorithm": {"loss": "dpo", "kl": {"coefficient": 0.1}}}, ["algorithm.kl", "leave it out"]),
    ({"algorithm": {"loss": "dpo", "aggregation": "token-mean"}}, ["algorithm.aggregation", "dpo"]),
    ({"algorithm": "dpo", "rollout.group_size": 4}, ["rollout.group_size", "each has 2"]),
    ({"algorithm": "dpo", "data.answer_column": "answer"}, ["data.rejected_column", "None"]),
    (
        {"algorithm": "dpo", "data.answer_column": "answer", "data.rejected_column": "answer"},
        ["data.rejected_column", "the same", "remove the row"],
    ),
    ({"teacher": {"path": "tiny:qwen2-3m", "tokenizer": "chars:01"}}, ["teacher", "same family"]),
    ({"teacher": {"path": "./gone"}}, ["teacher.path", "no folder"]),
    ({"teacher": {"path": "tiny:qwen2-3m"}, "algorithm": "sft"}, ["teacher", "sft", "remove"]),
    (
        {"teacher": {"path": "tiny:qwen2-3m"}, "algorithm.kl": {"coefficient": 0}},
        ["teacher", "algorithm.kl.coefficient", "leave"],
    ),
    ({"algorithm.advantage": "none"}, ["algorithm.advantage", "nothing would be trained"]),
    ({"seed": -1}, ["seed", "greater than or equal to 0"]),
    ({"trainer.steps": "many"}, ["trainer.steps", "whole number", "'many'"]),
    ({"trainer": 5}, ["trainer", "got 5"]),
    ({"data.shuffle": "maybe"}, ["data.shuffle", "true or false"]),
    ({"rollout.sampling.temperature": 50}, ["rollout.sampling.temperature", "10"]),
    ({"trainer.dtype": "bfloat"}, ["trainer.dtype", "'bfloat16'"]),
    ({"data.train.source": "json"}, ["data.train.source", "'jsonl'"]),
    ({"weight_sync.mode": "shaddow"}, ["weight_sync.mode", "'shadow'"]),
    ({"trainer.steps": 10**40}, ["trainer.steps", "2**63"]),
    ({"rollout.engine": "vlm"}, ["rollout.engine", "'vllm'?"]),
    ({"rollout.engine": "vllm"}, ["rollout.engine", "not installed", "'torch'"]),
    ({"rollout.workflow": "multiturn"}, ["rollout.workflow", "'multi_turn'?"]),
    ({"rollout.workflow_arguments": {"x": 1}}, ["rollout.workflow_arguments", "'x'"]),
    ({"rollout.rewards": [{"name": "exactmatch"}]}, ["rollout.rewards.0.name", "'exact_match'?"]),
    ({"report_to": "wandb"}, ["report_to", "'trackers'"]),
    ({"trackers": [{"kind": "wandbb"}]}, ["trackers.0.kind", "'wandb'"]),
    (
        {"trackers": [{"kind": "tensorboard"}, {"kind": "tensorboard"}]},
        ["trackers", "named 2 times", "leave one"],
    ),
    (
        {"trackers": [{"kind": "tensorboard", "project": "team/x"}]},
        ["trackers.0.project", "only wandb has teams"],
    ),
    (
        {"trackers": [{"kind": "tensorboard", "project": "../x"}]},
        ["trackers.0.project", "at most one '/'"],
    ),
    ({"rollout.rewards": [{"name": "gone.py:f"}]}, ["rollout.rewards.0.name", "gone.py", "path"]),
    ({"rollout.rewards": [{"name": "task.py:rewrd"}]}, ["rollout.rewards.0.name", "reward"]),
    ({"rollout.rewards": [{"name": "task.py:value"}]}, ["rollout.rewards.0.name", "function"]),
    ({"rollout.rewards": [{"name": "task.py:narrow"}]}, ["rollout.rewards.0.name", "arguments"]),
    (
        {"rollout.rewards": [{"name": "task.py:reward", "arguments": {"scal": 2}}]},
        ["rollout.rewards.0.name", "scal", "arguments"],
    ),
    ({"rollout.rewards": [{"name": "no_module_x:f"}]}, ["rollout.rewards.0.name", "no_module_x"]),
    (
        {"rollout.rewards": [{"name": "exact_match", "bounds": [1, 0]}]},
        ["rollout.rewards.0.bounds", "smaller one first"],
    ),
    ({"rollout.rewards": [{"name": "reasoning_gym"}]}, ["rollout.rewards", "data.train.source"]),
    ({"data.answer_column": None}, ["rollout.rewards.0.name", "data.answer_column"]),
    ({"algorithm.advantage": "grop"}, ["algorithm.advantage", "'grpo'?"]),
    ({"algorithm.loss": "pppo"}, ["algorithm.loss", "'ppo'?"]),
    ({"algorithm.loss": "no_module_y:f"}, ["algorithm.loss", "no_module_y"]),
    ({"algorithm.correction": "none"}, ["algorithm.correction", "algorithm.max_staleness"]),
    ({"algorithm.rejection": [{"level": "token"}]}, ["algorithm.rejection.0", "upper"]),
    ({"critic.warmup_steps": 2}, ["critic", "'gae'"]),
    ({"rollout.group_size": 1}, ["rollout.group_size", "algorithm.min_group_size"]),
    ({"rollout.sampling.temperature": 0}, ["rollout.sampling.temperature", "above 0"]),
    ({"rollout.sampling.top_p": 0.9}, ["rollout.sampling.top_p", "must be 1"]),
    ({"trainer.updates_per_step": 5}, ["trainer.updates_per_step", "trainer.prompts_per_step"]),
    ({"trainer.tensor_parallel": 2}, ["trainer.world_size", "multiple"]),
    ({"trainer.optimizer.betas": [0.9, 1.5]}, ["trainer.optimizer.betas", "below 1"]),
    ({"validation.only": True}, ["validation.only", "data.heldout"]),
    ({"validation.replicas": 2}, ["validation.replicas", "rollout.replicas"]),
    ({"data.prompt_template": "no place"}, ["data.prompt_template", "{prompt}"]),
    ({"data.prompt_column": "promt"}, ["data.prompt_column", "'prompt'?"]),
    ({"data.answer_column": "ansver"}, ["data.answer_column", "'answer'?"]),
    ({"data.prompt_column": "number"}, ["data.prompt_column", "text", "another column"]),
    ({"data.train.path": "gone.jsonl"}, ["data.train.path", "gone.jsonl", "check the path"]),
    ({"data.train.path": "empty.jsonl"}, ["data.train", "no rows", "at least one"]),
    ({"data.train.path": "task.py"}, ["data.train", "no JSON", "one JSON object"]),
    ({"data.heldout": {"source": "jsonl", "path": "gone.jsonl"}}, ["data.heldout.path", "gone"]),
    ({"data.train": {"source": "python", "path": "task.py:row"}}, ["data.train.path", "rows"]),
    ({"data.train": {"source": "python", "path": "task.py:rows"}}, ["data.train.arguments"]),
    ({"model.path": "./gone"}, ["model.path", "no folder", "tiny:"]),
    ({"model.path": "tiny:huge"}, ["model.path", "tiny:qwen2-0.4m"]),
    ({"model.path": "gone/nowhere"}, ["model.path", "gone/nowhere", "does not answer", "local"]),
    ({"model.path": "small"}, ["model.path", "*.safetensors"]),
    ({"model.tokenizer": "chars:aab"}, ["model.tokenizer", "each once"]),
    (
        {"model.path": "small", "model.tokenizer": "bytes", "rollout.max_response_tokens": 100_000},
        ["rollout.max_response_tokens", "512", "lower"],
    ),
    ({"trainer.checkpoint.start_from": "gone"}, ["trainer.checkpoint.start_from", "name a folder"]),
    ({"trainer.world_size": 64}, ["trainer.world_size", "66 GPUs", "has none"]),
    ({"topology": {**GROUPS, "gpus": 64}}, ["topology.gpus", "64 GPUs", "has none"]),
    ({"topology": GROUPS}, ["topology.task_groups", "topology.gpus"]),
    ({"topology": {**GROUPS, "gpus": 4, "ratios": [0.5]}}, ["topology.task_groups", "one ratio"]),
    ({"topology": {**GROUPS, "gpus": 4, "ratios": [0.9, 0.9]}}, ["topology.task_groups", "most 1"]),
    ({"weight_sync.publish_every": 3}, ["weight_sync.publish_every", "algorithm.max_staleness"]),
    ({"weight_sync.backend": "nccl"}, ["weight_sync.backend", "no GPU", "'gloo'"]),
    ({"weight_sync": {"mode": "inplace"}, "rollout.engine": "fake"}, ["weight_sync.mode", "shadow"]),
    (
        {"algorithm.max_staleness": 2, "trainer.generate_ahead_steps": 1},
        ["trainer.generate_ahead_steps", "algorithm.max_staleness", "keep one"],
    ),
    # Types: what YAML makes of a word, a missing value, a list for a mapping.
    ({"name": True}, ["name"]),
    ({"name": 7}, ["name"]),
    ({"name": "x" * 64}, ["name"]),
    ({"seed": True}, ["seed", "number", "true"]),
    ({"seed": 1.5}, ["seed"]),
    ({"rollout.replicas": False}, ["rollout.replicas", "number", "false"]),
    ({"algorithm.dual_clip": True}, ["algorithm.dual_clip", "number"]),
    ({"model": "tiny:qwen2-0.4m"}, ["model"]),
    ({"model.path": None}, ["model.path"]),
    ({"data.train": []}, ["data.train"]),
    ({"data.train": None}, ["data.train"]),
    ({"rollout": None}, ["rollout"]),
    ({"rollout.rewards": "exact_match"}, ["rollout.rewards", "'exact_match'"]),
    ({"rollout.rewards": ["exact_match"]}, ["rollout.rewards.0"]),
    ({"rollout.workflow_arguments": None}, ["rollout.workflow_arguments"]),
    ({"trainer.profile_steps": 3}, ["trainer.profile_steps", "got 3"]),
    ({"trainer.optimizer.learning_rate": None}, ["trainer.optimizer.learning_rate", "number"]),
    ({"trainer.optimizer.betas": [0.9]}, ["trainer.optimizer.betas.1", "required"]),
    ({"topology": {"task_groups": "train"}}, ["topology.task_groups", "'train'"]),
    ({"limits": []}, ["limits"]),
    ({"trackers": {}}, ["trackers", "got {}"]),
    # Ranges.
    ({"rollout.sampling.temperature": float("nan")}, ["rollout.sampling.temperature", "finite"]),
    ({"rollout.sampling.stop": "x"}, ["rollout.sampling.stop", "'x'"]),
    ({"rollout.sampling.stop": [""]}, ["rollout.sampling.stop", "empty text"]),
    ({"rollout.sampling.stop_token_ids": [-1]}, ["rollout.sampling.stop_token_ids.0", "0"]),
    ({"rollout.sampling.stop_token_ids": [999]}, ["rollout.sampling.stop_token_ids", "258 tokens"]),
    ({"rollout.group_size": 2000}, ["rollout.group_size", "1024"]),
    ({"rollout.max_response_tokens": 10**6}, ["rollout.max_response_tokens", "32768"]),
    ({"rollout.rewards": [{"name": "exact_match", "weight": float("inf")}]}, ["weight", "finite"]),
    ({"rollout.rewards": [{"name": "exact_match", "weight": 0}]}, ["rewards.0.weight", "be 0"]),
    ({"rollout.rewards": [{"name": "exact_match", "timeout_s": 0}]}, ["rewards.0.timeout_s"]),
    ({"algorithm.dual_clip": 1}, ["algorithm.dual_clip", "greater than 1"]),
    ({"algorithm.max_staleness": 65}, ["algorithm.max_staleness", "64"]),
    ({"algorithm.kl": {"target": 0}}, ["algorithm.kl.target", "greater than 0"]),
    ({"trainer.zero_stage": 2}, ["trainer.zero_stage", "1 or 3"]),
    ({"trainer.profile_steps": [99]}, ["trainer.profile_steps", "trainer.steps is 10"]),
    ({"trainer.optimizer.max_grad_norm": 0}, ["trainer.optimizer.max_grad_norm"]),
    ({"weight_sync.bucket_bytes": 1}, ["weight_sync.bucket_bytes", "65536"]),
    ({"validation.temperature": 0}, ["validation.temperature", "greater than 0"]),
    ({"samples.max_bytes": 1}, ["samples.max_bytes", "1048576"]),
    ({"limits.step_timeout_s": float("inf")}, ["limits.step_timeout_s", "finite"]),
    # Contradictions.
    ({"data.train.source": "environment", "data.train.limit": 50}, ["data.train.source", "workflow"]),
    ({"rollout.rewards": [{"name": "environment"}]}, ["rewards.0.name", "rollout.workflow"]),
    ({"rollout.workflow": "agent"}, ["rollout.workflow", "'agent'", "workflow_arguments"]),
    ({"rollout.workflow": "environment"}, ["rollout.workflow", "'environment'"]),
    ({"rollout.routing_replay": "replay"}, ["rollout.routing_replay", "no experts", "'off'"]),
    ({"trainer.balancing": {"kind": "loss"}}, ["trainer.balancing.kind", "no experts"]),
    ({"trainer.expert_parallel": 2}, ["trainer.expert_parallel", "divisor"]),
    ({"trainer.context_parallel": 2}, ["trainer.context_parallel", "multiple"]),
    ({"trainer.lora": {"target_modules": []}}, ["trainer.lora.target_modules", "empty"]),
    ({"trainer.lora": {"target_modules": ["qproj"]}}, ["trainer.lora.target_modules", "'q_proj'?"]),
    ({"algorithm.overlong": {"buffer_tokens": 999}}, ["algorithm.overlong.buffer_tokens", "lower"]),
    ({"algorithm.advantage_arguments": {"x": 1}}, ["algorithm.advantage_arguments", "'grpo'"]),
    ({"algorithm.min_group_size": 9}, ["algorithm.min_group_size", "rollout.group_size"]),
    ({"trainer.prompts_per_step": 5}, ["trainer.prompts_per_step", "4 rows"]),
    ({"topology": {"placement": "mixed"}, "rollout.replicas": 1}, ["topology.placement", "rollout.replicas"]),
    ({"topology": {"gpus": 4}}, ["topology.gpus", "topology.task_groups"]),
    ({"topology": {"scoring_ranks": 2}}, ["topology.scoring_ranks", "leave scoring_ranks out"]),
    (
        {"topology": {"task_groups": [["train", "generate"]], "ratios": [1.0], "gpus": 1}},
        ["topology.task_groups", "group of its own"],
    ),
    (
        {"topology": {**GROUPS, "task_groups": ["train", "gen"], "gpus": 2}},
        ["topology.task_groups", "no task 'gen'"],
    ),
    ({"topology": {**GROUPS, "gpus": 3, "granularity": "node"}}, ["topology.task_groups", "whole nodes"]),
    # Paths, models and addresses.
    ({"model.path": ""}, ["model.path", "at least 1 character"]),
    ({"model.tokenizer": ""}, ["model.tokenizer", "at least 1 character"]),
    ({"model.tokenizer": "chars:"}, ["model.tokenizer", "at least one symbol"]),
    ({"model.path": "tiny:"}, ["model.path", "no preset"]),
    ({"model.warm_start": {"examples": "task.py:gone"}}, ["model.warm_start.examples", "'gone'"]),
    ({"model.warm_start": {"examples": "task.py:nothing"}}, ["model.warm_start.examples", "2 arg"]),
    ({"rollout.rewards": [{"name": "http://"}]}, ["rewards.0.name", "no address"]),
    ({"rollout.rewards": [{"name": "grpc://host"}]}, ["rewards.0.name", "HOST:PORT"]),
    ({"rollout.rewards": [{"name": "http://host:port/x"}]}, ["rewards.0.name", "no address"]),
    ({"rollout.rewards": [{"name": "ftp://host/x"}]}, ["rewards.0.name", "no reward", "http://"]),
    ({"rollout.answer_pattern": "("}, ["rollout.answer_pattern", "no regular expression"]),
    ({"trainer.checkpoint.directory": "task.py"}, ["trainer.checkpoint.directory", "is a file"]),
    # Faults in the data.
    ({"data.train": {"source": "parquet", "path": "task.py"}}, ["data.train", "no Parquet file"]),
    ({"data.train": {**SET, "path": "small"}}, ["data.train.path", "no file"]),
    ({"data.train": {**SET, "filters": [{"column": "answer", "matches": "("}]}}, ["filters.0", "regular"]),
    ({"data.max_prompt_tokens": 1, "data.prompt_template": "{prompt}!"}, ["data.max_prompt_tokens (1)"]),
    ({"model.tokenizer": "chars:xyz"}, ["no token for 'a'", "model.tokenizer"]),
    ({"data.answer_column": "a.b"}, ["data.answer_column", "'a.b'"]),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def nowhere(*_, **__):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    row = {"prompt": "a", "answer": "b", "number": 3}
    (tmp_path / "prompts.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "task.py").write_text(TASK)
    small = {"model_type": "qwen2", "vocab_size": 300, "max_position_embeddings": 512}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    return tmp_path


def told(folder, changes):
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
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(SpecError) as caught:
        read_checked(folder / "spec.yaml")
    return caught.value.problems


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named_with_its_key_and_a_fix(folder, changes, words):
    problems = told(folder, changes)
    assert all(word in "\n".join(problems) for word in words), problems


def test_there_are_sixty():
    assert len(WRONG) >= 60


def test_one_mistake_is_told_once(folder):
    for changes in (
        {"trainer.steps": "many"},
        {"model": GONE},
        {"data.train.path": "gone.jsonl"},
        {"topology": {**GROUPS, "gpus": 4, "ratios": [0.9, 0.9]}},
        {"rollout.rewards": [{"name": "ftp://host/x"}]},
        {"rollout.workflow": "agent"},
    ):
        assert len(told(folder, changes)) == 1, changes


def test_mistakes_of_all_kinds_are_told_together(folder):
    problems = told(
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


def test_what_is_right_passes_and_another_name_of_a_key_is_said_once(folder):
    document = {**RIGHT, "trainer": {**RIGHT["trainer"], "generate_ahead_steps": 2}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    draft = read_checked(folder / "spec.yaml")
    assert draft.examined.spec.algorithm.max_staleness == 2
    assert draft.notes == (
        "trainer.generate_ahead_steps is another name of algorithm.max_staleness",
    )


def test_a_key_given_twice_is_refused(folder):
    (folder / "spec.yaml").write_text("name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(SpecError, match="'seed' is given twice"):
        read_checked(folder / "spec.yaml")


def test_a_run_elsewhere_needs_nothing_of_this_machine(folder):
    document = {**RIGHT, "trainer": {**RIGHT["trainer"], "world_size": 64}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    assert read_checked(folder / "spec.yaml", is_here=False).examined.spec.trainer.world_size == 64
