"""Command that manages API tokens on the database's host: ``python -m services.controller.tokens``."""

import sys
import time
from typing import Annotated

import typer

from services.controller.api.principals import TokenStore
from services.controller.schemas import Role
from services.controller.settings import ControllerSettings
from services.controller.store.database import Database

app = typer.Typer(help="Manages API tokens of users.", no_args_is_help=True, add_completion=False)
Name = Annotated[str, typer.Argument(help="Name of the token's user.")]

_DAY_S = 86_400.0


@app.command()
def create(
    name: Name,
    project: Annotated[str, typer.Option(help="Project that the token gives access to.")],
    role: Annotated[str, typer.Option(help="Role: viewer, operator or admin.")] = "operator",
    days: Annotated[
        float | None, typer.Option(help="Days until the token expires; never by default.")
    ] = None,
) -> None:
    """Creates a token and prints it; it is not shown again."""
    roles: dict[str, Role] = {"viewer": "viewer", "operator": "operator", "admin": "admin"}
    if role not in roles:
        raise typer.BadParameter(f"--role must be viewer, operator or admin, got {role!r}")
    life_s = None if days is None else days * _DAY_S
    token = _store().create(name=name, project=project, role=roles[role], life_s=life_s)
    sys.stdout.write(f"{token}\n")


@app.command(name="list")
def list_() -> None:
    """Lists the tokens, without their secrets."""
    for token in _store().list_tokens():
        expires = "never"
        if token.expire_time is not None:
            expires = time.strftime("%Y-%m-%d", time.gmtime(token.expire_time))
        sys.stdout.write(f"{token.name}\t{token.project}\t{token.role}\texpires {expires}\n")


@app.command()
def revoke(name: Name) -> None:
    sys.stdout.write(f"{_store().revoke(name)} revoked\n")


def _store() -> TokenStore:
    return TokenStore(Database(ControllerSettings().database))


if __name__ == "__main__":
    app()
