"""Tests that local copies are whole, current, downloaded once, and that failures name their first cause."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from services.common.local_copies import with_local_copies
from services.common.runspec.run import RunSpec
from services.common.stores import FetchKind, fetch, join_url, upload
from services.extras.objects import connection, transfers
from services.extras.objects.connection import ObjectFolder
from tests.helpers.batches import spec_of
from tests.helpers.s3 import Relay, environment, needs_s3

pytestmark = needs_s3
MODEL = {
    "config.json": b"{}",
    "tokenizer/vocab.txt": b"a\nb",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
}


@pytest.fixture
def url(bucket: str) -> str:
    """URL of a folder with the files of a model."""
    folder = ObjectFolder(join_url(bucket, "team", "model"))
    for name, content in MODEL.items():
        folder.write(name, content)
    return folder.url


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_copy_has_the_files_of_its_kind(url: str, tmp_path: Path) -> None:
    assert files_of(fetch(url, "folder", cache=tmp_path)) == MODEL
    weights = {name: content for name, content in MODEL.items() if not name.endswith(".bin")}
    assert files_of(fetch(url, "model", cache=tmp_path)) == weights
    light = fetch(url, "model without weights", cache=tmp_path)
    assert light.name == "model"
    assert files_of(light).keys() == {"config.json", "tokenizer/vocab.txt"}
    file = fetch(join_url(url, "tokenizer", "vocab.txt"), "file", cache=tmp_path)
    assert (file.name, file.read_bytes()) == ("vocab.txt", b"a\nb")


def test_all_processes_of_a_host_share_one_download(
    url: str, tmp_path: Path, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[int] = []
    download = ObjectFolder.download

    def counted(self: ObjectFolder, objects: object, **arguments: object) -> None:
        downloads.append(1)
        download(self, objects, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectFolder, "download", counted)
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: fetch(url, "model", cache=tmp_path), range(8)))
    assert len({*copies}) == 1
    assert len(downloads) == 1


def test_a_changed_object_is_downloaded_again_next_to_the_old_copy(
    url: str, tmp_path: Path
) -> None:
    old = fetch(url, "folder", cache=tmp_path)
    ObjectFolder(url).write("config.json", b"[]")
    new = fetch(url, "folder", cache=tmp_path)
    assert (new / "config.json").read_bytes() == b"[]"
    assert (old / "config.json").read_bytes() == b"{}", "a run may still read it"


def test_large_objects_arrive_whole_in_pieces(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PIECE_BYTES", 6 << 20)
    content = os.urandom((20 << 20) + 7)
    (tmp_path / "file").write_bytes(content)
    ObjectFolder(bucket).upload(tmp_path / "file", "large", on_bytes=lambda count: None)
    copy = fetch(join_url(bucket, "large"), "file", cache=tmp_path / "cache")
    assert copy.read_bytes() == content


def test_an_object_that_changes_during_its_download_is_no_copy(bucket: str, tmp_path: Path) -> None:
    folder = ObjectFolder(bucket)
    folder.write("file", b"old")
    listed = folder.head("file")
    folder.write("file", b"new")
    with pytest.raises(UnavailableError, match=r"412|[Pp]recondition"):
        folder.download(
            {listed: tmp_path / "file"},
            on_bytes=lambda count: None,
            persist=lambda request: request(),
        )


FETCH = """
import sys
from pathlib import Path
from services.common.stores import FetchKind, fetch
from services.extras.objects.connection import ObjectFolder
download = ObjectFolder._download_piece
def stopped(self, stored, file, start):
    size = download(self, stored, file, start)
    print("piece", flush=True)
    sys.stdin.read()
    return size
ObjectFolder._download_piece = stopped
fetch(sys.argv[1], "folder", cache=Path(sys.argv[2]))
"""


def test_a_killed_download_leaves_no_copy_and_no_lock(
    url: str, tmp_path: Path, relay: Relay
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH, url, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment(relay.port)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"piece\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial_file,) = tmp_path.glob("*/*.part")
    assert files_of(fetch(url, "folder", cache=tmp_path)) == MODEL
    assert not partial_file.exists()


def test_a_download_waits_for_a_store_that_comes_back(
    url: str, tmp_path: Path, relay: Relay
) -> None:
    lines: list[str] = []
    is_reported = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        if "cannot be used" in line:
            is_reported.set()

    relay.set("refuse")
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(fetch, url, "folder", cache=tmp_path, report=report)
        assert is_reported.wait(60)
        relay.set("forward")
        assert files_of(copy.result(60)) == MODEL


def test_a_store_that_stays_away_fails_with_its_first_cause(
    url: str, tmp_path: Path, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transfers.Patience.__init__, "__kwdefaults__", {"limit_s": 0.2, "report": None}
    )
    relay.set("refuse")
    with pytest.raises(
        UnavailableError, match=rf"{url} cannot be used for 0 s; first cause: .*error"
    ):
        fetch(url, "folder", cache=tmp_path)


def test_nothing_at_a_url_is_reported_at_once(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no objects"):
        fetch(join_url(bucket, "nothing"), "folder", cache=tmp_path)
    with pytest.raises(NotFoundError, match=r"does not exist"):
        fetch(join_url(bucket, "nothing"), "file", cache=tmp_path)
    with pytest.raises(NotFoundError, match=r"no checkpoint at .*upload may still be running"):
        fetch(join_url(bucket, "step-00000001"), "checkpoint", cache=tmp_path)


def test_a_url_that_is_refused_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"no installed package has a store"):
        fetch("ftp://host/file", "file", cache=tmp_path)


def test_a_specification_gets_the_paths_of_local_copies(
    url: str, bucket: str, tmp_path: Path
) -> None:
    rows = b"".join(json.dumps({"prompt": str(i)}).encode() + b"\n" for i in range(3))
    ObjectFolder(bucket).write("rows.jsonl", rows)
    document = spec_of().model_dump(mode="json")
    document["model"] |= {"path": url, "tokenizer": join_url(url, "tokenizer")}
    document["data"]["train"]["path"] = join_url(bucket, "rows.jsonl")
    document["trainer"]["checkpoint"]["directory"] = join_url(bucket, "run")
    spec = with_local_copies(RunSpec.model_validate(document), cache=tmp_path)
    assert files_of(Path(spec.model.path)).keys() >= {"config.json", "model.safetensors"}
    assert spec.model.tokenizer is not None
    assert files_of(Path(spec.model.tokenizer)) == {"vocab.txt": b"a\nb"}
    assert Path(spec.data.sets["train"].path).read_bytes() == rows
    assert spec.trainer.checkpoint.directory == join_url(bucket, "run")


def test_a_missing_object_names_its_key(bucket: str, tmp_path: Path) -> None:
    document = spec_of().model_dump(mode="json")
    document["data"]["train"]["path"] = join_url(bucket, "rows.jsonl")
    with pytest.raises(ValueError, match=r"^data\.train\.path: .*rows\.jsonl does not exist"):
        with_local_copies(RunSpec.model_validate(document), cache=tmp_path)


@pytest.mark.parametrize("kind", ["file", "checkpoint", "record"])
def test_a_bucket_is_no_object(bucket: str, tmp_path: Path, kind: FetchKind) -> None:
    with pytest.raises(FailedPreconditionError, match=f"{bucket} names a bucket"):
        fetch(bucket, kind, cache=tmp_path)


def test_a_folder_is_uploaded_to_an_empty_url_only(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    send = ObjectFolder.upload

    def noted(self: ObjectFolder, file: Path, name: str, **arguments: object) -> None:
        names.append(name)
        send(self, file, name, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectFolder, "upload", noted)
    for name, content in MODEL.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    url = join_url(bucket, "exports", "one")
    upload(tmp_path / "model", url)
    assert names[-1] == "config.json"
    assert files_of(fetch(url, "folder", cache=tmp_path / "cache")) == MODEL
    with pytest.raises(
        FailedPreconditionError, match=r"has 4 objects already, such as config\.json"
    ):
        upload(tmp_path / "model", url)
