"""The mathematics of a step: advantages, losses, corrections; pure functions of tensors."""
