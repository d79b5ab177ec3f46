"""Starts vLLM's server for a model that takes images, for ``services.extras.fleets.serve --max-images``.

It replaces functions of vLLM before the engine starts, because a server receives processed images, as an
engine of a run does.
"""

import runpy
import sys

from services.extras.fleets.serve import MAX_IMAGES, as_options, server_module


def main() -> None:
    """Serves with the options of this process, of which :data:`MAX_IMAGES` has two values."""
    from services.extras.vllm.images import image_arguments  # only a server has vLLM

    start = sys.argv.index(MAX_IMAGES)
    max_images, max_tokens = map(int, sys.argv[start + 1 : start + 3])
    # Options that follow take precedence.
    sys.argv[start : start + 3] = as_options(image_arguments(max_images, max_tokens))
    runpy.run_module(server_module(sys.argv), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
