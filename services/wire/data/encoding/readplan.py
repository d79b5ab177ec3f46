"""Plans a read: the byte ranges to fetch and their positions in the target buffer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from services.common.errors import DataLossError, NotFoundError
from services.wire.batch import MISSING, BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.encoding.codec import ITEM_BYTES, aligned, combine, parts_of


@dataclass(slots=True)
class Extent:
    """Bytes of a blob and their position in the target buffer."""

    blob: BlobRef
    offset: int
    size: int
    position: int

    @property
    def is_whole(self) -> bool:
        """True if the extent covers the whole blob."""
        return self.size == self.blob.size_bytes

    def parts(self) -> Iterator["Extent"]:
        """Splits the extent into parts of at most one frame."""
        for begin, size in parts_of(self.size):
            yield Extent(self.blob, self.offset + begin, size, self.position + begin)

    def check(self, digests: Sequence[int]) -> None:
        """Verifies the whole blob by the checksums of its parts.

        Raises:
            DataLossError: If they differ from the checksum of the blob's writer.
        """
        if combine(digests) != self.blob.checksum:
            raise DataLossError(
                f"blob {self.blob.blob_id} on {self.blob.shard_id} is corrupted",
                blob_id=self.blob.blob_id,
                shard_id=self.blob.shard_id,
            )


@dataclass(slots=True)
class ReadPlan:
    """Plan of one read: rows of each field one after the other, in the order of the keys."""

    size_bytes: int = 0
    """Size of the target buffer."""
    columns: list[tuple[FieldColumn, int, int]] = field(default_factory=list)
    """Fields with the begin and end of their values in the target."""
    extents: list[Extent] = field(default_factory=list)
    """Ranges to read."""
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """Copies of rows that several keys share and that are read once: ``(from, to, size)``."""


def plan_read(meta: KVBatchMeta, names: Sequence[str]) -> ReadPlan:
    """Plans the read of some fields.

    Raises:
        NotFoundError: If a key lacks one of the fields.
        ValueError: If no key has one of the fields.
    """
    plan = ReadPlan()
    for name in names:
        column = meta.column(name)
        if MISSING in column.blob_indexes:
            absent = [
                key
                for key, index in zip(meta.keys, column.blob_indexes, strict=True)
                if index == MISSING
            ]
            raise NotFoundError(
                f"{len(absent)} of {meta.num_keys} keys have no field {name!r}: {', '.join(absent[:20])}",
                field=name,
                keys=",".join(absent),
            )
        begin = plan.size_bytes
        end = _add_rows(plan, column, meta.blobs)
        plan.columns.append((column, begin, end))
        plan.size_bytes = aligned(end)
    return plan


def check_whole(extents: Sequence[Extent], digests: Sequence[int]) -> None:
    """Verifies the extents that cover whole blobs; ``digests`` has the checksums of all extents' parts.

    Raises:
        DataLossError: If one differs from the checksum of its writer.
    """
    digest_iterator = iter(digests)
    for extent in extents:
        extent_digests = [next(digest_iterator) for _ in parts_of(extent.size)]
        if extent.is_whole:
            extent.check(extent_digests)


def _one_run(column: FieldColumn, row_bytes: int) -> tuple[int, int] | None:
    """Returns offset and size if all rows follow each other in one blob, as in most batches."""
    if not column.lengths or column.blob_indexes.count(column.blob_indexes[0]) < len(
        column.lengths
    ):
        return None
    ends = list(accumulate([n * row_bytes for n in column.lengths], initial=column.offsets[0]))
    size = ends.pop() - column.offsets[0]
    return (column.offsets[0], size) if tuple(ends) == column.offsets else None


def _add_rows(plan: ReadPlan, column: FieldColumn, blobs: Sequence[BlobRef]) -> int:
    row_bytes = ITEM_BYTES[column.dtype] * prod(column.tail_shape)
    position = plan.size_bytes
    run = _one_run(column, row_bytes)
    if run is not None:
        offset, size = run
        if size:
            plan.extents.append(Extent(blobs[column.blob_indexes[0]], offset, size, position))
        return position + size
    last_index, last_offset, next_offset = MISSING, -1, -1
    extent = Extent(blobs[0], 0, 0, 0) if blobs else None
    for index, offset, length in zip(
        column.blob_indexes, column.offsets, column.lengths, strict=True
    ):
        size = length * row_bytes
        if size == 0:
            continue
        if index == last_index and offset == next_offset and extent is not None:
            extent.size += size
        elif index == last_index and offset == last_offset:
            plan.copies.append((position - size, position, size))
            position += size
            continue
        else:
            extent = Extent(blobs[index], offset, size, position)
            plan.extents.append(extent)
        last_index, last_offset, next_offset = index, offset, offset + size
        position += size
    return position
