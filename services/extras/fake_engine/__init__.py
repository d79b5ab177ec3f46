"""Engine ``fake`` without a model, for simulations, tests of load and chaos tests."""
