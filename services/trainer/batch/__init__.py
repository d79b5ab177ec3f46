"""From a batch in the transferqueue to packed micro-batches, and what is reported of it."""
