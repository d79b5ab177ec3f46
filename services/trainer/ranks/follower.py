"""Every rank but 0: does what rank 0 orders, step by step."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from services.common.batch import KVBatchMeta
from services.common.errors import ServiceError
from services.trainer.ranks.crew import Crew, Kind, Order
from services.trainer.ranks.rank import Rank
from services.trainer.weights import WeightExport

logger = logging.getLogger(__name__)


def follow(crew: Crew, rank: Rank, weights: WeightExport) -> None:
    """Take part in whatever rank 0 starts, until it ends. Blocks; runs in a thread."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint") as writer:
        writing: Future[Path] | None = None
        while (order := crew.hear()).kind is not Kind.STOP:
            if order.kind is Kind.SAVE:
                if writing is not None:
                    writing.result()  # its buffers are used again
                snapshot = rank.snapshot(order.step)
                writing = writer.submit(rank.checkpointer.write, snapshot)
            else:
                _take_part(order, rank, weights)


def _take_part(order: Order, rank: Rank, weights: WeightExport) -> None:
    try:
        if order.kind is Kind.TRAIN:
            meta = KVBatchMeta.from_bytes(order.payload)
            rank.train(order.step, meta, weight_version=order.weight_version)
        elif order.kind is Kind.GATHER:
            for _ in weights.weight_tensors():
                pass
    except (ServiceError, ValueError) as error:
        # Rank 0 met the same and reports it; the next order may be a good one.
        logger.warning("order failed", extra={"order": order.kind.name, "error": str(error)})
