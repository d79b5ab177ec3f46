"""Mathematics of a training step as pure functions of tensors: advantages, losses, corrections."""
