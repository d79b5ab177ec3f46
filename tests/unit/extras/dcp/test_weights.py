"""Weights in checkpoints of torch.distributed.checkpoint: written, read under two names, refused safely."""

import pickle
import pkgutil
import shutil
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.checks.start.preflight import _start
from services.common.models.loading import load_model, read_weights, stored_tensors
from services.common.models.weight_formats import open_other_weights, other_problems
from services.common.runspec.run import ModelSpec
from services.extras.dcp.reading import open_weights
from services.extras.dcp.writing import write_weights
from services.extras.export.checkpoint import export_checkpoint
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks

SPEC = spec_of()


@pytest.fixture
def trained(tmp_path: Path) -> PreTrainedModel:
    """A model whose Hugging Face folder is ``hf`` and whose DCP folder is ``dcp``."""
    policy = policy_of(SPEC, seed=3)
    rank = rank_of(SPEC, policy, random_queue(policy_of(SPEC)), root=tmp_path / "checkpoints")
    export_checkpoint(rank.checkpointer.write(rank.snapshot(1)), SPEC, tmp_path / "hf")
    write_weights(tmp_path / "hf", tmp_path / "dcp")
    model: PreTrainedModel = policy.model
    return model


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def loaded(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of the model in a folder, as a run loads them."""
    tokenizer: Any = None
    model = load_model(ModelSpec(path=str(folder)), tokenizer, dtype=torch.float32, device="cpu")
    return stored_tensors(model)


def test_a_written_folder_is_read_by_torch_and_by_the_trainer(
    tmp_path: Path, trained: PreTrainedModel
) -> None:
    assert not [*(tmp_path / "dcp").glob("*.safetensors*")]
    assert [*other_problems(tmp_path / "dcp")] == []
    assert_equal(loaded(tmp_path / "dcp"), stored_tensors(trained))
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    names = open_weights(tmp_path / "dcp").names
    tensors = {name: torch.empty_like(there[name]) for name in names}
    load(tensors, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert_equal(tensors, {name: there[name] for name in names})


def test_experts_are_divided_under_hugging_faces_names_and_fused_when_read(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", vocab_size=24, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    write_weights(tmp_path / "hf", tmp_path / "dcp")
    names = open_weights(tmp_path / "dcp").names
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in names
    assert_equal(loaded(tmp_path / "dcp"), stored_tensors(model))


def _save_shards(rank: int, folder: str, size: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    policy = policy_of(SPEC, seed=3)
    fully_shard(policy, mesh=init_device_mesh("cpu", (size,)))
    state = dict(policy.named_parameters())
    first = next(iter(state))
    state |= {f"optimizer.exp_avg.{first}": torch.zeros(2)}  # type: ignore[dict-item]
    save(state, storage_writer=FileSystemWriter(f"{folder}/shards"))
    distributed.destroy_process_group()


def test_shards_of_two_ranks_under_our_own_names_are_read_and_optimizer_states_ignored(
    tmp_path: Path, trained: PreTrainedModel
) -> None:
    run_ranks(_save_shards, str(tmp_path), 2, count=2)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "shards")
    opened = open_weights(tmp_path / "shards")
    assert opened.names == stored_tensors(trained).keys()
    assert_equal(loaded(tmp_path / "shards"), stored_tensors(trained))


class _Harm:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


def _metadata_with(files: dict[MetadataIndex, Any]) -> Metadata:
    """Returns metadata of one embedding."""
    size = torch.Size([1])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
    return Metadata({"model.embed_tokens.weight": tensor}, storage_data=files)


def _shadowed() -> OrderedDict[MetadataIndex, Any]:
    """Files outside of the folder; the attribute ``values`` hides them."""
    files: OrderedDict[MetadataIndex, Any] = OrderedDict()
    files[MetadataIndex("model.embed_tokens.weight", [0])] = _StorageInfo("../secret", 0, 1)
    files.values = OrderedDict  # type: ignore[assignment]
    return files


def test_metadata_that_hide_a_file_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / ".metadata").write_bytes(pickle.dumps(_metadata_with(_shadowed())))
    with pytest.raises(ValueError, match="not the metadata of"):
        open_weights(folder)


@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.metadata Metadata", "pathlib PosixPath"]
)
def test_metadata_cannot_change_a_class(tmp_path: Path, name: str) -> None:
    # The class, then a state of slots: setattr(CLASS, "harm", True).
    text = f"c{name.replace(' ', chr(10))}\n".encode()
    pickled = b"\x80\x02" + text + b"N}X\x04\x00\x00\x00harm\x88s\x86b."
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(ValueError, match="not the metadata of"):
        open_weights(tmp_path)
    assert not hasattr(pkgutil.resolve_name(name.replace(" ", ":")), "harm")


def test_metadata_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Harm(tmp_path / "harmed")))
    with pytest.raises(ValueError, match=r"is not the metadata of .*getattr|is not the metadata"):
        open_weights(folder)
    assert not (tmp_path / "harmed").exists()
    (problem,) = other_problems(folder)
    assert "save the model as safetensors" in problem


def _crafted(name: str) -> bytes:
    """Returns a small pickle that makes the standard library's unpickler allocate or compute for long."""
    protocol = b"\x80\x04"
    size = b"ctorch\nSize\n"
    pickles = {
        "memo": protocol + b"Nr\xff\xff\xff\x7f.",
        "bytearray": protocol + b"\x96" + (1 << 40).to_bytes(8, "little") + b".",
        # Each tuple holds the one before twice; hashing the last one as a key takes 2**100 operations.
        "hash": protocol + b"})" + b"2\x86" * 100 + b"Ns.",
        "nesting": protocol + b"})" + b"\x85" * 1_000_000 + b"Ns.",
        # Each copy of the list takes 400 kB, and 4 bytes of the file.
        "copies": protocol
        + size
        + b"\x940]("
        + b"N" * 50_000
        + b"e\x85\x940"
        + b"h\x00h\x01R" * 50_000
        + b".",
        "function": protocol + size + b"N}\x8c\x0c__defaults__N\x85s\x86b.",
    }
    return pickles[name]


@pytest.mark.parametrize("name", ["memo", "bytearray", "hash", "nesting", "copies", "function"])
def test_a_small_file_takes_little_memory_and_time(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(_crafted(name))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not the metadata of"):
            open_weights(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def _shared(name: str) -> Metadata:
    """Returns metadata whose pickle is small, because many references share a large object."""
    size = torch.Size([1, 1])
    chunk, properties = ChunkStorageMetadata(size, size), TensorProperties(dtype=torch.float32)
    if name == "parts":
        entry = TensorStorageMetadata(properties, size, [chunk] * 1000)
        return Metadata({f"w{number}": entry for number in range(1000)}, storage_data={})
    if name == "dimensions":
        many: Any = (1,) * 20_000
        chunks = [ChunkStorageMetadata(many, many) for _ in range(1000)]
        return Metadata({"w": TensorStorageMetadata(properties, size, chunks)}, storage_data={})
    files = {MetadataIndex(f"w{n}"): _StorageInfo("a/" * 20_000, 0, 4) for n in range(100)}
    return Metadata({}, storage_data=files)


@pytest.mark.parametrize("name", ["parts", "dimensions", "name of a file"])
def test_objects_that_many_references_share_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_shared(name)))
    with pytest.raises(ValueError, match=f"not the metadata of.*{name}"):
        open_weights(tmp_path)


@pytest.mark.parametrize("call", [b"R", b"\x81"])
def test_calls_with_many_arguments_are_refused(tmp_path: Path, call: bytes) -> None:
    name = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x04" + name + b"(" + b"N" * 1000 + b"t" + call + b"."
    )
    with pytest.raises(ValueError, match="arguments of a call"):
        open_weights(tmp_path)


@pytest.mark.parametrize("path", ["../hf/model.safetensors", "/etc/hostname", "link"])
def test_files_outside_of_the_folder_are_refused(
    tmp_path: Path, trained: PreTrainedModel, path: str
) -> None:
    folder = tmp_path / "dcp"
    (folder / "link").symlink_to("/etc/hostname")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="is not a file of the folder"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["decoder.layers.self_attention.linear_qkv.weight"], "Megatron-Bridge"),
        (["model.tok_embeddings.weight", "model.layers.0.wq.weight"], "torchtitan"),
        (
            ["transformer.wte.weight"],
            "no tensor ...embed_tokens.weight, but 1 such as transformer.wte",
        ),
    ],
)
def test_names_of_other_programs_are_refused_with_the_way_to_convert_them(
    tmp_path: Path, names: list[str], says: str
) -> None:
    state = {name: torch.zeros(2, 2) for name in names}
    save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    (problem,) = other_problems(tmp_path / "dcp")
    assert says in problem


def test_missing_tensors_and_files_are_named(tmp_path: Path, trained: PreTrainedModel) -> None:
    folder = tmp_path / "dcp"
    other = {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"layers\.9\.mlp\.up_proj"):
        read_weights(other, folder, trained.config.to_dict())
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(ValueError, match=r"is missing, but \.metadata lists it"):
        open_weights(folder)


def test_folders_with_safetensors_and_empty_ones_are_no_other_format(tmp_path: Path) -> None:
    assert open_other_weights(tmp_path) is None
    (problem,) = other_problems(tmp_path)
    assert "dcp (.metadata)" in problem
    (tmp_path / ".metadata").touch()
    (tmp_path / "model.safetensors").touch()
    assert open_other_weights(tmp_path) is None


def test_a_folder_of_weights_is_no_checkpoint_to_start_from(tmp_path: Path) -> None:
    state = {"model.embed_tokens.weight": torch.zeros(2, 2)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    spec = spec_of(trainer={"checkpoint": {"start_from": str(tmp_path / "dcp")}})
    (problem,) = _start(spec)
    assert "is not a checkpoint" in problem
    assert problem.endswith("set model.path to it instead")
