"""``slipstream init``: a commented specification for a model and a data set."""
