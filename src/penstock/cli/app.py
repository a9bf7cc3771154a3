"""The typer application that verbs register on, in the order in which `--help` lists them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

import penstock
from penstock.host_process import require_current_folder

app = typer.Typer(
    name="penstock",
    help="Plans, proves, draws and runs pipeline-parallel training schedules for PyTorch.",
    epilog="Exit codes: 0 done, 1 the schedule or the run is invalid, 2 misuse.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Invocation(NamedTuple):
    """What the verbs' contexts have as their object.

    Attributes:
        arguments: the words of the command line. is_program: whether this process is `penstock` and nothing else.
    """

    arguments: list[str]
    is_program: bool


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


LOADS_TORCH = ("train", "split", "links", "tune")
"""Verbs that can't run where the current folder was removed."""


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plans, proves, draws and runs pipeline-parallel training schedules for PyTorch."""
    if context.invoked_subcommand in LOADS_TORCH:
        require_current_folder()
