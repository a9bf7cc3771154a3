"""The verb `penstock train`, and the same for a rank under torchrun. Imports torch only when it runs."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.rank_environment import RankEnvironment, start_rank_server
from penstock.train.job import order_of, read_schedule_file
from penstock.train.options import grouped_help, print_all, read_config, read_given, with_options
from penstock.train.settings import Settings
from penstock.train.tasks.open import schedule_of

if TYPE_CHECKING:
    from penstock.train.job import TrainJob

TrainHelp = grouped_help(("out", "resume", "export", "config", "as_json", "help_all"), Settings)


@with_options(Settings)
def train(
    call: typer.Context,
    out: Annotated[str | None, typer.Option(help="Where the result goes: a folder. [a new one in runs/]")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue the run in this folder; with the same --out, begin it if need be.", metavar="RUN"
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check on the first batch that model and loss keep the contract.")
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(help="Where to write the model: a file, or a folder as Hugging Face has them.", metavar="PATH"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of settings: steps = 100. Options beside it win.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=print_all, help="Show every option and exit.")
    ] = False,
    **given: Any,
) -> Any:
    """Train a GPT, BERT, CLIP, a language model of Hugging Face or your own model over a mesh."""
    RankEnvironment.of(os.environ)  # what is wrong there is said before anything is made of it
    is_program = getattr(call.obj, "is_program", False)  # nothing is known of a launcher's
    given = read_given(given, Settings)
    if config is not None:
        given = read_config(config, Settings) | given
    given = read_schedule_file(given)
    return _carry_out(order_of(given, out, resume, export, as_json, verify), is_program)


def _carry_out(order: TrainJob, is_program: bool) -> int:
    settings = order.settings
    # Light checks first: most mistakes are told before torch is loaded.
    schedule_of(settings)
    if not order.as_json and os.environ.get("RANK", "0") == "0":
        ranks = "1 rank" if settings.num_processes == 1 else f"{settings.num_processes} ranks"
        print(f"starting {ranks}: reading the data, cutting the model ...", file=sys.stderr, flush=True)
    forks = is_program and sys.platform == "linux"
    if forks and "RANK" not in os.environ and not settings.in_process:
        start_rank_server(["penstock.train.run_job"], {})  # it loads torch while this process does
    from penstock.train.run_job import checked
    from penstock.train.start import run_job

    gc.freeze()  # torch and all else that is loaded stays: looking through it for garbage takes a second at the end
    return run_job(checked(order))


def _is_reported() -> bool:
    """Whether this process is one of several ranks, whose error is reported once for all of them."""
    from penstock.runtime.launch.rank import Reporter

    return isinstance(sys.excepthook, Reporter)


LET_SPEAK = 5.0
"""Seconds that the other ranks of a host leave the first one to report an error. torchrun ends all ranks when one
has ended, so a rank that ended sooner would end the first one before its message. If the first finds no error, the
others report.
"""


def run_command(argv: list[str]) -> int:
    """The same options for a rank under torchrun. Each host reports an error once."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=TrainHelp)(train)
    try:
        code = app(argv, prog_name="penstock.train", standalone_mode=False)
    except Exception as error:
        known = type(error).__module__.startswith("penstock.")
        if isinstance(error, typer.BadParameter.__mro__[1]):
            message = f"{error.format_message()}\nsee python -m penstock.train --help"  # type: ignore[attr-defined]
        elif known and not ("penstock.runtime" in type(error).__module__ and _is_reported()):
            message = str(error)
        else:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(LET_SPEAK)
        print(f"penstock: {message}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 2)
    return code if isinstance(code, int) else 0
