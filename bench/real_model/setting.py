"""Settings that all sides of the comparison share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.whole_run import REPOSITORY

ADDITION = REPOSITORY / "examples" / "addition" / "addition.py"


@dataclass(frozen=True, slots=True)
class Setting:
    """Batch, lengths and learning rate."""

    steps: int = 60
    prompts_per_step: int = 32
    group_size: int = 16
    max_prompt_tokens: int = 64
    max_response_tokens: int = 64
    learning_rate: float = 1e-5
    warmup_steps: int = 5
    evaluate_every: int = 10
    dtype: str = "bfloat16"
    engine: str = "vllm"

    @property
    def samples_per_step(self) -> int:
        """Samples of a batch."""
        return self.prompts_per_step * self.group_size

    def spec(self, model: Path, **settings: Any) -> dict[str, Any]:
        """Returns the run's specification."""
        return {
            "name": "addition",
            "model": {"path": str(model)},
            "data": {
                "train": {"source": "python", "path": f"{ADDITION}:train"},
                "heldout": {
                    "addition": {
                        "source": "python",
                        "path": f"{ADDITION}:heldout",
                        "samples_per_prompt": 0,
                    }
                },
                "chat_template": True,
                "max_prompt_tokens": self.max_prompt_tokens,
            },
            "rollout": {
                "engine": self.engine,
                "replicas": 1,
                "group_size": self.group_size,
                "max_response_tokens": self.max_response_tokens,
                "rewards": [{"name": f"{ADDITION}:reward"}],
            },
            "trainer": {
                "steps": self.steps,
                "prompts_per_step": self.prompts_per_step,
                "dtype": self.dtype,
                "compile": self.engine == "vllm",
                "optimizer": {
                    "learning_rate": self.learning_rate,
                    "warmup_steps": self.warmup_steps,
                },
            },
            "validation": {"every": self.evaluate_every},
            **settings,
        }


def smoke(setting: Setting) -> Setting:
    """Returns a setting with a few steps on a CPU."""
    return replace(
        setting,
        steps=2,
        prompts_per_step=2,
        group_size=4,
        max_response_tokens=8,
        evaluate_every=1,
        dtype="float32",
        engine="torch",
    )
