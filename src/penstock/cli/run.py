"""`main`: runs a verb and turns every failure into a few lines on stderr (or one JSON object) and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID, MISUSE, Failure, failure_of
from penstock.cli.output import print_json

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The command line parser's error for misuse; typer exports it under no name of its own."""

TRACEBACK = "PENSTOCK_TRACEBACK"
"""Environment variable: when set, failures that are bugs of ours show where they happened."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot spell a bar shows a question mark
    try:
        code = app(arguments, prog_name="penstock", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("penstock: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the parser makes this of a closed pipe
            return _reader_left()
        raise
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help, or hands it over to print
            return _no_arguments(error, as_json)
        return _report(_usage_failure(error, arguments), as_json)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            if os.environ.get(TRACEBACK):
                raise
            name = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            failure = Failure(INVALID, f"a bug in penstock: {name}\nwith {TRACEBACK}=1 it says where", rule="bug")
        return _report(failure, as_json)


def _reader_left() -> int:
    """The reader of our output, like `head`, has seen enough: nothing is wrong, and nothing more to write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _no_arguments(error: Exception, as_json: bool) -> int:
    if as_json:
        return _report(Failure(MISUSE, "no verb given; see penstock --help", rule="usage"), as_json)
    shown = str(error)
    if shown:
        print(shown)
    return MISUSE


def _usage_failure(error: Exception, arguments: Sequence[str]) -> Failure:
    """What the parser found wrong, in one line, and where to read more."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "penstock"
    return Failure(MISUSE, f"{' '.join(message.split())}\nsee {where} --help", rule="usage")


def _report(failure: Failure, as_json: bool) -> int:
    if as_json:
        print_json({"error": failure.as_json()})
    else:
        print(f"penstock: {failure.message}", file=sys.stderr)
    return failure.exit_code
