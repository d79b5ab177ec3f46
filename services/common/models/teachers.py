"""Whether a teacher can say how likely a policy's tokens are: both must mean the same by them."""

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec


def check_teacher(spec: RunSpec) -> None:
    """See that the teacher of a run, if it has one, has the tokens of its policy.

    Raises:
        ValueError: With the first difference.
    """
    if spec.teacher is None:
        return
    own = load_tokenizer(spec.model).vocabulary
    others = load_tokenizer(spec.teacher).vocabulary
    differing = sorted(own.keys() ^ others.keys() | {t for t in own if own[t] != others.get(t)})
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher has {len(others)} tokens and model {len(own)}, of which {len(differing)} differ: "
            f"{token!r} is {others.get(token, 'unknown')} to the teacher and {own.get(token, 'unknown')} to "
            "the policy, so the teacher cannot judge the policy's tokens; name a teacher of the same family"
        )
