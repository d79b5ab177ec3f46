"""Tests of the tokens, masks and most likely tokens in SGLang's outputs."""

import math

import numpy as np
import pytest

from services.extras.sglang.outputs import new_masks, new_tokens, top_of_masks
from services.rollout.engines.base import NO_LOGPROB, EngineDiedError

# Two tokens, 7 of {7, 3} and 4 alone, with probabilities of .5, .3 and .2 in the whole vocabulary.
INFO = {
    "output_token_logprobs": [(math.log(0.5), 7, None), (math.log(0.2), 4, None)],
    "output_top_logprobs": [
        [(math.log(0.5), 7, None), (math.log(0.3), 3, None), (math.log(0.2), 4, None)],
        [(math.log(0.5), 7, None), (math.log(0.3), 3, None), (math.log(0.2), 4, None)],
    ],
    "output_token_sampling_mask": [[7, 3], [4]],
    "output_token_sampling_logprobs": [math.log(0.5 / 0.8), 0.0],
}


def test_masks_are_encoded_with_the_logprob_among_their_tokens():
    mask, logprobs = new_masks(INFO, 0, 2)
    assert mask.dtype == np.int32
    assert mask.tolist() == [~7, 3, ~4]
    assert logprobs == pytest.approx([math.log(0.625), 0.0])
    later, last = new_masks(INFO, 1, 1)
    assert (later.tolist(), last) == ([~4], [0.0])


@pytest.mark.parametrize(
    "info",
    [
        {},
        {**INFO, "output_token_sampling_mask": [[7, 3]]},
        {**INFO, "output_token_sampling_mask": [[7, 3], []]},
    ],
)
def test_a_token_without_a_mask_is_refused(info):
    with pytest.raises(EngineDiedError, match="sampling masks for 2 tokens"):
        new_masks(info, 0, 2)


def test_the_most_likely_tokens_are_those_that_could_be_drawn():
    _, whole, top = new_tokens(INFO, 0, 3)
    mask, relative = new_masks(INFO, 0, 2)
    table = top_of_masks(top, mask, np.subtract(relative, whole), 3)
    assert table.shape == (2, 4, 2)
    np.testing.assert_allclose(np.exp(table[0, :2, 1]), [0.625, 0.375], rtol=1e-6)
    assert table[0, :2, 0].tolist() == [7, 3]
    # Token 4 could not be drawn in the first place, and no other one in the second.
    assert table[0, 2, 1] == pytest.approx(NO_LOGPROB)
    assert table[0, 3, 1] < math.log(1e-6)
    np.testing.assert_allclose(table[1, 2], [4, 0.0], atol=1e-6)
    assert table[1, :2, 1].tolist() == pytest.approx([NO_LOGPROB] * 2)
