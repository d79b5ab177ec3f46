"""A stand-in for decoding: reads all live weights once per step, as batch decoding does."""

import threading
import time
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor


class Decoding:
    """Decode steps in a separate thread and stream, with the time at which each ended."""

    def __init__(self, live: list[Tensor], *, batch: int = 32) -> None:
        self._matrices = [tensor for tensor in live if tensor.dim() == 2]
        self._inputs = {
            m.shape[1]: torch.randn(batch, m.shape[1], dtype=m.dtype, device=m.device)
            for m in self._matrices
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        # No other thread may use the device while a graph is captured.
        self._captured = threading.Event()
        self.ends: list[float] = []

    def __enter__(self) -> "Decoding":
        self._thread.start()
        self._captured.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def step_ms(self, begin: float, end: float) -> tuple[float, float]:
        """Returns the mean and max duration of the steps between two times, in milliseconds.

        Steps that only began or only ended between them count completely, because a step that was
        blocked for the whole time must be included. Call it when a step has ended after ``end``.
        """
        durations = [
            stop - start for start, stop in pairwise(self.ends) if stop >= begin and start <= end
        ]
        return 1000 * fmean(durations), 1000 * max(durations)

    def wait_step(self) -> None:
        """Waits for the end of a step that begins after the call."""
        target = len(self.ends) + 2
        while len(self.ends) < target:
            time.sleep(0.001)

    def _run(self) -> None:
        device = self._matrices[0].device
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            self._step()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self._step()
            self._captured.set()
            while not self._stop.is_set():
                graph.replay()
                stream.synchronize()
                self.ends.append(time.perf_counter())

    def _step(self) -> None:
        for matrix in self._matrices:
            torch.matmul(self._inputs[matrix.shape[1]], matrix.t())
