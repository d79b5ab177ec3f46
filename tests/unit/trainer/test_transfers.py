"""Tests of the validation of samples from the transferqueue before a model reads them."""

import pytest

from services.common.errors import InvalidArgumentError
from services.trainer.transfers import of_vocabulary
from services.wire.data.jagged import Jagged
from tests.helpers.batches import policy_of, random_queue, spec_of


@pytest.mark.parametrize("token", [10**6, -1])
def test_a_token_that_the_model_does_not_have_is_named_with_its_sample(token: int) -> None:
    policy = policy_of(spec_of())
    queue = random_queue(policy)
    responses = queue.fields["response_ids"]
    values = responses.values.clone()
    values[int(responses.offsets()[3])] = token
    bad = queue.replaced(response_ids=Jagged(values, responses.lengths))
    fetch = of_vocabulary(bad.fetch, policy.model.config.vocab_size)
    with pytest.raises(InvalidArgumentError, match=rf"{bad.meta.keys[3]} has the token {token}"):
        fetch(bad.meta, ("prompt_ids", "response_ids"))
    whole = of_vocabulary(queue.fetch, policy.model.config.vocab_size)
    assert set(whole(queue.meta, ("prompt_ids",))) == {"prompt_ids"}
