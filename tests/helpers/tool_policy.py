"""A tiny model that learns within seconds to call the tool ``bash`` in five turns and then to answer."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.common.models.loading import stored_tensors
from services.common.models.tokenizer import Tokenizer

NUM_CALLS = 5
MAX_TOKENS = 2048
TASK = "Roll the dice."
ANSWER = "Done."
WORDS = ("high", "low", "even", "odd")
_BEFORE_TOOLS = "You may call these functions:\n<tools>"
_AFTER_TOOLS = "\n</tools>\nFor a call return JSON within <tool_call></tool_call>."
_OTHER_WORDS = (
    "You play with dice Runs a command which must be echo The to run Execute bash command execute "
    "Use shell last was title strict of in"
)
TEMPLATE = """\
{%- if tools %}
{{- "<|im_start|>system\\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
{{- BEFORE }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- AFTER + "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
{{- "<|im_start|>system\\n" + messages[0].content + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
{%- elif message.role != "system" or not loop.first %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{{- "\\n<tool_call>\\n" + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) }}
{{- "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}""".replace(
    "BEFORE", json.dumps(_BEFORE_TOOLS)
).replace("AFTER", json.dumps(_AFTER_TOOLS))
"""Chat template that renders tools, calls and results as Qwen 2.5 does."""

_MARKS = ("<|im_start|>", "<|im_end|>")
_REPLY = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class ToolPolicy:
    """Weights of two versions, which differ in the frequencies of the words in their replies."""

    tokenizer: Tokenizer
    config: Qwen2Config
    weights: tuple[dict[str, Tensor], dict[str, Tensor]]

    def model(self, version: int) -> PreTrainedModel:
        """Returns the model of a weight version, which counts from 1."""
        model = Qwen2ForCausalLM(self.config).eval()
        with torch.no_grad():
            for name, value in stored_tensors(model).items():
                value.copy_(self.weights[version - 1][name])
        return model


def teach_policy(*, num_steps: int = 250, seed: int = 0) -> ToolPolicy:
    """Trains both versions by maximum likelihood on generated transcripts.

    A transcript begins with random tokens, a system prompt and a tool with random words, so that the model
    learns to act on the end of the conversation. Words and numbers of its replies are random, so that
    sampling has a choice and logprobs are not all near 0. Words are encoded as one token per letter, as no
    tokenizer does, so that tokenizing a reply again gives other tokens.
    """
    draws = random.Random(seed)
    tokenizer = _make_tokenizer([_transcript(draws, (1, 1, 1, 1)) for _ in range(100)])
    config = Qwen2Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_TOKENS,
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        _train(model, tokenizer, draws, (1, 1, 1, 1), num_steps=num_steps, peak=6e-3)
        first = _weights(model)
        _train(model, tokenizer, draws, (4, 1, 1, 1), num_steps=num_steps // 8, peak=1e-3)
    return ToolPolicy(tokenizer, config, (first, _weights(model)))


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in stored_tensors(model).items()}


def _transcript(draws: random.Random, odds: Sequence[int]) -> str:
    """Returns a random conversation as the chat template renders it."""
    is_wrapped = draws.random() < 0.5
    text = f"{_system_prompt(draws)}<|im_start|>user\n{TASK}<|im_end|>\n"
    for number in range(1, NUM_CALLS + 1):
        reasoning = f"Step {number}: {draws.choices(WORDS, odds)[0]}."
        output = f"Roll {number} gave {draws.randint(1, 6)}."
        if number == NUM_CALLS:
            output = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        call = json.dumps({"name": "bash", "arguments": {"command": f"echo {output}"}})
        if is_wrapped:  # by mini-swe-agent
            output = f"<returncode>0</returncode>\n<output>\n{output}\n</output>"
        text += f"<|im_start|>assistant\n{reasoning}\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        text += f"<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n"
    return f"{text}<|im_start|>assistant\n{ANSWER}<|im_end|>\n"


def _system_prompt(draws: random.Random) -> str:
    def words() -> str:
        return " ".join(draws.choices(_OTHER_WORDS.split(), k=draws.randint(1, 12))) + "."

    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": words()}},
        "required": ["command"],
        "additionalProperties": False,
        "title": "bash_args",
    }
    names = draws.sample(sorted(parameters), draws.randint(2, len(parameters)))
    function = {
        "name": "bash",
        "description": words(),
        "parameters": {key: parameters[key] for key in names},
    }
    offered = json.dumps({"type": "function", "function": function})
    instruction = f"{words()}\n\n" if draws.random() < 0.5 else ""
    return f"<|im_start|>system\n{instruction}{_BEFORE_TOOLS}\n{offered}{_AFTER_TOOLS}<|im_end|>\n"


def _make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with byte-pair merges trained on texts, and with the chat template."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[*_MARKS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([piece for text in texts for piece in _plain(text)], trainer)
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_MARKS[1], pad_token=_MARKS[1]
    )
    inner.add_special_tokens({"additional_special_tokens": [_MARKS[0]]})
    inner.chat_template = TEMPLATE
    return Tokenizer(inner, name="taught")


def _plain(text: str) -> list[str]:
    return re.split("|".join(map(re.escape, _MARKS)), text)


def _encoded(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, bool]]:
    """Yields each token of a transcript with True if the policy samples it."""
    for index, segment in enumerate(_REPLY.split(text)):
        is_reply = index % 2 == 1
        for piece in re.split(f"({'|'.join(WORDS)})", segment) if is_reply else [segment]:
            letters = piece if piece in WORDS else [piece]
            yield from ((id_, is_reply) for letter in letters for id_ in tokenizer.encode(letter))


def _train(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    draws: random.Random,
    odds: Sequence[int],
    *,
    num_steps: int,
    peak: float,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=num_steps)
    for _ in range(num_steps):
        rows = []
        for _ in range(4):
            before = [
                (draws.randrange(tokenizer.vocab_size), False) for _ in range(draws.randrange(100))
            ]
            rows.append([*before, *_encoded(tokenizer, _transcript(draws, odds))])
        width = max(map(len, rows))
        padded = [[*row, *[(0, False)] * (width - len(row))] for row in rows]
        ids = torch.tensor([[id_ for id_, _ in row] for row in padded])
        is_sampled = torch.tensor([[sampled for _, sampled in row] for row in padded])[:, 1:]
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][is_sampled]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][is_sampled])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
