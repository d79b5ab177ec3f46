"""Starts vLLM's server as a member of a fleet: ``python -m services.extras.fleets.serve --model NAME ...``.

It takes the options of ``vllm serve`` and adds those that a fleet needs (docs/fleets.md).
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.common.host import usable_processors
from services.common.runspec.engines import ENGINES
from services.extras.fleets.protocol import (
    MIDDLEWARE,
    SCHEDULER,
    WITHOUT_TOKEN,
    WORKER_EXTENSION,
)
from services.extras.vllm.kind import CAPTURED_SIZES, CORES_FOR_TWO_PROCESSES

_MODULE: Final = "vllm.entrypoints.openai.api_server"
_OF_FURTHER_HOST: Final = "services.extras.fleets.headless"
_WITH_IMAGES: Final = "services.extras.fleets.image_server"
MAX_IMAGES: Final = "--max-images"
_IMAGE_TOKENS: Final = "--max-image-tokens"
OPTIONS: Final = (
    *("--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION),
    *("--scheduler-cls", SCHEDULER, "--stream-interval", "16"),
    *("--load-format", "dummy", "--skip-tokenizer-init"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--hf-overrides", json.dumps({"head_dtype": "float32"})),
)
"""Options that a fleet needs."""
_OF_CPU: Final = ("--no-enable-chunked-prefill",)
"""Options that requests with seeds need on a CPU."""
_OF_CPUS: Final = ("--distributed-executor-backend", "mp")
"""Options with which a CPU build runs several workers."""
_SEVERAL_WORKERS: Final = ("--nnodes", "-n", "--tensor-parallel-size", "-tp")


def token_option() -> str:
    """Returns vLLM's option for token ids in and out; versions before ``--enable-scale-out`` have another.

    Reads vLLM's source instead of importing it, which takes seconds.
    """
    package = importlib.util.find_spec("vllm")
    folders = [] if package is None else package.submodule_search_locations or []
    sources = [Path(folder, "entrypoints", "scale_out", "factories.py") for folder in folders]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.is_file()]
    is_older = bool(texts) and not any("enable_scale_out" in text for text in texts)
    return "--tokens-only" if is_older else "--enable-scale-out"


def server_command(options: Sequence[str], *, is_cpu: bool) -> list[str]:
    """Returns the command line of a server.

    Args:
        options: Options of ``vllm serve``, which take precedence, and ``--max-images`` with
            ``--max-image-tokens`` for a model that takes images.
        is_cpu: True for vLLM's CPU build.
    """
    parser = argparse.ArgumentParser(prog="serve", add_help=False, allow_abbrev=False)
    parser.add_argument(MAX_IMAGES, type=int)
    parser.add_argument(_IMAGE_TOKENS, type=int)
    limits, options = parser.parse_known_args(options)
    if (limits.max_images is None) != (limits.max_image_tokens is None):
        parser.error(f"{MAX_IMAGES} and {_IMAGE_TOKENS} belong together; set both for images")
    of_device = _of_cpu(options) if is_cpu else _of_gpu()
    module = server_module(options)
    of_images: tuple[str, ...] = ()
    if limits.max_images is not None:
        module = _WITH_IMAGES
        of_images = (MAX_IMAGES, str(limits.max_images), str(limits.max_image_tokens))
    return [
        *(sys.executable, "-m", module, *OPTIONS, token_option()),
        *(*of_device, *of_images, *options),
    ]


def server_module(options: Sequence[str]) -> str:
    """Returns the module that serves text with these options."""
    return _OF_FURTHER_HOST if "--headless" in options else _MODULE


def _of_cpu(options: Sequence[str]) -> list[str]:
    names = {option.partition("=")[0] for option in options}
    several = _OF_CPUS if names.intersection(_SEVERAL_WORKERS) else ()
    return [*_OF_CPU, *as_options(ENGINES["vllm"].cpu_arguments), *several]


def _of_gpu() -> list[str]:
    """Returns the options with which a server on GPUs decodes as fast as an engine of a run."""
    sizes = json.dumps({"cudagraph_capture_sizes": CAPTURED_SIZES})
    options = ["--compilation-config", sizes]
    if usable_processors() >= CORES_FOR_TWO_PROCESSES:
        options += ["--distributed-executor-backend", "mp"]
    return options


def server_environment(*, is_cpu: bool) -> Mapping[str, str]:
    """Returns the environment variables of a server, of which those that are set already are kept."""
    kind = ENGINES["vllm"]
    return {**kind.environment, **(kind.cpu_environment if is_cpu else {}), **os.environ}


def as_options(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the options of a command line for arguments of an engine."""
    options: list[str] = []
    for name, value in arguments.items():
        options.append(f"--{'no-' if value is False else ''}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            options.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return options


def main() -> None:
    """Replaces this process by the server."""
    if os.environ.get("VLLM_API_KEY") == "":
        sys.exit(
            "VLLM_API_KEY is set but empty, so that the server would have no token; set it to the token, or "
            f"unset it and set {WITHOUT_TOKEN}=1 for a server that only trusted hosts reach"
        )
    import torch  # the command line of a server does not need it

    is_cpu = not torch.cuda.is_available()
    command = server_command(sys.argv[1:], is_cpu=is_cpu)
    os.execve(command[0], command, server_environment(is_cpu=is_cpu))  # noqa: S606 -- as the user asked


if __name__ == "__main__":
    main()
