"""Imports the archives of images.sh into containerd, without the layers that containerd already has."""

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


def import_images(archives: Sequence[Path], command: Sequence[str | Path], store: Path) -> None:
    """Streams images to a command that imports an OCI layout from its standard input.

    Archives in Docker's format always contain all layers, of which few change with the code.

    Args:
        archives: Archives that ``buildah push docker-archive:`` wrote; their layers are uncompressed.
        store: Folder of containerd's blobs, named by their digests.
    """
    names = {blob.name for blob in store.glob("*")}
    with subprocess.Popen(
        [str(argument) for argument in command], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|") as layout:
            _write(layout, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
            manifests = [
                manifest for path in archives for manifest in _convert(path, layout, names)
            ]
            index = {"schemaVersion": 2, "manifests": manifests}
            _write(layout, "index.json", json.dumps(index).encode())
    assert process.returncode == 0, f"the import of the images ended with {process.returncode}"


def _convert(path: Path, layout: tarfile.TarFile, digests: set[str]) -> Iterator[dict[str, Any]]:
    """Writes those blobs of an archive's images that are not known; yields the images' index entries."""
    with tarfile.open(path) as archive:

        def blob(name: str, kind: str) -> dict[str, Any]:
            # An archive names each blob by its digest.
            member, digest = archive.getmember(name), name.partition(".")[0]
            if digest not in digests:
                digests.add(digest)
                _write(layout, f"blobs/sha256/{digest}", archive.extractfile(member), member.size)
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": member.size}

        listing = archive.extractfile("manifest.json")
        assert listing is not None
        for image in json.load(listing):
            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": blob(image["Config"], _CONFIG),
                "layers": [blob(layer, _LAYER) for layer in image["Layers"]],
            }
            content = json.dumps(manifest).encode()
            digest = sha256(content).hexdigest()
            _write(layout, f"blobs/sha256/{digest}", content)
            for name in image["RepoTags"]:
                yield {
                    "mediaType": _MANIFEST,
                    "digest": f"sha256:{digest}",
                    "size": len(content),
                    "annotations": {"io.containerd.image.name": name},
                }


def _write(
    layout: tarfile.TarFile, name: str, content: bytes | IO[bytes] | None, size: int = 0
) -> None:
    entry = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        content, size = io.BytesIO(content), len(content)
    entry.size = size
    layout.addfile(entry, content)
