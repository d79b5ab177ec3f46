"""Episodes of several conversations, as rollouts store them, and their gradient computed by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.rollout.rewards.base import Score
from services.rollout.sampling.sample import Sample, prompt_fields, sample_fields
from services.rollout.workflows.turns import (
    Conversation,
    Turn,
    flattened,
    observed,
    token_ids,
    trained_once,
)
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU, Queue, queue_of
from tests.helpers.columns import rows_of

GROUP_SIZE = 3


def branched_episodes(
    policy: Policy, *, num_groups: int = 3, seed: int = 0
) -> tuple[Queue, list[list[Conversation]]]:
    """Makes random episodes of one to three conversations; the second branches off after the first reply.

    Returns:
        The samples, and the conversations of each.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> tuple[int, ...]:
        count = int(torch.randint(1, 8, (), generator=generator))
        return tuple(torch.randint(2, 20, (count,), generator=generator).tolist())

    def sampled(*before: Turn) -> Turn:
        new, context = tokens(), token_ids(before)
        with torch.no_grad():
            logprobs, _ = policy(_packed(context, new))
        noise = 0.3 * torch.randn(len(new), generator=generator)
        return Turn(
            token_ids=new,
            logprobs=tuple((logprobs + noise).tolist()),
            version_runs=((0, len(new)),),
            finish_reason="stop",
        )

    def reply(*before: Turn) -> Conversation:
        return (*before, sampled(*before))

    samples, episodes = [], []
    for index in range(num_groups * GROUP_SIZE):
        first = reply(observed(tokens()))
        conversations = [reply(*first, observed(tokens())), reply(*first, observed(tokens()))]
        conversations = [*conversations, reply(observed(tokens()))][: 1 + index % GROUP_SIZE]
        prompt, *turns = flattened(trained_once(conversations))
        reward = float(torch.rand((), generator=generator))
        samples.append(
            Sample(
                member=index % GROUP_SIZE,
                prompt_ids=prompt.token_ids,
                turns=tuple(turns),
                score=Score(reward),
                finish_reason="stop",
                is_greedy=False,
            )
        )
        episodes.append(conversations)
    columns = {**sample_fields(samples), "prompt_ids": prompt_fields(samples)}
    tags = {
        "group_id": tuple(f"group{i // GROUP_SIZE}" for i in range(len(samples))),
        "finish_reason": ("stop",) * len(samples),
        "greedy": (0,) * len(samples),
    }
    return queue_of(
        {name: Jagged.from_list(rows_of(rows)) for name, rows in columns.items()}, tags
    ), episodes


def gradients_by_hand(
    policy: Policy, queue: Queue, episodes: Sequence[Sequence[Conversation]]
) -> dict[str, Tensor]:
    """Returns gradients of GRPO with PPO's clip and the token mean, computed by plain forward passes.

    Each conversation has its own forward pass.
    """
    rewards = queue.fields["rewards"].values.double().reshape(-1, GROUP_SIZE)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten().float()
    policy.model.set_attn_implementation("eager")
    losses, seen_turns = [], set[int]()
    for advantage, conversations in zip(advantages, episodes, strict=True):
        for conversation in conversations:
            ids = torch.tensor([token_ids(conversation)], dtype=torch.int64)
            logits = policy.model(input_ids=ids).logits[0, :-1].float()
            logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            position = 0
            for turn in conversation:
                if turn.is_sampled and id(turn) not in seen_turns:
                    turn_logprobs = logprobs[position - 1 : position - 1 + len(turn.token_ids)]
                    ratio = (turn_logprobs - torch.tensor(turn.logprobs)).exp()
                    clipped = ratio.clamp(0.8, 1.28)
                    loss = -torch.minimum(ratio * advantage, clipped * advantage)
                    # Dual clip: bounds the loss of tokens of a bad episode that became much more likely.
                    losses.append(loss.clamp(max=-3.0 * advantage) if advantage < 0 else loss)
                position += len(turn.token_ids)
            seen_turns |= set(map(id, conversation))
    policy.zero_grad()
    torch.cat(losses).mean().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }


def _packed(context: Sequence[int], new: Sequence[int]) -> PackedTokens:
    rows = [torch.tensor(ids, dtype=torch.int64) for ids in (context, new)]
    return pack(Jagged.from_list(rows[:1]), Jagged.from_list(rows[1:]), device=CPU)
