"""Settings of Python's cyclic garbage collector."""

import gc


def freeze_startup_objects() -> None:
    """Excludes all existing objects from garbage collection and makes full collections rare.

    Modules, engine and data live as long as the process, and episodes create few cycles. By
    default, a full collection would run every half minute and block every episode for a quarter of
    a second. Young generations are collected as often as by default, because a collection takes
    longer the more objects have been allocated since the last one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1000)
