"""Tests that unreadable weight files are reported by name, from their headers alone."""

import json

import pytest
import torch
from safetensors.torch import save_file

from services.common.models.weight_files import file_problems


def _save(folder, name, **tensors):
    save_file(tensors, folder / name)


def _index(folder, **places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_whole_files_have_no_problems(tmp_path):
    _save(tmp_path, "a.safetensors", x=torch.ones(3), y=torch.ones(2, dtype=torch.float16))
    _save(tmp_path, "b.safetensors", z=torch.ones(3, dtype=torch.bfloat16))
    _index(tmp_path, x="a.safetensors", y="a.safetensors", z="b.safetensors")
    assert list(file_problems(tmp_path)) == []


def test_all_differences_between_an_index_and_its_files_are_reported(tmp_path):
    _save(tmp_path, "a.safetensors", x=torch.ones(3))
    _save(tmp_path, "b.safetensors", z=torch.ones(3).to(torch.float8_e4m3fn))
    _index(tmp_path, x="a.safetensors", y="a.safetensors", z="b.safetensors", w="c.safetensors")
    lacks, quantized, missing = file_problems(tmp_path)
    assert "a.safetensors" in lacks
    assert "F8_E4M3" in quantized
    assert "c.safetensors" in missing


def test_files_of_some_name_need_an_index(tmp_path):
    _save(tmp_path, "a.safetensors", x=torch.ones(3))
    (problem,) = file_problems(tmp_path)
    assert "model.safetensors.index.json" in problem


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-4],
        lambda whole: whole[:20],
        lambda whole: b"",
        lambda whole: b"version https://git-lfs.github.com/spec/v1",
    ],
)
def test_a_truncated_or_foreign_file_is_reported(tmp_path, damage):
    _save(tmp_path, "model.safetensors", x=torch.ones(3))
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    (problem,) = file_problems(tmp_path)
    assert str(file) in problem
