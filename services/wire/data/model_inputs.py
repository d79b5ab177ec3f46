"""Bundles of tensors that a model takes besides token ids, such as the pixels of images.

A bundle belongs to a prompt or to a turn that a workflow observed, and travels whole: to the engine, and
through the transferqueue to the trainer. Only the model's forward pass looks inside; all other code compares
digests.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from services.common.errors import DataLossError, InvalidArgumentError
from services.wire.data.jagged import rows_problem

_RESERVED = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "layout",
        "context",
        "image_uses",
    }
)
"""Arguments of the forward pass that engines and trainer compute themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """Named tensors of a prompt or a turn, each ``[n, ...]``; empty if it has none. Compared by digest."""

    tensors: Mapping[str, Tensor]
    """Tensors by the name of the model's argument, on the CPU."""
    digest: str
    """Digest of the tensors; empty for an empty bundle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelInputs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def encoded(self) -> Tensor:
        """``[B]`` uint8: the tensors in safetensors' format; ``B`` is 0 for an empty bundle."""
        return _encoded(self.tensors)

    @classmethod
    def from_values(cls, values: object) -> "ModelInputs":
        """Builds the bundle of a row.

        Args:
            values: Tensors, NumPy arrays or nested lists of numbers by name; None for an empty bundle.

        Raises:
            ValueError: If the values are no such mapping, or a name is one that engines and trainer compute.
        """
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise ValueError(  # noqa: TRY004 -- the data is wrong, not an argument's type
                "expected a mapping of the model's arguments to tensors, arrays or nested lists of numbers, "
                f"but got {type(values).__name__}"
            )
        if reserved := sorted(_RESERVED & values.keys()):
            raise ValueError(
                f"{', '.join(reserved)} cannot be given: engines and trainer compute them; remove them"
            )
        tensors = {str(name): _as_tensor(str(name), value) for name, value in values.items()}
        return cls(tensors, _digest(save(tensors)) if tensors else "")

    @classmethod
    def from_encoded(cls, encoded: Tensor) -> "ModelInputs":
        """Decodes a bundle.

        Raises:
            DataLossError: If the bytes are no bundle.
        """
        data = encoded.numpy().tobytes()
        return cls(_decoded(data), _digest(data))

    @classmethod
    def concat(cls, bundles: Sequence["ModelInputs"]) -> "ModelInputs":
        """Concatenates the bundles of a sequence along their first dimension, in the order of its tokens."""
        full = [bundle for bundle in bundles if bundle.digest]
        if len(full) < 2:
            return full[0] if full else cls.from_values(None)
        names = dict.fromkeys(name for bundle in full for name in bundle.tensors)
        tensors = {
            name: torch.cat([item.tensors[name] for item in full if name in item.tensors])
            for name in names
        }
        digest = _digest("/".join(bundle.digest for bundle in full).encode())
        return cls(tensors, digest)


def encode_bundles(bundles: Mapping[int, ModelInputs]) -> Tensor:
    """Encodes numbered bundles as one tensor ``[B]`` uint8; empty if all bundles are."""
    return _encoded(
        {
            f"{number}.{name}": tensor
            for number, bundle in bundles.items()
            for name, tensor in bundle.tensors.items()
        }
    )


def decode_bundles(encoded: Tensor) -> dict[int, ModelInputs]:
    """Decodes the bundles of :func:`encode_bundles` that are not empty, in the order of their numbers.

    Raises:
        DataLossError: If the bytes are no bundles.
    """
    tensors: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _decoded(encoded.numpy().tobytes()).items():
        number, _, name = key.partition(".")
        tensors.setdefault(int(number), {})[name] = tensor
    return {number: ModelInputs.from_values(tensors[number]) for number in sorted(tensors)}


def check_arguments(model: nn.Module, inputs: ModelInputs) -> None:
    """Checks that the forward pass of a model takes all tensors of a bundle.

    Raises:
        ValueError: If it does not. Models ignore unknown arguments, so that nothing else would notice.
    """
    # The signature is that of the class, because the forward pass of the instance may be compiled.
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - _RESERVED - {"self"}
    if unknown := sorted(inputs.tensors.keys() - names):
        raise ValueError(
            f"{type(model).__name__} takes no input named {', '.join(unknown)}; it takes "
            f"{', '.join(sorted(names)) or 'token ids only'}; rename or remove them in the rows, or choose "
            "another model"
        )


def model_arguments(
    model: nn.Module, bundles: Sequence[ModelInputs], device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors of bundles as arguments of a model's forward pass.

    Args:
        model: Module whose forward pass takes the tensors.
        bundles: Bundles in the order in which their tokens occur in the input. Tensors of one name are
            concatenated along their first dimension, as models of transformers expect.

    Raises:
        ValueError: If the model does not take a tensor.
        InvalidArgumentError: If tensors of one name cannot be concatenated.
    """
    tensors_by_name: dict[str, list[Tensor]] = {}
    for bundle in bundles:
        check_arguments(model, bundle)
        for name, tensor in bundle.tensors.items():
            tensors_by_name.setdefault(name, []).append(tensor)
    for name, tensors in tensors_by_name.items():
        if problem := rows_problem(tensors):
            raise InvalidArgumentError(f"model input {name!r} has {problem}", name=name)
    return {name: torch.cat(tensors).to(device) for name, tensors in tensors_by_name.items()}


def _encoded(tensors: Mapping[str, Tensor]) -> Tensor:
    data = bytearray(save(dict(tensors))) if tensors else bytearray()
    return torch.from_numpy(np.frombuffer(data, np.uint8))


def _decoded(data: bytes) -> dict[str, Tensor]:
    try:
        return load(data) if data else {}
    except SafetensorError as error:
        raise DataLossError(f"stored model inputs cannot be decoded: {error}") from error


def _digest(data: bytes | bytearray) -> str:
    # XXH3 is 16 times as fast as a cryptographic hash; bundles are compared within one run only.
    return xxhash.xxh3_128_hexdigest(data) if data else ""


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name!r} is no tensor ({error}); give numbers of equal nesting"
        ) from error
    if tensor.dim() == 0:
        raise ValueError(f"{name!r} is a single number; give it at least one dimension")
    return tensor.clone()
