"""Tool ``bash`` of all clients except mini-swe-agent, which has its own tool of that name."""


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
