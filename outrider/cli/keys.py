"""`outrider keys`: tokens for tenants."""

import sys
from typing import Annotated

import typer

from outrider.net.tokens import new_token

keys = typer.Typer(help="Bearer tokens for the orchestrator's clients.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Keeps `new` a command of its own."""


@keys.command()
def new(name: Annotated[str, typer.Argument(help="Tenant: 1 to 32 of a-z, 0-9 and -.")]) -> None:
    """Make a token: on stdout the line for --keys-file, on stderr the token, which is kept nowhere and shown once."""
    try:
        token, line = new_token(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    print(f"token for {name}, shown only now: {token}", file=sys.stderr, flush=True)
    print(line, flush=True)
