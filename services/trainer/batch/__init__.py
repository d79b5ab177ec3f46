"""From a batch in the transferqueue to packed micro-batches, and the attention over them."""
