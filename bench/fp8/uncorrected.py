"""Policy gradient that takes the trainer's probabilities for those that sampled the tokens."""

from services.trainer.algorithm.loss import LossTokens, TokenLoss


def loss(tokens: LossTokens) -> TokenLoss:
    """Returns the loss without any weight for the policy that sampled."""
    ratio = (tokens.logprobs - tokens.logprobs.detach()).exp()
    return TokenLoss(-ratio * tokens.advantages)
