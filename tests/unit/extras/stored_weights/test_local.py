"""Tests of weight versions in a folder."""

import errno
import os
from pathlib import Path

import pytest

from services.common.errors import NotFoundError, UnavailableError
from services.extras.stored_weights.folders import check_directory
from services.extras.stored_weights.local import LocalFolder


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(str(tmp_path / "run"))


def test_a_file_has_what_was_written(folder):
    content = os.urandom(100_000)
    folder.put("a/b", memoryview(content))
    assert folder.read("a/b") == content
    target = bytearray(100_000)
    assert folder.read_into("a/b", memoryview(target)) == 100_000
    assert bytes(target) == content
    assert folder.sizes() == {"a/b": 100_000}


def test_a_larger_file_is_read_as_far_as_its_target_goes(folder):
    folder.put("a", memoryview(b"12345"))
    target = bytearray(3)
    assert folder.read_into("a", memoryview(target)) == 5
    assert target == b"123"


def test_a_missing_file_is_named(folder):
    with pytest.raises(NotFoundError, match="run/a does not exist"):
        folder.read("a")


def test_an_interrupted_write_leaves_no_file(folder, monkeypatch):
    def fails(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.replace", fails)
    with pytest.raises(UnavailableError, match=r"No space left on device \(\d+ bytes are free\)"):
        folder.put("a", memoryview(b"1"))
    assert folder.sizes() == {}


def test_deleted_files_leave_no_folders(folder, tmp_path):
    folder.put("a/b/c", memoryview(b"1"))
    folder.put("a/d", memoryview(b"1"))
    folder.delete(["a/b/c", "a/none"])
    assert folder.sizes() == {"a/d": 1}
    assert not (tmp_path / "run" / "a" / "b").exists()
    folder.delete(["a/d"])
    assert not (tmp_path / "run").exists()


def test_a_check_leaves_nothing(tmp_path):
    check_directory(str(tmp_path / "weights"))
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "weights"])


def test_a_check_names_what_is_wrong(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="Not a directory"):
        check_directory(str(tmp_path / "file"))


def test_a_folder_that_another_process_deletes_because_it_is_empty_is_made_again(
    folder, monkeypatch
):
    make = Path.mkdir
    deletions = iter([True, True])

    def made(self, *args, **options):
        make(self, *args, **options)
        if self.name == "run" and next(deletions, False):
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", made)
    folder.put("a", memoryview(b"1"))
    assert folder.sizes() == {"a": 1}
