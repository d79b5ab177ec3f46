"""Cancellations that a task group asked for and left behind."""

import asyncio


def forget_cancellations() -> None:
    """Take back what task groups of this task requested of it; for after their errors were caught.

    In Python 3.11 a group whose last task fails while the group waits for it cancels its parent and never
    takes that back. The parent's next deadline that passes then raises CancelledError in place of
    TimeoutError (in 3.11.2, which Debian 12 has), and ``cancelling()`` says that the parent is ending.
    """
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
