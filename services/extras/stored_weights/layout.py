"""Names and manifests of weight versions in a store.

::

    FOLDER/RUN/NAME/source-0/part-00000      one broadcast each: buckets, and what a mode sends about them
    FOLDER/RUN/NAME/source-0/manifest.json   written last; names all parts with their sizes and digests

``NAME`` is that of one attempt to write a version, so nothing that a manifest names is ever overwritten.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import xxhash

from services.weightsync.transfer import TransferError

MANIFEST: Final = "manifest.json"
PROBE: Final = "probe"
_FORMAT: Final = 1
# Names of versions, with an object of theirs, of probes, and of a folder's unfinished probes.
_OWN: Final = re.compile(rf"v\d+-e\d+-\d+(-\w+)?/source-\d+/.+|{PROBE}[_-]\w+|\.writing-\w+")


@dataclass(frozen=True, slots=True)
class Part:
    """One object of a version."""

    name: str
    """Name below the run's folder."""
    size: int
    """Bytes."""
    digest: str
    """128-bit XXH3 of the bytes, in hex."""


def source_folder(version: str, source: int) -> str:
    return f"{version}/source-{source}"


def part_name(version: str, source: int, index: int) -> str:
    return f"{source_folder(version, source)}/part-{index:05d}"


def manifest_name(version: str, source: int) -> str:
    return f"{source_folder(version, source)}/{MANIFEST}"


def digest_of(content: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def manifest_digest(content: bytes) -> str:
    """Returns the SHA-256 of a manifest in hex, which the controller passes from the source to receivers."""
    return hashlib.sha256(content).hexdigest()


def manifest_content(version: str, source: int, parts: Sequence[Part]) -> bytes:
    document = {
        "format": _FORMAT,
        "version": version,
        "source": source,
        "parts": [asdict(part) for part in parts],
    }
    return json.dumps(document, indent=1).encode()


def parse_manifest(content: bytes, expected_digest: str, where: str) -> tuple[Part, ...]:
    """Returns the parts of a version.

    Raises:
        TransferError: If it is not the manifest that its source wrote.
    """
    digest = manifest_digest(content)
    if digest != expected_digest:
        raise TransferError(
            f"{where} is not what its source wrote: its SHA-256 is {digest[:12]}, expected "
            f"{expected_digest[:12]}; the version is rejected"
        )
    document: Mapping[str, Any] = json.loads(content)
    if document["format"] != _FORMAT:
        raise TransferError(
            f"{where} has format {document['format']}, expected {_FORMAT}; install the same release "
            "everywhere"
        )
    return tuple(Part(**part) for part in document["parts"])


def outdated(names: Iterable[str], kept_versions: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the manifests and the other objects of versions that are not kept.

    What has another name is not a version's: the folder may be that of a run's checkpoints and logs.
    """
    versions = set(kept_versions)
    version_names = [name for name in names if _OWN.fullmatch(name)]
    old = [name for name in version_names if name.partition("/")[0] not in versions]
    manifests = [name for name in old if name.endswith(f"/{MANIFEST}")]
    return manifests, [name for name in old if not name.endswith(f"/{MANIFEST}")]
