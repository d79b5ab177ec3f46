"""Command to train a step, as it travels from the controller to all ranks of a trainer. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from services.common.errors import InvalidArgumentError
from services.wire.batch import KVBatchMeta
from slipstream.trainer.v1 import trainer_pb2


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Command to train one batch."""

    step: int
    """Number of the step, from 1."""
    batch: KVBatchMeta
    """Whole groups, oldest first."""
    weight_version: int | None = field(default=None, kw_only=True)
    """Version of the weights that the step starts from; None means ``step - 1``."""
    num_steps: int | None = field(default=None, kw_only=True)
    """Steps of the whole run; None keeps the number that the trainer knows."""
    waits: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Seconds that the run has waited since the last step, by reason."""

    @property
    def version(self) -> int:
        """Version of the weights that the step starts from."""
        return self.step - 1 if self.weight_version is None else self.weight_version

    def to_proto(self) -> trainer_pb2.TrainStepRequest:
        """Converts to the wire form."""
        return trainer_pb2.TrainStepRequest(
            step=self.step,
            batch=self.batch.to_proto(),
            weight_version=self.version,
            num_steps=self.num_steps or 0,
            waits=self.waits,
        )

    @classmethod
    def from_proto(cls, proto: trainer_pb2.TrainStepRequest) -> "StepCommand":
        """Converts from the wire form.

        Raises:
            InvalidArgumentError: If the batch is not consistent.
        """
        return cls(
            proto.step,
            KVBatchMeta.from_proto(proto.batch),
            weight_version=proto.weight_version,
            num_steps=proto.num_steps or None,
            waits=dict(proto.waits),
        )

    def to_bytes(self) -> bytes:
        """Serializes the wire form."""
        return self.to_proto().SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> "StepCommand":
        """Parses the serialized wire form.

        Raises:
            InvalidArgumentError: If the bytes are not a consistent command.
        """
        try:
            proto = trainer_pb2.TrainStepRequest.FromString(data)
        except DecodeError as error:
            raise InvalidArgumentError(f"not a serialized step command: {error}") from error
        return cls.from_proto(proto)
