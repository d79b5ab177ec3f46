"""What holds for every test."""

import gc
from contextlib import suppress

with suppress(ModuleNotFoundError):  # the environments of the real engines have no Hypothesis
    from hypothesis import settings

    # No test is timed: a busy machine is no failure.
    settings.register_profile("slipstream", deadline=None)
    settings.load_profile("slipstream")


def pytest_collection_finish() -> None:
    """What the tests have imported is never garbage: collections pass it by, which takes a third off."""
    gc.collect()
    gc.freeze()
