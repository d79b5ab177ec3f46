"""Workers that only score batches: ``ref_logp`` and ``logp`` with GPUs of their own."""
