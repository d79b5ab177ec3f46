"""Workers that only score batches: ``ref_logp`` and ``logp`` on their own GPUs."""
