"""The `outrider` command: what a person calls. Each subcommand has a file of its own."""

from typing import Annotated

import typer

from outrider.cli.bench import bench
from outrider.cli.demo import demo
from outrider.cli.distill import distill
from outrider.cli.doctor.command import doctor
from outrider.cli.generate import generate
from outrider.cli.info import info
from outrider.cli.keys import keys
from outrider.cli.plan import plan
from outrider.cli.up import up
from outrider.versions import versions

app = typer.Typer(
    name="outrider",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="What an upgrade may change.")
    ] = False,
) -> None:
    """Speculative decoding as distributed services: faster, with exactly the target's output law."""


for command in (up, generate, demo, bench, distill, info, doctor, plan):
    app.command()(command)
app.add_typer(keys, name="keys")


if __name__ == "__main__":
    app(prog_name="outrider")
