"""Whether a batch finds room in the transferqueue."""

from collections.abc import Iterator

from services.common.fields import FIELDS, TOKEN_REWARDS
from services.common.spec.run import RunSpec

_ITEM_BYTES = {"bool": 1, "int32": 4, "float32": 4}


def quota(spec: RunSpec, *, expert_bytes: int = 0) -> Iterator[str]:
    """A batch is trained once all of it is stored, however long its responses became.

    Args:
        spec: The run.
        expert_bytes: Of the experts that a token chose, where they are stored.
    """
    given, needed = spec.transferqueue.quota_bytes, batch_bytes(spec, expert_bytes=expert_bytes)
    prompts, group_size = spec.trainer.prompts_per_step, spec.samples_per_group
    longest, token_bytes = spec.rollout.max_response_tokens, _token_bytes(spec) + expert_bytes
    if needed > given:
        yield (
            f"transferqueue.quota_bytes is {given:,}, but a batch may take {needed:,}: "
            f"trainer.prompts_per_step ({prompts}) groups of {group_size} responses of up to "
            f"rollout.max_response_tokens ({longest}), {token_bytes} bytes a token, none of which is trained "
            f"before all are stored; raise it, to {2 * needed} if the next batch is to have room beside it"
        )


def batch_bytes(spec: RunSpec, *, expert_bytes: int = 0) -> int:
    """Return the max bytes of a batch in the transferqueue, if all of its responses are the longest.

    Args:
        spec: The run.
        expert_bytes: Bytes of a token's experts, if they are stored.
    """
    group_size = spec.samples_per_group
    response_bytes = spec.rollout.max_response_tokens * (_token_bytes(spec) + expert_bytes)
    prompt_bytes = spec.data.max_prompt_tokens * (4 + group_size * expert_bytes)
    return spec.trainer.prompts_per_step * (group_size * response_bytes + prompt_bytes)


def _token_bytes(spec: RunSpec) -> int:
    """Of what a rollout stores of one response token."""
    are_placed = any(one.per != "response" for some in spec.rewards.values() for one in some)
    return sum(
        _ITEM_BYTES[field.dtype]
        for field in FIELDS
        if (field.shape, field.producer) == ("[R]", "rollout")
        and (are_placed or field.name != TOKEN_REWARDS)
    )
