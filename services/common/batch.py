"""``KVBatchMeta``: the description of stored samples that services hand to each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from google.protobuf.message import DecodeError

from services.common.columns import (
    MISSING,
    BlobRef,
    FieldColumn,
    TagValues,
    as_tag,
    check_column,
    concat_columns,
    pick,
)
from services.common.errors import InvalidArgumentError
from services.common.wire import from_message, to_message
from slipstream.type.v1 import batch_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBatchMeta:
    """Stored samples in training order, without any of their values.

    It holds all that a reader needs: one data round trip fetches the tensors.
    """

    partition_id: str
    """One run and one purpose, for example ``run_1/train``."""
    keys: tuple[str, ...]
    """The samples, in training order."""
    fields: tuple[FieldColumn, ...] = ()
    """Their fields."""
    blobs: tuple[BlobRef, ...] = ()
    """Blobs that the fields point into."""
    tags: Mapping[str, TagValues] = field(default_factory=dict)
    """Small facts by name, each with one value per key."""
    lease_id: str = ""
    """Lease under which the samples were acquired; empty if there is none."""
    revision: int = 0
    """Count of changes of the partition when this was built."""

    def __post_init__(self) -> None:
        columns = {f"tag {name}": values for name, values in self.tags.items()}
        columns |= {f"field {column.name}": column.lengths for column in self.fields}
        for name, values in columns.items():
            if len(values) != len(self.keys):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.keys)} keys")

    @property
    def num_keys(self) -> int:
        """Number of samples."""
        return len(self.keys)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(column.name for column in self.fields)

    def column(self, name: str) -> FieldColumn:
        """The field ``name``.

        Raises:
            ValueError: If the samples do not have it.
        """
        for column in self.fields:
            if column.name == name:
                return column
        raise ValueError(f"no field {name!r}; these samples have {', '.join(self.field_names)}")

    def tag(self, name: str) -> TagValues:
        """Values of the tag ``name``, one per key.

        Raises:
            ValueError: If the samples do not have it.
        """
        if name not in self.tags:
            raise ValueError(f"no tag {name!r}; these samples have {', '.join(self.tags)}")
        return self.tags[name]

    def select(self, chosen: Iterable[int] | Iterable[str]) -> "KVBatchMeta":
        """Some samples, by index or by key, in the given order.

        Raises:
            ValueError: If a key or an index is not here.
        """
        wanted = list(chosen)
        names = [key for key in wanted if isinstance(key, str)]
        indexes = self._indexes_of(names) or [i for i in wanted if isinstance(i, int)]
        if indexes and not 0 <= min(indexes) <= max(indexes) < self.num_keys:
            raise ValueError(f"indexes must lie in [0, {self.num_keys}); they are {indexes}")
        if indexes == list(range(self.num_keys)):
            return self
        selected = replace(
            self,
            keys=pick(self.keys, indexes),
            fields=tuple(column.select(indexes) for column in self.fields),
            tags={name: pick(values, indexes) for name, values in self.tags.items()},
        )
        return _without_unused_blobs(selected)

    @classmethod
    def concat(cls, metas: Sequence["KVBatchMeta"]) -> "KVBatchMeta":
        """The samples of several, one after the other.

        A field that some of them lack is marked missing there. The lease is kept if all share it.

        Raises:
            ValueError: If partitions, tags or the types of a field differ.
        """
        if not metas:
            raise ValueError("there is nothing to concatenate")
        first = metas[0]
        for meta in metas:
            if meta.partition_id != first.partition_id or set(meta.tags) != set(first.tags):
                raise ValueError(
                    f"{meta.partition_id} with tags {sorted(meta.tags)} cannot follow "
                    f"{first.partition_id} with tags {sorted(first.tags)}"
                )
        blobs = dict.fromkeys(chain.from_iterable(meta.blobs for meta in metas))
        places = {blob: place for place, blob in enumerate(blobs)}
        numbers = [
            {i: places[blob] for i, blob in enumerate(meta.blobs)} | {MISSING: MISSING}
            for meta in metas
        ]
        names = dict.fromkeys(chain.from_iterable(meta.field_names for meta in metas))
        leases = {meta.lease_id for meta in metas}
        return cls(
            partition_id=first.partition_id,
            keys=tuple(chain.from_iterable(meta.keys for meta in metas)),
            fields=tuple(_concat_field(name, metas, numbers) for name in names),
            blobs=tuple(blobs),
            tags={
                name: as_tag(chain.from_iterable(meta.tags[name] for meta in metas))
                for name in first.tags
            },
            lease_id=first.lease_id if len(leases) == 1 else "",
            revision=max(meta.revision for meta in metas),
        )

    def to_proto(self) -> batch_pb2.KVBatchMeta:
        """The wire form."""
        return batch_pb2.KVBatchMeta(
            partition_id=self.partition_id,
            keys=self.keys,
            fields=[to_message(column, batch_pb2.FieldColumn) for column in self.fields],
            blobs=[to_message(blob, batch_pb2.BlobRef) for blob in self.blobs],
            tags=[_tag_to_proto(name, values) for name, values in self.tags.items()],
            lease_id=self.lease_id,
            revision=self.revision,
        )

    @classmethod
    def from_proto(cls, proto: batch_pb2.KVBatchMeta) -> "KVBatchMeta":
        """Read the wire form.

        Raises:
            InvalidArgumentError: If columns do not have one entry per key or point outside the blobs.
        """
        try:
            meta = cls(
                partition_id=proto.partition_id,
                keys=tuple(proto.keys),
                fields=tuple(from_message(column, FieldColumn) for column in proto.fields),
                blobs=tuple(from_message(blob, BlobRef) for blob in proto.blobs),
                tags={tag.name: _tag_from_proto(tag) for tag in proto.tags},
                lease_id=proto.lease_id,
                revision=proto.revision,
            )
            for column in meta.fields:
                check_column(column, len(meta.keys), len(meta.blobs))
        except ValueError as error:
            raise InvalidArgumentError(f"the description of samples: {error}") from error
        return meta

    def to_bytes(self) -> bytes:
        """The wire form, serialized."""
        return self.to_proto().SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> "KVBatchMeta":
        """Read the serialized wire form.

        Raises:
            InvalidArgumentError: If the bytes are not a consistent ``KVBatchMeta``.
        """
        try:
            proto = batch_pb2.KVBatchMeta.FromString(data)
        except DecodeError as error:
            raise InvalidArgumentError(f"not a KVBatchMeta: {error}") from error
        return cls.from_proto(proto)

    def _indexes_of(self, keys: Sequence[str]) -> list[int]:
        if not keys:
            return []
        positions = {key: index for index, key in enumerate(self.keys)}
        absent = [key for key in keys if key not in positions]
        if absent:
            raise ValueError(f"keys not in this batch: {', '.join(absent[:10])}")
        return [positions[key] for key in keys]


def _without_unused_blobs(meta: KVBatchMeta) -> KVBatchMeta:
    used = sorted(set().union(*(column.blob_indexes for column in meta.fields)) - {MISSING})
    if len(used) == len(meta.blobs):
        return meta
    numbers = {old: new for new, old in enumerate(used)} | {MISSING: MISSING}
    return replace(
        meta,
        fields=tuple(column.renumber(numbers) for column in meta.fields),
        blobs=tuple(meta.blobs[i] for i in used),
    )


def _concat_field(
    name: str, metas: Sequence[KVBatchMeta], numbers: Sequence[Mapping[int, int]]
) -> FieldColumn:
    known = next(column for meta in metas for column in meta.fields if column.name == name)
    columns = []
    for meta, new_numbers in zip(metas, numbers, strict=True):
        if name in meta.field_names:
            columns.append(meta.column(name).renumber(new_numbers))
        else:
            columns.append(known.without_values(meta.num_keys))
    return concat_columns(columns)


def _tag_to_proto(name: str, values: TagValues) -> batch_pb2.TagColumn:
    kinds = set(map(type, values))
    if kinds <= {int, bool}:
        return batch_pb2.TagColumn(name=name, ints=values)  # type: ignore[arg-type]
    if kinds <= {int, bool, float}:
        return batch_pb2.TagColumn(name=name, floats=values)  # type: ignore[arg-type]
    if kinds == {str}:
        return batch_pb2.TagColumn(name=name, texts=values)  # type: ignore[arg-type]
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(f"tag {name!r} mixes {names}; use int, float or str throughout")


def _tag_from_proto(tag: batch_pb2.TagColumn) -> TagValues:
    if tag.texts:
        return tuple(tag.texts)
    return tuple(tag.floats) if tag.floats else tuple(tag.ints)
