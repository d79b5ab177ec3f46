"""The keys of a specification that can change while a run trains."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.common.runspec.keys import flat

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
