"""Data dictionary: the fields of a sample, their types and meaning, and identifiers.

The tensors of a sample are fields, stored in the transferqueue. Its small facts are tags, which are
part of ``KVBatchMeta`` and all that the controller sees; ``docs/data-plane.md`` lists them.
"""

import os
import re
import time
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Definition of one tensor of a sample."""

    name: str
    """Name on the wire."""
    dtype: str
    """Element type."""
    shape: str
    """Shape of one sample; ``P`` prompt tokens, ``R`` response tokens, ``K`` runs of versions,
    ``L`` layers of experts, of which ``E`` are chosen, ``S`` tokens that could be drawn, ``M`` most likely
    tokens, ``Q`` tokens of the teacher's prompt, ``B`` bytes.
    """
    producer: str
    """Role that writes it: ``rollout``, ``logp``, ``ref_logp`` or ``critic``."""
    meaning: str
    """Meaning of the values."""


FIELDS: Final = tuple(
    Field(name=name, dtype=dtype, shape=shape, producer=producer, meaning=meaning)
    for name, dtype, shape, producer, meaning in (
        ("prompt_ids", "int32", "[P]", "rollout", "tokens of the prompt, stored once per group"),
        (
            "response_ids", "int32", "[R]", "rollout",
            "tokens after the prompt, including tool tokens and further conversations with their prompts",
        ),
        ("response_mask", "bool", "[R]", "rollout", "True if the policy sampled the token"),
        (
            "rollout_logprobs", "float32", "[R]", "rollout",
            "log-probability of each token under the policy and temperature that sampled it",
        ),
        (
            "version_runs", "int32", "[K, 2]", "rollout",
            "run-length encoded weight versions (weight_version, num_tokens); -1 for tool tokens, -2 for "
            "the prompt of each further conversation, which starts another sequence of the sample",
        ),
        (
            "routed_experts", "uint8 or int16", "[P + R - 1, L, E]", "rollout",
            "experts that the engine chose for each token except the last, in each mixture layer; the max "
            "value of the dtype if they are unknown; only with rollout.routing_replay",
        ),
        (
            "sampling_mask", "int32", "[S]", "rollout",
            "ids of the tokens that could be drawn under top_p and top_k, for one response token after the "
            "other; the first id i of each is stored as -1 - i, and a response token without a limit has the "
            "single entry -2**31; only with rollout.sampling.top_k",
        ),
        (
            "model_inputs", "uint8", "[B]", "rollout",
            "tensors that the model takes besides the prompt's tokens, as one opaque bundle; stored once per "
            "group if all its samples have the same; empty if the prompt has none; only with "
            "data.model_inputs_column or model.images",
        ),
        (
            "turn_inputs", "uint8", "[B]", "rollout",
            "the same of tokens that a workflow observed after the prompt, as numbered opaque bundles: the "
            "number is the place of the turn's first token among those of prompt and response; only with "
            "model.images and a workflow other than single_turn",
        ),
        ("rewards", "float32", "[]", "rollout", "task reward of the whole response"),
        (
            "token_rewards", "float32", "[R]", "rollout",
            "part of the reward that each token earned; only with rewards per turn or per token",
        ),
        (
            "teacher_prompt_ids", "int32", "[Q]", "rollout",
            "tokens that the teacher sees in place of the prompt; empty if the response has no teacher; only "
            "with teacher.prompt_column or teacher.demonstration",
        ),
        (
            "teacher_topk", "float32", "[R, M + 1, 2]", "rollout",
            "ids of a served teacher's most likely tokens in place of each response token, with their "
            "log-probabilities; the last entry has the id -1 and the log-probability of all other tokens; "
            "only with algorithm.loss distill",
        ),
        (
            "sampler_topk", "float32", "[R, M + 1, 2]", "rollout",
            "ids of the tokens that the policy most likely draws in place of each response token, with their "
            "log-probabilities, as in teacher_topk; places beyond the vocabulary have the id -1; only with "
            "algorithm.score_centering",
        ),
        ("ref_logprobs", "float32", "[R]", "ref_logp", "log-probability under the frozen reference"),
        (
            "proximal_logprobs", "float32", "[R]", "logp",
            "log-probability under the trainer's weights at the start of the step",
        ),
        ("proximal_version", "int64", "[]", "logp", "weight version of proximal_logprobs"),
        ("values", "float32", "[R]", "critic", "return that the critic expects before each token"),
    )
)  # fmt: skip

RECORD_FIELDS: Final = ("sample_record", "training_record")
"""Fields of the partition ``records`` with the JSON record, uint8 ``[B]``, of a rollout or of the trainer."""

TOOL_VERSION: Final = -1
"""Weight version of tokens that no policy sampled."""
PROMPT_VERSION: Final = -2
"""Weight version of a prompt inside a response: it starts another sequence of the same sample."""
TOKEN_REWARDS: Final = "token_rewards"  # noqa: S105 -- tokens of a text
ROUTED_EXPERTS: Final = "routed_experts"
SAMPLING_MASK: Final = "sampling_mask"
ALL_TOKENS: Final = -(2**31)
"""Entry of a sampling mask for a response token that was drawn from all tokens."""
MODEL_INPUTS: Final = "model_inputs"
TURN_INPUTS: Final = "turn_inputs"
TEACHER_PROMPT: Final = "teacher_prompt_ids"
TEACHER_TOP_K: Final = "teacher_topk"
SAMPLER_TOP_K: Final = "sampler_topk"
ROLLOUT_FIELDS: Final = tuple(
    field.name
    for field in FIELDS
    if field.producer == "rollout"
    and field.name
    not in (
        ROUTED_EXPERTS,
        SAMPLING_MASK,
        TOKEN_REWARDS,
        MODEL_INPUTS,
        TURN_INPUTS,
        TEACHER_PROMPT,
        TEACHER_TOP_K,
        SAMPLER_TOP_K,
    )
)
"""Fields that every sample has."""


def partition_id(run_id: str, purpose: Literal["train", "validation", "partial", "records"]) -> str:
    return f"{run_id}/{purpose}"


def sample_key(group_id: str, member: int) -> str:
    return f"{group_id}.{member}"


def group_of(key: str) -> str:
    """Returns the group in a sample's key; the key itself if it has no member."""
    return key.rpartition(".")[0] or key


def run_of(partition_id: str) -> str:
    return partition_id.partition("/")[0]


def new_run_id(after: str = "") -> str:
    """Returns ``run_`` and a UUIDv7 in hex that sorts after another one, though the clock was set back."""
    newest = int(after[4:], 16) >> 80 if re.fullmatch("run_[0-9a-f]{32}", after) else 0
    milliseconds = min(max(time.time_ns() // 1_000_000, newest + 1), (1 << 48) - 1)
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    return f"run_{value:032x}"


def new_id(prefix: str) -> str:
    """Returns ``prefix`` and 16 random hexadecimal digits."""
    return f"{prefix}_{os.urandom(8).hex()}"
