"""``slipstream compare``: results and settings of two runs side by side."""
