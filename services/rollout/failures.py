"""Why a group or a sample brought nothing: typed, so that no failure can pass for a score."""

from typing import Literal

FailureKind = Literal["timeout", "exception", "invalid_value", "sandbox_killed"]


class GroupError(Exception):
    """A group ends without samples.

    Attributes:
        reason: Stable code, for example ``prompt_too_long``.
        message: For a person: what was expected, what came, what to do.
        retryable: Whether another try could succeed.
        num_unfinished: Members that were not finished when it was interrupted.
        num_tokens: Tokens that it had then.
    """

    num_unfinished = 0
    num_tokens = 0

    def __init__(self, reason: str, message: str, *, retryable: bool) -> None:
        # A user's error may hold what is no text: neither messages to the controller nor databases take it.
        message = message.replace("\0", "\\0").encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


class InterruptedGroupError(GroupError):
    """A group was stopped before it was finished; what it has is cached.

    Args:
        stalled: Why it was stopped, if nobody asked for it: it had come to a halt.
        num_unfinished: Members that are not finished.
        num_tokens: Tokens that it has.
    """

    def __init__(self, *, stalled: str, num_unfinished: int, num_tokens: int) -> None:
        reason = "stalled" if stalled else "interrupted"
        super().__init__(reason, stalled or "the group was interrupted; resume it", retryable=True)
        self.num_unfinished = num_unfinished
        self.num_tokens = num_tokens


class CallError(Exception):
    """User code, or a service that the user named, gave no answer.

    As a reward, it means that the sample has no score, which is not a score of 0.

    Attributes:
        kind: What went wrong.
        message: For a person.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class BusyError(Exception):
    """The service cannot answer now; another try may succeed."""
