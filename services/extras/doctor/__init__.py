"""``slipstream doctor``: what runs can name on this machine."""
