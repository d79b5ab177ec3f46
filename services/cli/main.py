"""Entry point of the ``slipstream`` command; it imports a command's module only when it is called."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from services.cli.command import COMMANDS
from services.cli.output import print_traceback

_COMMANDS = {
    "Train": {
        "run": (
            "local:run",
            "Start all services on this machine, train, show progress, and stop the services.",
        ),
        "validate": (
            "spec:validate",
            "Check a specification and everything that it refers to, without starting anything.",
        ),
        "up": (
            "local:up",
            "Start the controller and the transferqueue, and keep them running for submitted runs.",
        ),
        "submit": ("spec:submit", "Submit a run and print its id."),
    },
    "Inspect": {
        "list": ("inspect:list_", "List runs, newest first."),
        "watch": ("control:watch", "Show a run's progress until it ends."),
        "get": ("inspect:get", "Show one run."),
        "events": ("inspect:events", "Show the events of a run."),
        "logs": ("inspect:logs", "Show the logs of a run's workers."),
        "metrics": (
            "inspect:metrics",
            "Show one number for each step, or list the available numbers.",
        ),
        "groups": (
            "inspect:groups",
            "List the groups that steps trained, then groups in flight and dropped groups.",
        ),
        "checkpoints": (
            "inspect:checkpoints",
            "List the checkpoints of a run, newest first.",
        ),
        "workers": ("inspect:workers", "List the workers of a run and their current activity."),
        "page": (
            "control:page",
            "Print a link to the run page that signs in one browser, once.",
        ),
    },
    "Control": {
        "pause": (
            "control:pause",
            "Finish the current step, save a checkpoint and stop the run's workers.",
        ),
        "resume": ("control:resume", "Resume a paused run from its checkpoint."),
        "cancel": ("control:cancel", "Cancel a run."),
        "checkpoint": (
            "control:checkpoint",
            "Save a checkpoint at the end of the current step.",
        ),
        "eval": (
            "control:evaluate",
            "Evaluate the current weights, and show the result.",
        ),
        "set": (
            "control:set_keys",
            "Change keys of a run while it trains: limits, intervals, rollouts, priority, labels.",
        ),
        "fork": (
            "control:fork",
            "Start a new run from a checkpoint of another one, and print its id.",
        ),
        "delete": ("control:delete", "Delete a run that has ended."),
        "delete-checkpoint": (
            "control:delete_checkpoint",
            "Delete a checkpoint that no run uses.",
        ),
    },
    "Controller": {
        "quota": (
            "control:quota",
            "Show the project's usage and limits.",
        ),
        "version": ("control:version", "Show the release of the controller."),
    },
}
"""Commands by panel and name: the function's location and the first line of its docstring."""


class _Commands(TyperGroup):
    """Lists all commands but imports only the one that is called, because the imports take a second."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel)
            for panel, commands in _COMMANDS.items()
            for name, (_, summary) in commands.items()
        }

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        self._add_commands_of_extras()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command; looks among those of extras and other packages only if it is not built in."""
        if cmd_name not in self.commands:
            self._add_commands_of_extras()
        return super().get_command(ctx, cmd_name)

    def _add_commands_of_extras(self) -> None:
        for name, command in COMMANDS.items():
            self.commands.setdefault(
                name, TyperCommand(name, help=command.summary, rich_help_panel=command.panel)
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Loads the command that the arguments name."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


def load(name: str) -> Any:
    references = {name: where for panel in _COMMANDS.values() for name, (where, _) in panel.items()}
    if name in references:
        module, _, function = references[name].partition(":")
        command = getattr(import_module(f"services.cli.commands.{module}"), function)
    else:
        command = COMMANDS[name].load()
    application = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    application.command(name)(command)
    return typer.main.get_command(application)


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(version("slipstream"))
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show this release and exit."
        ),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""
    sys.excepthook = print_traceback


if __name__ == "__main__":
    app()
