"""Tests of the checks before a run starts, which report all problems."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.checks.start.preflight import read_checked
from services.common.models.loading import build_model
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import ModelSpec
from tests.helpers.mixtures import tiny_config
from tests.helpers.preflight import check
from tests.helpers.specs import changed


def spec_with(tmp_path, **changes):
    data = tmp_path / "prompts.jsonl"
    data.write_text(4 * (json.dumps({"prompt": "a", "answer": "b"}) + "\n"))
    data_set = {"train": {"source": "jsonl", "path": str(data)}}
    changes["data"] = {**data_set, **changes.get("data", {})}
    return parse_spec(changed(**changes))


def test_a_specification_that_can_run_passes(tmp_path):
    check(spec_with(tmp_path))


def test_a_model_whose_image_processor_does_not_load_is_a_problem(tmp_path, monkeypatch):
    def processor(model):
        raise ValueError("model.path has no image processor")

    monkeypatch.setattr("services.rollout.data.images._processor", processor)
    model = {"path": "tiny:qwen2_5_vl-0.6m", "images": True, "tokenizer": "bytes"}
    with pytest.raises(SpecError, match=r"model\.path"):
        check(spec_with(tmp_path, model=model))


@pytest.mark.parametrize("name", ["http://judge/score", "https://judge/score", "grpc://judge:1"])
def test_built_in_rewards_and_services_pass(tmp_path, name):
    check(spec_with(tmp_path, rollout={"rewards": [{"name": name}]}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"path": "/no/such/folder"}}, ["model.path", "/no/such/folder", "tiny:"]),
        ({"model": {"path": "tiny:huge"}}, ["tiny:huge", "tiny:qwen2-0.4m"]),
        ({"rollout": {"engine": "vllm"}}, ["vllm", "not installed", "torch"]),
        ({"rollout": {"rewards": [{"name": "nope"}]}}, ["rollout.rewards.0.name", "math_verify"]),
        (
            {
                "rollout": {
                    "rewards": [{"name": "exact_match"}],
                    "workflow": "agent",
                    "workflow_arguments": {"agent": "no_module_y:f"},
                }
            },
            ["rollout.workflow_arguments.agent", "no_module_y"],
        ),
        (
            {"rollout": {"rewards": [{"name": "exact_match"}], "workflow": "multi_turn"}},
            ["rollout.workflow_arguments", "data.chat_template", "result_template"],
        ),
        (
            {"rollout": {"rewards": [{"name": "no_module_x:f"}]}},
            ["rollout.rewards.0.name", "no_module_x"],
        ),
    ],
)
def test_a_problem_has_its_key_and_alternatives(tmp_path, changes, words):
    with pytest.raises(SpecError) as caught:
        check(spec_with(tmp_path, **changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_model_that_would_not_be_exact_is_rejected_by_its_config_alone(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "phi3",
        "rope_scaling": {"type": "longrope"},
        "vocab_size": 100,
        "quantization_config": {"quant_method": "fp8"},
    }
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    spec = spec_with(
        tmp_path,
        model={"path": str(folder), "tokenizer": "bytes"},
        data={"max_prompt_tokens": 600},
        rollout={"rewards": [{"name": "exact_match"}], "max_response_tokens": 512},
        trainer={"tensor_parallel": 2, "world_size": 2},
    )
    with pytest.raises(SpecError) as caught:
        check(spec)
    assert len(caught.value.problems) == 7
    for word in (
        "'fp8'",
        "*.safetensors",
        "longrope",
        "trainer.tensor_parallel",
        "vocab_size",
        "data.max_prompt_tokens",
        "rollout.max_response_tokens",
    ):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "list"), ('{"vocab_size": "many"}', "vocab_size"), ("{x", "name")]
)
def test_an_invalid_config_is_rejected(tmp_path, text, message):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    with pytest.raises(SpecError, match=f"model.path.*{message}"):
        check(spec_with(tmp_path, model={"path": str(folder), "tokenizer": "bytes"}))


def test_all_problems_of_a_model_folder_are_reported_at_once(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen3", "vocab_size": 300, "head_dim": 7}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(SpecError) as caught:
        check(spec_with(tmp_path, model={"path": str(folder)}))
    weights, tokenizer, shape = caught.value.problems
    assert "model.safetensors" in weights
    assert "tokenizer" in tokenizer
    assert "even rotary dimension" in shape, shape


def test_tokens_and_chats_are_tried_before_workers_start(tmp_path):
    folder = tmp_path / "tokenizer"
    load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m")).save(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    rollout = {"rewards": [{"name": "exact_match"}], "sampling": {"stop_token_ids": [2, 400]}}
    spec = spec_with(
        tmp_path,
        model={"tokenizer": str(folder)},
        data={"chat_template": True},
        rollout=rollout,
    )
    with pytest.raises(SpecError) as caught:
        check(spec)
    stops, chats = caught.value.problems
    assert "rollout.sampling.stop_token_ids" in stops
    assert chats.startswith("data.chat_template")
    assert "no user" in chats


def test_stop_texts_and_tool_results_are_tried_with_the_tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m")).save(folder)
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    rollout = {"rewards": [{"name": "exact_match"}], "sampling": {"stop": ["<pad>", "a<eos>"]}}
    spec = spec_with(
        tmp_path,
        model={"tokenizer": str(folder)},
        data={"chat_template": True},
        rollout={**rollout, "workflow": "multi_turn"},
    )
    with pytest.raises(SpecError) as caught:
        check(spec)
    stops, results = caught.value.problems
    assert "rollout.sampling.stop" in stops
    assert "rollout.workflow_arguments" in results


def test_a_special_token_stops_as_a_token_though_no_characters_spell_it(tmp_path):
    rollout = {"rewards": [{"name": "exact_match"}], "sampling": {"stop": ["<eos>", "12"]}}
    model = {"path": "tiny:qwen2-0.4m", "tokenizer": "chars:ab012"}
    check(spec_with(tmp_path, model=model, rollout=rollout))


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 300}')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(ModelSpec(path=str(tmp_path)))


def test_adapters_of_modules_that_a_model_lacks_are_rejected_with_those_that_it_has(tmp_path):
    folder = tmp_path / "model"
    config = tiny_config("phi3", vocab_size=300, max_position_embeddings=2048)
    build_model(config, dtype=torch.float32, device="cpu").save_pretrained(folder)
    lora = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    spec = spec_with(
        tmp_path, model={"path": str(folder), "tokenizer": "bytes"}, trainer={"lora": lora}
    )
    with pytest.raises(SpecError, match=r"'q_proj'.* down_proj, gate_up_proj, o_proj, qkv_proj;"):
        check(spec)


def test_adapters_of_experts_that_a_family_lacks_are_rejected_by_its_config_alone(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 300}')
    lora = {"target_modules": ["q_proj", "experts.down_proj"]}
    spec = spec_with(
        tmp_path, model={"path": str(folder), "tokenizer": "bytes"}, trainer={"lora": lora}
    )
    with pytest.raises(SpecError, match=r"experts\.down_proj"):
        check(spec)


def model_of(folder: Path, kind: str) -> dict[str, str]:
    """Returns the model keys for a folder with a config of only a model type and a vocabulary size."""
    (folder / "model").mkdir()
    config = {"model_type": kind, "vocab_size": 300}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return {"path": f"{folder}/model", "tokenizer": "bytes"}


@pytest.mark.parametrize(("kind", "is_refused"), [("gemma2", True), ("qwen2", False)])
def test_float16_is_rejected_for_families_that_exceed_its_range(tmp_path, kind, is_refused):
    spec = spec_with(
        tmp_path,
        model=model_of(tmp_path, kind),
        trainer={"dtype": "float16"},
    )
    with pytest.raises(SpecError) as error:
        check(spec)
    assert ("trainer.dtype" in str(error.value)) == is_refused


def test_a_quantized_base_of_a_mixture_is_rejected_by_its_config_alone(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 300}')
    spec = spec_with(
        tmp_path,
        model={"path": str(folder), "tokenizer": "bytes"},
        trainer={"lora": {"base_dtype": "nf4"}},
    )
    with pytest.raises(SpecError, match=r"trainer\.lora\.base_dtype.*qwen3_moe"):
        check(spec)


def test_a_context_beyond_the_windows_that_an_engine_does_not_compute_is_rejected(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "mistral", "vocab_size": 300, "max_position_embeddings": 4096}

    def problems(window, engine):
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        spec = spec_with(
            tmp_path,
            model={"path": str(folder), "tokenizer": "bytes"},
            data={"max_prompt_tokens": 300},
            rollout={
                "rewards": [{"name": "exact_match"}],
                "max_response_tokens": 300,
                "engine": engine,
            },
        )
        with pytest.raises(SpecError) as caught:
            check(spec)
        return str(caught.value)

    assert "sliding windows" in problems(599, "sglang")
    for window, engine in ((600, "sglang"), (None, "sglang"), (599, "vllm"), (599, "torch")):
        assert "sliding windows" not in problems(window, engine)


def test_experts_that_are_stored_with_every_token_count_in_the_quota(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts_per_tok": 8}
    config |= {"vocab_size": 300, "max_position_embeddings": 200_000}
    (folder / "config.json").write_text(json.dumps(config))

    def problems(replay):
        spec = spec_with(
            tmp_path,
            model={"path": str(folder), "tokenizer": "bytes"},
            rollout={
                "rewards": [{"name": "exact_match"}],
                "max_response_tokens": 131_072,
                "routing_replay": replay,
            },
            trainer={"steps": 1, "prompts_per_step": 16},
        )
        with pytest.raises(SpecError) as caught:
            check(spec)
        return str(caught.value)

    assert "transferqueue.quota_bytes" not in problems("off")
    # Each token of the 128 responses has 384 bytes of experts and 9 bytes of other fields.
    assert "up to rollout.max_response_tokens (131072), 393 bytes a token" in problems("replay")


@pytest.mark.parametrize(
    ("engine", "name", "size", "is_refused"),
    [
        ("vllm", "tensor_parallel_size", 3, True),
        ("vllm", "tensor_parallel_size", 4, False),
        ("vllm", "pipeline_parallel_size", 3, False),
        ("sglang", "tp_size", 6, True),
        ("sglang", "tp_size", 12, False),
        ("sglang", "tp_size", 24, True),
    ],
)
def test_heads_that_the_gpus_of_an_engine_cannot_share_are_rejected(
    tmp_path, engine, name, size, is_refused
):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen2", "vocab_size": 300}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, **heads}))
    rollout = {
        "rewards": [{"name": "exact_match"}],
        "engine": engine,
        "engine_arguments": {name: size},
    }
    spec = spec_with(tmp_path, model={"path": str(folder), "tokenizer": "bytes"}, rollout=rollout)
    with pytest.raises(SpecError) as caught:
        check(spec)
    assert (f"rollout.engine_arguments.{name} is {size}" in str(caught.value)) is is_refused


def test_an_empty_data_set_and_a_missing_column_are_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(SpecError, match=r"^data\.train"):
        check(spec_with(tmp_path, data={"train": {"source": "jsonl", "path": str(empty)}}))
    with pytest.raises(SpecError, match=r"'question'.*columns.*'prompt'"):
        check(spec_with(tmp_path, data={"prompt_column": "question"}))


def test_a_set_is_of_use_if_one_of_its_first_rows_is(tmp_path):
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        '{"prompt": "", "answer": ""}\n{"prompt": 5}\n{"prompt": "good", "answer": "b"}\n'
    )
    train = {"source": "jsonl", "path": str(file)}
    trainer = {"prompts_per_step": 1}
    check(spec_with(tmp_path, data={"train": train}, trainer=trainer))
    with pytest.raises(SpecError, match=r"^data\.prompt_column"):
        check(spec_with(tmp_path, data={"train": {**train, "limit": 2}}, trainer=trainer))


def test_model_inputs_count_in_the_quota(tmp_path):
    file = tmp_path / "inputs.jsonl"
    row = {"prompt": "a", "answer": "b", "seen": {"features": [[0.5] * 100] * 3000}}
    file.write_text(2 * (json.dumps(row) + "\n"))
    data = {"train": {"source": "jsonl", "path": str(file)}, "model_inputs_column": "seen"}
    trainer = {"prompts_per_step": 2}
    quota = {"quota_bytes": 2 << 20}
    check(spec_with(tmp_path, data=data, trainer=trainer, transferqueue={"quota_bytes": 8 << 20}))
    with pytest.raises(SpecError, match=r"transferqueue\.quota_bytes.*data\.model_inputs_column"):
        check(spec_with(tmp_path, data=data, trainer=trainer, transferqueue=quota))


def test_all_problems_come_at_once(tmp_path):
    spec = spec_with(
        tmp_path, model={"path": "/no/such/folder"}, rollout={"rewards": [{"name": "nope:f"}]}
    )
    with pytest.raises(SpecError) as caught:
        check(spec)
    assert len(caught.value.problems) == 2


def test_help_and_validation_load_nothing_that_they_do_not_need():
    code = (
        "import sys\n"
        "from services.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "app(['validate', 'examples/sort4.yaml'], standalone_mode=False)\n"
        "unneeded = {'torch', 'fastapi', 'matplotlib', 'sqlalchemy', 'uvicorn', 'slipstream_client'}\n"
        "assert not unneeded & set(sys.modules), unneeded & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


REWARDS = """
import os, time
def number(prompt, response, answer, row): return 1.0
def text(prompt, response, answer, row): return "good"
def raises(prompt, response, answer, row): raise RuntimeError("broken")
def hangs(prompt, response, answer, row): time.sleep(600)
def dies(prompt, response, answer, row): os._exit(3)
def short(prompt, responses, answer, row): return [1.0]
def beyond(prompt, first, second, answer, row): return 2.0
def empty(prompt, response, answer, row): return 1.0 / len(response)
def some(prompt, response, answer, row): return {"good": 1.0}
def word(row, tried): return "yes"
def pairs(count, seed): return (("a", "b") for _ in range(count))
def few(count, seed): return [("a", "b")]
"""


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "task.py").write_text(REWARDS)
    return lambda name: f"{tmp_path / 'task.py'}:{name}"


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("text", {}, "'good'"),
        ("raises", {}, "broken"),
        ("hangs", {"timeout_s": 0.2}, "timeout_s"),
        ("dies", {}, "exit status 3"),
        ("number", {"bounds": [2.0, 3.0]}, "within"),
        ("short", {"sees": "group"}, "list of 2"),
        ("beyond", {"sees": "pairs"}, "within"),
        ("some", {"terms": {"better": {}}}, "better"),
    ],
)
def test_a_reward_that_never_gives_a_score_is_rejected(tmp_path, rewards, name, settings, word):
    spec = spec_with(tmp_path, rollout={"rewards": [{"name": rewards(name), **settings}]})
    with pytest.raises(SpecError, match=r"^rollout\.rewards\.0\.name: .*") as caught:
        check(spec)
    assert word in str(caught.value)


def test_a_reward_that_fails_at_times_is_noted(tmp_path, rewards):
    file = tmp_path / "spec.json"
    spec = spec_with(tmp_path, rollout={"rewards": [{"name": rewards("empty")}]})
    file.write_text(spec.model_dump_json())
    (note,) = read_checked(file).notes
    assert note.startswith("rollout.rewards.0.name")
    assert "1 of 13" in note


def test_other_functions_are_tried_too(tmp_path, rewards):
    def warm(name):
        return {"path": "tiny:qwen2-0.4m", "warm_start": {"examples": rewards(name)}}

    check(spec_with(tmp_path, model=warm("pairs")))
    with pytest.raises(SpecError, match=r"^model\.warm_start\.examples: .* 4 pairs"):
        check(spec_with(tmp_path, model=warm("few")))
    with pytest.raises(SpecError, match=r"^data\.curriculum\.function: .*must return True"):
        check(spec_with(tmp_path, data={"curriculum": {"function": rewards("word")}}))


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"model": {"tokenizer": "chars:b"}}, "model.tokenizer"),
        ({"data": {"prompt_template": "{prompt}?"}, "model": {"tokenizer": "chars:a"}}, "'?'"),
        ({"data": {"max_prompt_tokens": 1, "chat_template": True}}, "data.max_prompt_tokens"),
        ({"trainer": {"prompts_per_step": 5}}, "trainer.prompts_per_step"),
        (
            {"algorithm": {"loss": "sft"}, "rollout": {"max_response_tokens": 1, "rewards": []}},
            "max_response_tokens",
        ),
    ],
)
def test_filters_that_no_row_passes_are_rejected(tmp_path, parts, key):
    with pytest.raises(SpecError) as caught:
        check(spec_with(tmp_path, **parts))
    assert key in str(caught.value)


def test_rows_that_would_be_quarantined_are_noted(tmp_path):
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        3 * '{"prompt": "good", "answer": ""}\n' + '{"prompt": "abcdefgh", "answer": ""}\n'
    )
    data = {"train": {"source": "jsonl", "path": str(file)}, "max_prompt_tokens": 4}
    (tmp_path / "spec.json").write_text(spec_with(tmp_path, data=data).model_dump_json())
    (note,) = read_checked(tmp_path / "spec.json").notes
    assert note.startswith("data.train: 1 of its first 4 rows")


@pytest.mark.parametrize("length", [{"steps": 2}, {"steps": None}])
def test_a_warmup_that_is_longer_than_the_run_is_noted(tmp_path, length):
    def notes(**trainer):
        spec = spec_with(tmp_path, data={"epochs": epochs}, trainer={**length, **trainer})
        (tmp_path / "spec.json").write_text(spec.model_dump_json())
        return read_checked(tmp_path / "spec.json").notes

    epochs = None if length["steps"] else 2  # two epochs of 4 rows are 2 steps
    optimizer = {"warmup_steps": 4, "learning_rate": 1e-3}
    (note,) = notes(optimizer=optimizer)
    assert note.startswith("trainer.optimizer.warmup_steps is 4")
    assert "0.0005 instead of 0.001" in note
    assert not notes(optimizer=optimizer, updates_per_step=2)


def test_a_warmup_of_the_critic_that_is_as_long_as_the_epochs_is_rejected(tmp_path):
    parts = {"algorithm": {"advantage": "gae"}, "trainer": {"steps": None}}
    parts["data"] = {"epochs": 2}  # two epochs of 4 rows are 2 steps
    check(spec_with(tmp_path, critic={"warmup_steps": 1}, **parts))
    with pytest.raises(SpecError, match=r"critic\.warmup_steps \(2\).*data\.epochs \(2\)"):
        check(spec_with(tmp_path, critic={"warmup_steps": 2}, **parts))


def test_a_batch_that_the_queue_of_this_machine_never_holds_is_rejected(tmp_path, monkeypatch):
    spec = spec_with(tmp_path, rollout={"max_response_tokens": 30_000, "group_size": 64})
    check(spec)
    monkeypatch.setenv("SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES", str(64 << 20))
    with pytest.raises(SpecError, match=r"^trainer\.prompts_per_step"):
        check(spec)
    monkeypatch.setenv("SLIPSTREAM_TRANSFERQUEUE_SPILL_BYTES", str(64 << 20))
    check(spec)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"weight_sync": {"mode": "inplace"}}, "weight_sync.mode"),
        ({"trainer": {"lora": {}}}, "trainer.lora.sync"),
        ({"trainer": {"lora": {"sync": "merged"}}}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("kind", ["falcon_h1", "qwen2"])
def test_weights_that_an_engine_must_load_are_not_written_into_it(tmp_path, kind, changes, key):
    spec = spec_with(
        tmp_path,
        model=model_of(tmp_path, kind),
        rollout={"engine": "vllm"},
        **changes,
    )
    with pytest.raises(SpecError) as error:
        check(spec)
    is_refused = "computes other tensors" in str(error.value)
    assert is_refused == (kind == "falcon_h1" and key is not None)
    assert not is_refused or f"{key} is" in str(error.value)


_DEATHS = {
    "os._exit(0)": "exit code 0",
    "os._exit(3)": "exit code 3",
    "os.kill(os.getpid(), 9)": "signal 9",
    "os.kill(os.getpid(), 11)": "signal 11",
}
_DOORS = {
    "rollout.rewards": {"rollout": {"rewards": [{"name": "FILE:f"}]}},
    "algorithm": {"algorithm": {"loss": "FILE:f"}},
    "algorithm ": {"algorithm": {"advantage": "FILE:f"}},
    "data.curriculum": {"data": {"curriculum": {"function": "FILE:f"}}},
    "data": {"data": {"train": {"source": "python", "path": "FILE:f"}}},
    "data ": {"data": {"train": {"filters": [{"function": "FILE:f"}]}}},
    "model": {
        "model": {
            "warm_start": {"examples": "FILE:f", "steps": 1, "batch_size": 1, "learning_rate": 1}
        }
    },
    "rollout.workflow": {"rollout": {"workflow": "FILE:f"}},
    "rollout.workflow ": {
        "rollout": {"workflow": "agent", "workflow_arguments": {"agent": "FILE:f"}}
    },
    "rollout.workflow  ": {
        "rollout": {"workflow": "environment", "workflow_arguments": {"environment": "FILE:f"}}
    },
    "rollout.workflow   ": {
        "rollout": {"workflow": "multi_turn", "workflow_arguments": {"tools": ["FILE:f"]}}
    },
}


def _draft_of(tmp_path: Path, changes: dict) -> Path:
    """Writes a specification that names the file ``deadly.py`` as ``FILE``."""
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(4 * (json.dumps({"prompt": "a", "answer": "b"}) + "\n"))
    data = changes.get("data", {})
    train = {"source": "jsonl", "path": str(rows), **data.get("train", {})}
    document = changed(**{**changes, "data": {**data, "train": train}})
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(document).replace("FILE", str(tmp_path / "deadly.py")))
    return file


@pytest.mark.parametrize("key", _DOORS)
def test_code_that_ends_its_process_is_a_problem_with_its_name_and_the_end(tmp_path, key):
    statement, end = [*_DEATHS.items()][[*_DOORS].index(key) % len(_DEATHS)]
    (tmp_path / "deadly.py").write_text(f"import os\n{statement}\ndef f(*a, **k): return 0.0\n")
    with pytest.raises(SpecError, match=rf"^{key.strip()}\b.*deadly\.py:f' ended .*{end}"):
        read_checked(_draft_of(tmp_path, _DOORS[key]))


@pytest.mark.parametrize("statement", _DEATHS)
def test_a_data_function_that_ends_its_process_is_a_problem(tmp_path, statement):
    (tmp_path / "deadly.py").write_text(f"import os\ndef f():\n    {statement}\n")
    with pytest.raises(SpecError, match=rf"^data: .*deadly\.py:f' ended .*{_DEATHS[statement]}"):
        read_checked(_draft_of(tmp_path, _DOORS["data"]))


def test_a_fork_of_user_code_does_not_delay_the_problem_of_its_end(tmp_path):
    reader, writer = os.pipe()  # the fork lives until this test closes it
    (tmp_path / "deadly.py").write_text(
        f"import os\nif os.fork() == 0:\n    os.close({writer})\n    os.read({reader}, 1)\n    os._exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    try:
        with pytest.raises(SpecError, match=r"deadly\.py:f' ended .*signal 9"):
            read_checked(_draft_of(tmp_path, _DOORS["rollout.rewards"]))
    finally:
        os.close(writer)
        os.close(reader)


def test_a_fork_that_returns_from_user_code_reports_nothing(tmp_path):
    (tmp_path / "deadly.py").write_text(
        "import os, time\nis_fork = os.fork() == 0\nif not is_fork:\n    time.sleep(1)\n"
        "def f(*a, **k):\n    return 0.0\n"
    )
    assert read_checked(_draft_of(tmp_path, _DOORS["rollout.rewards"])).examined.spec is not None


def test_an_unexpected_error_of_the_checks_reaches_the_command(tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("a mistake")

    monkeypatch.setattr("services.checks.start.preflight._formulas", fail)
    with pytest.raises(AssertionError, match="a mistake"):
        read_checked(_draft_of(tmp_path, {}))


@pytest.fixture
def folder_of(tmp_path):
    """Returns a function that saves a random tiny model of a family and returns its folder."""

    def save(family, **shape):
        config = tiny_config(family, vocab_size=24, max_position_embeddings=4096, **shape)
        build_model(config, dtype=torch.float32, device="cpu").save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def distilled(tmp_path, teacher, **changes):
    """Returns a mixture that learns from a teacher."""
    chars = {"tokenizer": "chars:0123456789ab"}
    return spec_with(
        tmp_path,
        model={"path": "tiny:qwen3_moe-0.7m", **chars},
        teacher={"path": teacher, **chars},
        **changes,
    )


def test_a_dense_teacher_is_computed_by_processes_that_share_the_policys_experts(tmp_path):
    check(distilled(tmp_path, "tiny:qwen2-0.4m", trainer={"world_size": 2, "expert_parallel": 2}))


_APART = {"task_groups": ["train", "ref_logp", "generate"], "ratios": [0.4, 0.4, 0.2], "gpus": 5}


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("trainer.expert_parallel", {"trainer": {"world_size": 2, "expert_parallel": 2}}),
        (
            "topology.scoring.expert_parallel",
            {
                "topology": {
                    **_APART,
                    "scoring_ranks": 2,
                    "scoring": {"expert_parallel": 2},
                }
            },
        ),
    ],
)
def test_a_teacher_whose_experts_cannot_be_divided_is_a_problem_of_the_layout_that_divides_it(
    tmp_path, folder_of, key, parts
):
    with pytest.raises(
        SpecError, match=rf"^{key} is 2, but layers of teacher\.path have 3 experts"
    ):
        check(distilled(tmp_path, folder_of("qwen3_moe", num_experts=3), **parts))


def test_a_teacher_apart_need_not_be_divided_as_the_policy_is(tmp_path, folder_of):
    parts = {"trainer": {"expert_parallel": 2}, "topology": _APART}
    check(distilled(tmp_path, folder_of("qwen3_moe", num_experts=3), **parts))


def test_a_teacher_that_the_dtype_overflows_is_a_problem(tmp_path, folder_of):
    with pytest.raises(SpecError, match=r"trainer\.dtype is float16.*gemma2"):
        check(distilled(tmp_path, folder_of("gemma2"), trainer={"dtype": "float16"}))
