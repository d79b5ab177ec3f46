"""The batches that both sides move. Imports torch only, so that the peer's environment can run it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch."""

    name: str
    fields: dict[str, list[Tensor] | Tensor]
    """Rows per field: a list if lengths differ, a tensor if they are equal."""
    repeats: int = 1
    """Operations that are timed together, for batches that take less than a millisecond."""

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return len(next(iter(self.fields.values())))

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return sum(row.nbytes for rows in self.fields.values() for row in rows)


def build(name: str) -> Workload:
    """Returns a workload by name, with the same values in each process."""
    generator = torch.Generator().manual_seed(0)
    match name:
        case "rl256" | "rl1024":
            count = int(name.removeprefix("rl"))
            lengths = torch.randint(512, 4097, (count,), generator=generator).tolist()
            ids = [torch.randint(0, 1 << 17, (n,), generator=generator) for n in lengths]
            logprobs = [torch.randn(n, generator=generator) for n in lengths]
            return Workload(name, {"ids": ids, "logprobs": logprobs})
        case "dense1024":
            first, second = (torch.randn(1024, 2048, generator=generator) for _ in range(2))
            return Workload(name, {"first": first, "second": second})
        case "mm1m":
            return Workload(name, {"pixels": torch.randn(128, 1 << 18, generator=generator)})
        case "images":
            # As model inputs travel: encoded bundles of one image each.
            pixels = torch.randint(0, 256, (128, 1 << 20), generator=generator, dtype=torch.uint8)
            return Workload(name, {"model_inputs": list(pixels)})
        case "small8k":
            return Workload(name, {"row": torch.randn(1, 2048, generator=generator)}, repeats=20)
    raise ValueError(f"no workload {name!r}")


NAMES = ("rl256", "rl1024", "dense1024", "mm1m", "small8k")
