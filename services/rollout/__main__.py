"""Entry point of a rollout process: ``python -m services.rollout``."""

from services.common.http.limits import raise_descriptor_limit
from services.common.runspec.engines import engine_kind
from services.rollout.engines.imports import begin_process_imports
from services.rollout.settings import RolloutSettings


def main() -> None:
    """Lets the engine's own process begin its imports, then imports and runs the worker."""
    settings = RolloutSettings()
    # Each running episode of an agent holds a connection, here and in the agent's process.
    raise_descriptor_limit()
    if settings.engine and settings.device != "cpu":
        begin_process_imports(engine_kind(settings.engine))
    # Imported here, so that it overlaps with the engine's imports: each takes many seconds.
    from services.rollout.worker import serve_rollout

    serve_rollout(settings)


if __name__ == "__main__":
    main()
