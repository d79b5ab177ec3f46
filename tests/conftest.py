"""What holds for every test."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # the environments of the real engines have no Hypothesis
    from hypothesis import settings

    # No test is timed: a busy machine is no failure.
    settings.register_profile("slipstream", deadline=None)
    settings.load_profile("slipstream")
