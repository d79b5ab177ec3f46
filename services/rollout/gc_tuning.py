"""How much of a process the interpreter looks through for cycles that nobody reaches."""

import gc


def freeze_startup_objects() -> None:
    """Leave out all that exists by now, and look through old objects rarely.

    Modules, engine and data stay, and little of what an episode makes is a cycle: by default all of it would
    be looked through every half a minute, which holds every episode up for a quarter of a second. New objects
    are looked through as often as ever: a look takes the longer, the more tokens came since the last one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1000)
