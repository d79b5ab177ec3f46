"""Workflow with one prompt and one answer."""

from services.rollout.workflows.base import Episode


class SingleTurn:
    """Samples one turn."""

    async def run(self, episode: Episode) -> None:
        """Samples the answer."""
        await episode.generate()
