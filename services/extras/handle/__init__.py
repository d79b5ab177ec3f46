"""Weight transport ``handle`` between processes on one GPU, through a shared buffer of its memory."""
