"""Tests of manifests of stored checkpoints, which everyone who can write to a store may forge."""

import json
from pathlib import Path

import pytest

from services.common.errors import DataLossError
from services.extras.objects import cache
from services.extras.objects.layout import parse_manifest


def manifest_of(
    upload: object = "upload_0123456789abcdef", file: str = "model.safetensors"
) -> bytes:
    files = {"trainer/rank-0.pt": {"size": 1, "sha256": "0"}, file: {"size": 2, "sha256": "0"}}
    return json.dumps({"step": 1, "upload": upload, "facts": {}, "files": files}).encode()


def test_a_manifest_of_a_checkpoint_is_read():
    manifest = parse_manifest(manifest_of(), "s3://bucket/step-00000001")
    assert manifest.sizes == {"trainer/rank-0.pt": 1, "model.safetensors": 2}


@pytest.mark.parametrize(
    "upload",
    ["", "..", "../x", "/etc", "a/b", "a\\b", "a\n", ".part", "x" * 65, 7.5, ["a"], {}],
)
def test_an_upload_that_is_no_id_is_refused(upload):
    with pytest.raises(DataLossError, match="upload"):
        parse_manifest(manifest_of(upload=upload), "s3://bucket/step-00000001")


@pytest.mark.parametrize(
    "file",
    ["", "..", "../x", "a/../../x", "/etc/passwd", "//etc/passwd", "a//b", "./a", "a/", "a/."],
)
def test_a_file_outside_the_checkpoint_is_refused(file):
    with pytest.raises(DataLossError, match="file"):
        parse_manifest(manifest_of(file=file), "s3://bucket/step-00000001")


class _ForgedStore:
    """Store whose manifest names an upload."""

    def __init__(self, upload: Path) -> None:
        self.url = "s3://bucket"
        self._manifest = manifest_of(upload=str(upload))

    def read(self, name: str) -> bytes:
        return self._manifest


def test_a_forged_manifest_gives_nobody_the_checkpoint_of_another_folder(tmp_path):
    folder, copies = tmp_path / "other" / "checkpoints", tmp_path / "copies"
    (folder / "step-00000001").mkdir(parents=True)
    copies.mkdir()
    with pytest.raises(DataLossError, match="upload"):
        cache._fetch_checkpoint(_ForgedStore(folder), "step-00000001", copies, lambda _: None)
    assert not list(folder.parent.rglob("*.part"))
