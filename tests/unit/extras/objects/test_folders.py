"""Tests of the objects below a URL, which the tests of each store repeat."""

from pathlib import Path

import pytest

from services.common.errors import NotFoundError, ServiceError
from services.extras.objects.connection import ObjectFolder
from services.extras.stored_weights.folders import check_directory
from tests.helpers.s3 import needs_s3

pytestmark = needs_s3


def test_objects_are_written_listed_read_in_pieces_and_deleted(bucket: str) -> None:
    folder = ObjectFolder(f"{bucket}/run")
    content = bytes(range(256)) * (80 << 10)  # of more than one request
    folder.write("a/small", b"hello")
    folder.put("a/large", memoryview(content))
    assert folder.sizes() == {"a/small": 5, "a/large": len(content)}
    target = bytearray(len(content))
    assert folder.read_into("a/large", memoryview(target)) == len(content)
    assert bytes(target) == content
    folder.delete(["a/small", "a/large", "absent"])
    assert folder.sizes() == {}
    with pytest.raises(NotFoundError):
        folder.read("a/small")


def test_a_file_is_uploaded_in_parts_and_downloaded(bucket: str, tmp_path: Path) -> None:
    folder = ObjectFolder(f"{bucket}/run")
    content = bytes(range(256)) * (150 << 10)
    (tmp_path / "file").write_bytes(content)
    folder.upload(tmp_path / "file", "file", on_bytes=lambda count: None)
    copies = dict.fromkeys(folder.list(), tmp_path / "copy")
    folder.download(copies, on_bytes=lambda count: None, persist=lambda request: request())
    assert (tmp_path / "copy").read_bytes() == content


def test_weights_may_be_written(bucket: str) -> None:
    check_directory(f"{bucket}/weights")
    with pytest.raises(ServiceError, match="absent"):
        check_directory(f"{bucket.partition('://')[0]}://absent/weights")
