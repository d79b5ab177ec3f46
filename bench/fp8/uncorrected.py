"""Policy gradient without a correction: it assumes that the trainer's own policy sampled the tokens."""

from services.trainer.algorithm.loss import LossTokens, TokenLoss


def loss(tokens: LossTokens) -> TokenLoss:
    """Returns the loss of each token, without an importance weight for the sampling policy."""
    ratio = (tokens.logprobs - tokens.logprobs.detach()).exp()
    return TokenLoss(-ratio * tokens.advantages)
