"""Reward service that scores with a reward model.

``python -m services.extras.reward_services.classifier MODEL --bind HOST:PORT --token-file FILE``

Serves any ``AutoModelForSequenceClassification``, including models that ``algorithm.loss: reward_model``
trained. Requests that arrive during a pass are scored together in the next one.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.common.errors import InvalidArgumentError
from services.common.lifetime import wait_for_shutdown
from services.common.models.loading import SCORES_BEFORE_END
from services.common.models.tokenizer import Tokenizer
from services.common.task_group import TaskGroup
from services.extras.environments.guard import add_options, serve_guarded

_MAX_WAITING = 4096


class Classifier:
    """Scores conversations with a sequence classifier.

    Args:
        model: Folder or Hugging Face id of the model and its tokenizer.
        label: Class whose probability is the score; None for a model with one output, which is the score.
        max_tokens: Max length of a text; longer ones are refused.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: If the model has several classes and ``label`` is None or unknown, or it has one
            output and ``label`` is given.
    """

    def __init__(
        self, model: str, *, label: str | None = None, max_tokens: int = 8192, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(model)
        self._model = loaded.to(device).eval()
        self._device = device
        self._max_tokens = max_tokens
        # Tokenizing megabytes would block all other requests.
        self._max_characters = max_tokens * max(map(len, self._tokenizer.get_vocab()))
        labels = {str(name): int(index) for name, index in loaded.config.label2id.items()}
        if (label is None) != (loaded.config.num_labels == 1) or label not in (None, *labels):
            raise ValueError(
                f"{model!r} has the classes {', '.join(labels)}, got --label {label!r}; omit it for a model "
                "with one output, otherwise set it to the class whose probability is the score"
            )
        self._label_index = None if label is None else labels[label]
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._prompts = getattr(loaded.config, SCORES_BEFORE_END, None)

    def tokens(self, prompt: str, response: str) -> list[int]:
        """Tokenizes a prompt and its response, with the chat template if the model has one.

        Control tokens that they spell are tokenized as text.

        For a reward model that Slipstream trained, the tokens are those of training: prompt and response are
        tokenized separately, without the token that ends a response.

        Raises:
            ValueError: If the text is empty or too long.
        """
        num_characters = len(prompt) + len(response)
        if num_characters > self._max_characters:
            raise ValueError(
                f"the text must have 1 to {self._max_tokens} tokens, got {num_characters} characters, too "
                "many for that"
            )
        if self._prompts is not None:
            ids = self._open_tokens(prompt, response)
        elif self._tokenizer.chat_template is None:
            ids = self._tokenizer.encode(prompt + response, split_special_tokens=True)
        else:
            chat = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            ids = self._texts.encode(self._texts.render_chat(chat, opens_answer=False))
        if not 0 < len(ids) <= self._max_tokens:
            raise ValueError(f"the text must have 1 to {self._max_tokens} tokens, got {len(ids)}")
        return list(ids)

    def _open_tokens(self, prompt: str, response: str) -> list[int]:
        texts = self._texts
        if self._prompts == "text":
            before = texts.encode_prompt(texts.escape(prompt))
        else:
            chat = [{"role": "user", "content": prompt}]
            before = texts.encode(texts.render_chat(chat))
        return [*before, *texts.encode(texts.escape(response))]

    @cached_property
    def _texts(self) -> Tokenizer:
        """Encodes the control tokens of prompts and responses as text, so that these add no turn.

        Raises:
            ValueError: If the model has no end token.
        """
        return Tokenizer(self._tokenizer, name=str(self._tokenizer.name_or_path))

    @torch.no_grad()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, texts))
        pad = int(self._tokenizer.pad_token_id)
        ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
        mask = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
        logits = self._model(
            input_ids=ids.to(self._device), attention_mask=mask.long().to(self._device)
        ).logits.float()
        label_scores = (
            logits[:, 0] if self._label_index is None else logits.softmax(1)[:, self._label_index]
        )
        return [float(score) for score in label_scores]


class ClassifierService:
    """Answers reward requests, several in one pass.

    Args:
        max_batch: Max texts per pass.
    """

    def __init__(self, classifier: Classifier, *, max_batch: int = 32) -> None:
        self._classifier = classifier
        self._max_batch = max_batch
        self._waiting: asyncio.Queue[tuple[list[int], asyncio.Future[float]]] = asyncio.Queue(
            _MAX_WAITING
        )

    def app(self) -> Starlette:
        """Returns the application: ``POST /score`` in the reward service format, and ``GET /healthz``."""
        return Starlette(
            routes=[
                Route("/healthz", lambda _: JSONResponse({})),
                Route("/score", self._score, methods=["POST"]),
            ]
        )

    async def run(self) -> None:
        """Scores waiting requests until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while not self._waiting.empty() and len(batch) < self._max_batch:
                batch.append(self._waiting.get_nowait())
            try:
                scores = await asyncio.to_thread(
                    self._classifier.scores, [text for text, _ in batch]
                )
            except Exception as error:  # noqa: BLE001 -- one bad batch must not end the service
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), score in zip(batch, scores, strict=True):
                if not answer.done():
                    answer.set_result(score)

    async def _score(self, request: Request) -> JSONResponse:
        try:
            fields = await request.json()
            text = self._classifier.tokens(str(fields["prompt"]), str(fields["response"]))
        except (ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
        answer: asyncio.Future[float] = asyncio.Future()
        try:
            self._waiting.put_nowait((text, answer))
        except asyncio.QueueFull:
            return JSONResponse({"error": "busy"}, status_code=429)
        return JSONResponse({"score": await answer})


async def _serve(service: ClassifierService, options: argparse.Namespace) -> None:
    async with TaskGroup() as tasks, serve_guarded(service.app(), options) as port:
        scoring = tasks.create_task(service.run())
        sys.stdout.write(f"scoring on port {port}\n")
        sys.stdout.flush()
        await wait_for_shutdown()
        scoring.cancel()


def main() -> None:
    """Runs the command-line program."""
    parser = argparse.ArgumentParser(description="Serve a sequence classifier as a reward.")
    parser.add_argument("model", help="folder or Hugging Face id")
    add_options(parser)
    parser.add_argument("--label", help="class whose probability is the score")
    parser.add_argument("--max-tokens", type=int, default=8192, help="max tokens of a text")
    parser.add_argument("--max-batch", type=int, default=32, help="max texts of one forward pass")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    options = parser.parse_args()
    classifier = Classifier(
        options.model, label=options.label, max_tokens=options.max_tokens, device=options.device
    )
    try:
        asyncio.run(_serve(ClassifierService(classifier, max_batch=options.max_batch), options))
    except (ValueError, InvalidArgumentError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
