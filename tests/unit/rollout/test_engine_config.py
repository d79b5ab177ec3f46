"""Tests of the folders that hold a model's configuration for vLLM."""

from pathlib import Path

from transformers import Qwen2Config

from services.rollout.engines.engine_config import cached_config_folder


def test_equal_models_share_a_folder_and_others_do_not(tmp_path: Path) -> None:
    folders = [
        cached_config_folder(Qwen2Config(num_hidden_layers=layers), tmp_path)
        for layers in (2, 2, 3)
    ]
    assert folders[0] == folders[1] != folders[2]
    assert Qwen2Config.from_pretrained(folders[2]).num_hidden_layers == 3
    assert {*tmp_path.iterdir()} == {*folders}
