"""Models with a vision tower on a GPU: packs equal the whole model on a CPU, and image runs train."""

import random
from pathlib import Path

import pytest
import torch

from services.common.models.loading import load_model
from services.common.models.tokenizer import load_tokenizer
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.cli import REPOSITORY, train
from tests.helpers.vision import KINDS, model_spec, plain_logprobs, random_prompt, saved_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [False, True])
def test_packed_logprobs_are_those_of_the_whole_model_on_a_cpu(
    kind: str, shares: bool, tmp_path: Path
) -> None:
    whole = saved_model(kind, tmp_path)
    spec = model_spec(tmp_path)
    model = load_model(spec, load_tokenizer(spec), dtype=torch.float32, device="cuda")
    rng = random.Random(0)
    rows = []
    for number in range(6):
        prompt, given = random_prompt(rng, number % 3)
        response = [rng.randrange(3, 64) for _ in range(5)]
        rows += [(prompt, response, given)] * 2
    expected = torch.cat([plain_logprobs(whole, *row) for row in rows])
    packed = pack(
        Jagged.from_list([torch.tensor(prompt) for prompt, _, _ in rows]),
        Jagged.from_list([torch.tensor(response) for _, response, _ in rows]),
        device=torch.device("cuda"),
        shares_prefixes=shares,
        inputs=[given for _, _, given in rows],
    )
    logprobs, _ = Policy(model, temperature=1.0)(packed)
    # The convolution that embeds patches computes in TF32.
    assert (logprobs.cpu() - expected).abs().max() <= 5e-3


@pytest.mark.parametrize("freezes", ["true", "false"])
def test_a_run_with_images_trains_on_a_gpu(tmp_path: Path, freezes: str) -> None:
    settings = (
        "rollout.replicas=1",
        "trainer.dtype=bfloat16",
        f"trainer.freeze_vision_tower={freezes}",
        "trainer.steps=4",
        "validation.every=0",
    )
    finished = train(REPOSITORY / "examples" / "images.yaml", tmp_path, *settings, timeout=500)
    assert finished.code == 0, finished.out[-2000:] + finished.err[-4000:]
    assert finished.summary["steps"] == 4
