"""How much of a process the interpreter looks through for cycles that nobody reaches."""

import gc


def spare_what_stays() -> None:
    """Leave out all that exists by now, and look at the rest rarely.

    Modules, engine and data stay, and little of what an episode makes is a cycle: by default everything would
    be looked through every half a minute, which holds all episodes up for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 30)
