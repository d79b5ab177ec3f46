"""How much of a process the interpreter looks through for cycles that nobody reaches."""

import gc


def spare_what_stays() -> None:
    """Leave out all that exists by now, and look through old objects rarely.

    Modules, engine and data stay, and turns make no cycles, only connections that end do: by default all of
    it would be looked through every half a minute, which holds every episode up for a quarter of a second.
    New objects are looked through as often as ever: a look takes the longer, the more tokens came since the
    last one. They count as old after the second look: a third one at those of ten takes as long as ten.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 1, 5000)
