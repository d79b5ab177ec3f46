"""``slipstream export``: a run's weights as a Hugging Face folder."""
