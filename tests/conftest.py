"""What holds for every test."""

from hypothesis import settings

# No test is timed: a busy machine is no failure.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")
