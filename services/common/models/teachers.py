"""Checks that a teacher can score a policy's tokens: both must have the same vocabulary."""

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec


def check_teacher(spec: RunSpec) -> None:
    """Checks that the teacher of a run, if it has one, has the tokens of its policy.

    Raises:
        ValueError: If they differ; the message has the first difference.
    """
    if spec.teacher is None:
        return
    own = load_tokenizer(spec.model).vocabulary
    others = load_tokenizer(spec.teacher).vocabulary
    differing = sorted(own.keys() ^ others.keys() | {t for t in own if own[t] != others.get(t)})
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher and model need the same tokenizer, but {len(differing)} of their {len(others)} and "
            f"{len(own)} tokens differ: {token!r} has id {others.get(token, 'none')} in teacher and "
            f"{own.get(token, 'none')} in model; use a teacher of the same family"
        )
