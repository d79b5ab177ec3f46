"""Modes of weight transfers besides ``shadow``: ``inplace``, ``cpu_async``, ``delta`` and ``offloaded``."""
