"""Tests that a served teacher returns the same values as the trainer computes from that teacher."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.data.prompts import Prompt
from services.rollout.failures import GroupError
from services.rollout.rewards.base import Score
from services.rollout.sampling.sample import Sample
from services.rollout.sampling.teacher import Teacher
from services.rollout.workflows.turns import Turn
from services.trainer.algorithm.divergence import most_likely
from services.trainer.batch.packing import pack
from services.trainer.model.policy import decoder_states, output_head
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU, policy_of, spec_of

TOP_K = 5
REACH = AddressPolicy(inner_hosts=("127.0.0.1",))


def _spec(server: str = "vllm", **teacher: Any) -> RunSpec:
    return spec_of(
        teacher={
            "path": "tiny:qwen2-0.4m",
            "url": "http://127.0.0.1:1",
            "server": server,
            "timeout_s": 20,
            **teacher,
        },
        algorithm={
            "loss": "distill",
            "loss_arguments": {"top_k": TOP_K},
            "kl": {"coefficient": 0.1},
        },
    )


def _sample(member: int, response: tuple[int, ...], *, reward: float = 0.0) -> Sample:
    turn = Turn(
        token_ids=response,
        logprobs=(-1.0,) * len(response),
        version_runs=((0, len(response)),),
        finish_reason="stop",
    )
    return Sample(
        member=member,
        prompt_ids=(3, 4, 5),
        turns=(turn,),
        score=Score(reward),
        finish_reason="stop",
        is_greedy=False,
    )


def _prompt(**changes: Any) -> Prompt:
    return Prompt(token_ids=(3, 4, 5), text="12", answer=None, row={}, data_source="x", **changes)


def _logprobs(ids: list[int]) -> torch.Tensor:
    """Returns the ``[L - 1, V]`` logprobs of a plain forward pass."""
    model = policy_of(_spec(), scale=1.5).model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def _vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Returns vLLM's ``prompt_logprobs``: the most likely tokens, and the prompt's token with its rank."""
    ids, entries = request["prompt"], [None]
    for token, row in zip(ids[1:], _logprobs(ids), strict=True):
        order = row.argsort(descending=True).tolist()
        chosen = {*order[: request["prompt_logprobs"]], token}
        entries.append(
            {
                str(token): {"logprob": row[token].item(), "rank": order.index(token) + 1}
                for token in sorted(chosen)
            }
        )
    return {"choices": [{"prompt_logprobs": entries}]}


def _sglang(request: dict[str, Any]) -> dict[str, Any]:
    ids = request["input_ids"]
    token_logprobs: list[Any] = [[None, ids[0], None]]
    top: list[Any] = [None]
    for token, row in zip(ids[1:], _logprobs(ids), strict=True):
        values, places = row.topk(request["top_logprobs_num"])
        token_logprobs.append([row[token].item(), token, None])
        top.append([[v, i, None] for v, i in zip(values.tolist(), places.tolist(), strict=True)])
    return {"meta_info": {"input_token_logprobs": token_logprobs, "input_top_logprobs": top}}


def _teacher(
    spec: RunSpec, answer: Callable[[dict[str, Any]], dict[str, Any]], failures: int = 0
) -> Teacher:
    failures_left = [failures]

    def handle(request: httpx.Request) -> httpx.Response:
        failures_left[0] -= 1
        if failures_left[0] >= 0:
            return httpx.Response(503)
        return httpx.Response(200, json=answer(json.loads(request.content)))

    return Teacher(
        spec,
        load_tokenizer(spec.model),
        max_tokens=64,
        reach=REACH,
        transport=httpx.MockTransport(handle),
    )


@pytest.mark.parametrize(("server", "answer"), [("vllm", _vllm), ("sglang", _sglang)])
async def test_a_server_returns_what_the_trainer_would_compute(server: str, answer: Any) -> None:
    spec = _spec(server)
    responses = [(6, 7, 8, 2), (9, 3)]
    samples = [_sample(member, row) for member, row in enumerate(responses)]
    fields = await _teacher(spec, answer, failures=1).fields("train", _prompt(), samples)
    policy = policy_of(spec, scale=1.5)
    for row, logprobs, top in zip(
        responses, fields["ref_logprobs"], fields["teacher_topk"], strict=True
    ):
        packed = pack(
            Jagged.from_list([torch.tensor([3, 4, 5])]),
            Jagged.from_list([torch.tensor(row)]),
            device=CPU,
        )
        with torch.no_grad():
            hidden = decoder_states(policy.model, packed)[packed.predictors]
            expected = most_likely(hidden, output_head(policy.model), TOP_K, temperature=1.0)
            torch.testing.assert_close(logprobs, policy(packed)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(top, expected, atol=1e-4, rtol=0)


async def test_a_teacher_with_its_own_prompt_sees_it() -> None:
    prompts: list[list[int]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts.append(request["prompt"])
        return _vllm(request)

    teacher = _teacher(_spec(prompt_column="solved"), answer)
    fields = await teacher.fields("train", _prompt(teacher_ids=(9, 9, 3, 4)), [_sample(0, (6, 7))])
    assert prompts == [[9, 9, 3, 4, 6, 7]]
    assert [row.tolist() for row in fields["teacher_prompt_ids"]] == [[9, 9, 3, 4]]
    assert fields["teacher_topk"][0].shape == (2, TOP_K + 1, 2)


async def test_a_teacher_sees_the_best_other_response_of_the_group() -> None:
    """The server gets no request for a response without another good response in its group."""
    spec = spec_of(
        teacher={"path": "policy", "demonstration": "e{response}e"},
        algorithm={"loss": "distill"},
    )
    tokenizer = load_tokenizer(spec.model)
    good, bad = tuple(tokenizer.encode("45")), tuple(tokenizer.encode("6"))
    samples = [_sample(0, bad), _sample(1, good, reward=1.0), _sample(2, bad, reward=0.5)]
    teacher = Teacher(spec, tokenizer, max_tokens=64, reach=REACH)
    (better, none, same) = (await teacher.fields("train", _prompt(), samples))["teacher_prompt_ids"]
    assert better.tolist() == tokenizer.encode_prompt("12e45e") == same.tolist()
    assert none.tolist() == []
    short = Teacher(spec, tokenizer, max_tokens=4, reach=REACH)
    fields = await short.fields("train", _prompt(), samples)
    assert [len(row) for row in fields["teacher_prompt_ids"]] == [0, 0, 0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: {"choices": []},
        lambda request: _vllm({**request, "prompt_logprobs": 1}),
        lambda request: _vllm({**request, "prompt": request["prompt"][:2]}),
    ],
)
async def test_an_answer_of_another_form_fails_the_group(answer: Any) -> None:
    with pytest.raises(GroupError) as caught:
        await _teacher(_spec(), answer).fields("train", _prompt(), [_sample(0, (6, 7, 8))])
    assert caught.value.reason == "teacher_failed"
    assert caught.value.retryable


async def test_a_busy_server_fails_the_group_after_the_deadline() -> None:
    teacher = _teacher(_spec(timeout_s=0.3), _vllm, failures=100)
    with pytest.raises(GroupError) as caught:
        await teacher.fields("train", _prompt(), [_sample(0, (6, 7))])
    assert caught.value.reason == "teacher_failed"
