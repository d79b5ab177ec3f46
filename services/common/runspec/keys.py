"""The keys of a specification, the keys of a document, and suggestions for unknown keys."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.common.runspec.run import RunSpec

_ELSEWHERE = {
    "lr": "trainer.optimizer.learning_rate",
    "batch_size": "trainer.prompts_per_step",
    "train_batch_size": "trainer.prompts_per_step",
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "ppo_epochs": "trainer.updates_per_step",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "n": "rollout.group_size",
    "max_tokens": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "reward": "rollout.rewards",
    "beta": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "entropy_coef": "algorithm.entropy_coefficient",
    "adv_estimator": "algorithm.advantage",
    "model_name": "model.path",
    "num_gpus": "trainer.world_size",
    "save_freq": "trainer.checkpoint.every",
    "test_freq": "validation.every",
    "val_before_train": "validation.before_train",
    "val_only": "validation.only",
    "val_batch_size": "validation.samples_per_prompt",
    "val_files": "data.heldout",
    "train_files": "data.train",
    "resume_mode": "trainer.checkpoint.start_from",
    "resume_from_path": "trainer.checkpoint.start_from",
    "default_local_dir": "trainer.checkpoint.directory",
    "max_actor_ckpt_to_keep": "trainer.checkpoint.keep",
    "report_to": "trackers",
    "logger": "trackers",
    "wandb": "trackers",
    "project_name": "trackers.N.project",
}
"""Names of keys in other libraries, with the corresponding key here."""


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the dotted keys below a part of the specification, groups first; ``N`` is an index."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for below, submodel in parts_of(info):
            yield from fields_of(submodel, f"{prefix}{name}.{below}")


def parts_of(info: FieldInfo) -> list[tuple[str, type[BaseModel]]]:
    """Returns the parts that a field contains, in each of its forms; none if it contains a value.

    Returns:
        The infix between the field's key and the part's keys, and the part. The infix is empty,
            ``N.`` for a list, or ``NAME.`` for a mapping.
    """
    return list(_parts_of(info.annotation, ""))


def _parts_of(annotation: Any, below: str) -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield below, annotation
        return
    inner = {tuple: "N.", dict: "NAME."}.get(get_origin(annotation), below)
    for argument in get_args(annotation):
        yield from _parts_of(argument, inner)


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of a specification with their values."""
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(key: str, value: Any) -> dict[str, Any]:
    """Returns a document with the value of one dotted key."""
    *groups, name = key.split(".")
    document = {name: value}
    for group in reversed(groups):
        document = {group: document}
    return document


def did_you_mean_key(key: str) -> str:
    """Returns a suggestion for an unknown key: a sibling with a similar name, or the same name elsewhere."""
    keys = _keys()
    parent, _, leaf = key.rpartition(".")
    top = key.partition(".")[0]
    # Among keys with the same name, the last one wins: one in the same part of the specification.
    ordered = sorted(keys, key=lambda name: name.partition(".")[0] == top)
    by_leaf = {name.rpartition(".")[2]: name for name in ordered}
    # A sibling may be below a name that the user chose.
    parents = {parent, f"{parent.rpartition('.')[0]}.NAME"}
    beside = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] in parents}
    if meant := _ELSEWHERE.get(leaf) or by_leaf.get(leaf):
        return f" Did you mean {meant!r}?"
    for names, cutoff in ((beside, 0.6), (by_leaf, 0.75)):
        if matches := get_close_matches(leaf, names, n=1, cutoff=cutoff):
            return f" Did you mean {names[matches[0]]!r}?"
    return ""


def is_required(key: str) -> bool:
    """Returns True if a key has no default; ``N`` is an index."""
    return any(name == key and info.is_required() for name, info in fields_of(RunSpec))


@cache
def _keys() -> tuple[str, ...]:
    return tuple(key for key, _ in fields_of(RunSpec))


LIVE_KEYS: Final[Mapping[str, str]] = {
    "limits": "every key of the group; at once, for work in progress at the next step",
    "rollout.replicas": "additional rollouts join after they have loaded, surplus ones leave at once",
    "trainer.checkpoint.every": "from the next step",
    "trainer.checkpoint.every_s": "from the next step",
    "validation.every": "from the next step",
    "validation.timeout_s": "from the next evaluation",
}
"""Keys, and groups of keys, with the time at which a change takes effect.

Only the controller reads them, at each use. Workers read other keys once, when they load.
"""


def is_live(key: str) -> bool:
    """Returns True if a key can change while a run trains."""
    return key in LIVE_KEYS or key.partition(".")[0] in LIVE_KEYS


def fixed_key_problems(changes: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for each key of a nested document that cannot change while a run trains."""
    for key, _ in flat(changes):
        if not is_live(key):
            yield (
                f"{key}: cannot change while the run trains; these keys can: {', '.join(LIVE_KEYS)}; fork "
                "the run to continue from a checkpoint with other values"
            )
