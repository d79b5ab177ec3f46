"""One prompt, one answer."""

from services.rollout.workflows.base import Episode


class SingleTurn:
    """Samples one turn."""

    async def run(self, episode: Episode) -> None:
        """Sample the answer."""
        await episode.generate()
