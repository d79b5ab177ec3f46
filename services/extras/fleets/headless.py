"""Starts the workers of a further host of a vLLM server, for ``services.extras.fleets.serve --headless``.

``vllm serve`` does the same, but CPU builds of vLLM do not have this command: their package has another name.
"""

import sys


def main() -> None:
    """Runs vLLM's command ``serve`` with the options of this process."""
    from vllm.entrypoints.cli.serve import cmd_init  # only a server has vLLM
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args([command.name, *sys.argv[1:]])
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
