"""Curriculum: a user's function decides which prompts are worth sampling at the current step."""

from services.common.runspec.data import CurriculumSpec
from services.rollout.calls.pool import CallPool
from services.rollout.data.sources import Row
from services.rollout.failures import CallError, GroupError
from services.wire.workers import DEFERRED, PromptHistory


class Curriculum:
    """Calls the function of a run's curriculum."""

    def __init__(self, spec: CurriculumSpec, calls: CallPool) -> None:
        self._spec = spec
        self._calls = calls

    async def check(self, row: Row, tried: PromptHistory) -> None:
        """Returns if the prompt is worth sampling now, and raises otherwise.

        Raises:
            GroupError: ``deferred`` if the function defers the prompt; ``curriculum_timeout``,
                ``curriculum_exception``, ``curriculum_sandbox_killed`` or
                ``curriculum_invalid_value`` if the function gave no valid answer.
        """
        reference = self._spec.function
        assert reference is not None, "a function is asked for"
        told = {
            "step": tried.step,
            "tries": tried.tries,
            "mean_reward": tried.mean_reward if tried.tries else None,
        }
        arguments, timeout_s = self._spec.arguments, self._spec.timeout_s
        try:
            answer = await self._calls.call(reference, (row, told), arguments, timeout_s=timeout_s)
        except CallError as error:
            raise _failed(error.kind, error.message) from error
        if not isinstance(answer, bool):
            raise _failed(
                "invalid_value",
                f"{reference!r} must return True (generate responses now) or False (skip the prompt), but "
                f"returned {answer!r:.60}",
            )
        if not answer:
            raise GroupError(DEFERRED, "the curriculum defers this prompt", retryable=True)


def _failed(kind: str, message: str) -> GroupError:
    return GroupError(f"curriculum_{kind}", f"data.curriculum.function: {message}", retryable=True)
