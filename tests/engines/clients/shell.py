"""The tool of all clients but mini-swe-agent, which has its own of the same name."""


def bash(command: str) -> str:
    """Runs a command, which must be echo.

    Args:
        command: The command to run.
    """
    return command.removeprefix("echo ")


DESCRIPTION = "Runs a command, which must be echo."
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command to run."}},
    "required": ["command"],
}
