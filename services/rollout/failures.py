"""Typed failures of groups and user code, so that no failure can be mistaken for a score."""

from typing import Literal

FailureKind = Literal["timeout", "exception", "invalid_value", "invalid_image", "sandbox_killed"]


class GroupError(Exception):
    """Ends a group without samples.

    Attributes:
        reason: Stable code, for example ``prompt_too_long``.
        message: Text for people: what was expected, what occurred, what to do.
        retryable: True if another attempt may succeed.
        num_unfinished: Number of unfinished members when the group was interrupted.
        num_tokens: Number of tokens that the group had when it was interrupted.
    """

    num_unfinished = 0
    num_tokens = 0

    def __init__(self, reason: str, message: str, *, retryable: bool) -> None:
        # A user's error may contain characters that neither gRPC messages nor databases accept as text.
        message = message.replace("\0", "\\0").encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


def refused_prompt(reason: str, message: str) -> GroupError:
    """Returns the error of a prompt that no further attempt can use, so that it is quarantined."""
    return GroupError(reason, message, retryable=False)


class InterruptedGroupError(GroupError):
    """Reports that a group was stopped before it was finished; its progress is cached.

    Args:
        stalled: Why the group counts as stalled; empty if the controller asked for the interruption.
    """

    def __init__(self, *, stalled: str, num_unfinished: int, num_tokens: int) -> None:
        reason = "stalled" if stalled else "interrupted"
        super().__init__(reason, stalled or "the group was interrupted; resume it", retryable=True)
        self.num_unfinished = num_unfinished
        self.num_tokens = num_tokens


class CallError(Exception):
    """Reports that user code, or a service that the user configured, gave no valid answer.

    A failed reward leaves its sample without a score, which differs from a score of 0.

    Attributes:
        kind: Category of the failure.
        message: Text for people.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class BusyError(Exception):
    """Reports that a service cannot answer now; a retry may succeed."""
