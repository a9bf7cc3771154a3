"""`main`: runs a verb and turns every failure into a few lines on stderr (or one JSON object) and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TextIO, TypeVar

import typer
from typer.main import get_command

from penstock.cli.app import Invocation, app
from penstock.cli.failure import INVALID, MISUSE, Failure, failure_of
from penstock.cli.output import print_json
from penstock.host_process import open_standard_streams

T = TypeVar("T")

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The command line parser's error for misuse; typer exports it under no name of its own."""

VERBS = (
    "analyze", "check", "data", "emulate", "lab", "layout", "links", "plan", "play", "report", "show", "simulate",
    "split", "train", "tune",
)  # fmt: skip
"""The verbs, each a module beside this one, in the order in which `--help` lists them."""

LEFT = {
    "bench": "run the scripts in benchmarks/ of the repository, which benchmarks/README.md lists",
    "compare": "give penstock simulate several schedules; penstock train --schedule tells the loss of each",
    "convert": "penstock show IN --out OUT writes a schedule in another format",
    "data generate": "experiments/uneven/long_tails.py draws lengths",
    "data images": "penstock train --data data.py:NAME takes a dataset of your own",
    **dict.fromkeys(("lab make", "lab plan"), "penstock lab run without a COMMAND makes a lab and shows its hosts"),
    **dict.fromkeys(
        ("lab link", "lab down", "lab up"),
        "type the change, such as down 0:1, where penstock lab run keeps the lab, or give it to lab run by --at",
    ),
    **dict.fromkeys(("lab list", "lab remove", "lab clean"), "a lab ends with the penstock lab run that made it"),
    "profile": "penstock tune --profile-only --out FILE measures a model's layers",
    "search": "penstock plan --placement all searches all placements",
}
"""Verbs that left, each with what to do now."""

TRACEBACK = "PENSTOCK_TRACEBACK"
"""Environment variable: when set, failures that are bugs of ours show where they happened."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Without `argv` this is the program itself, and ranks may be forked from its process.

    Args:
        argv: the words after `penstock`; those of this process where not given.
    """
    if argv is None:
        open_standard_streams()
    return _told(Invocation(list(sys.argv[1:] if argv is None else argv), is_program=argv is None))


def _told(invocation: Invocation) -> int:
    """Runs a verb with output that may fail; its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot spell a bar shows a question mark
    if sys.stdout is None:  # the caller has closed it: nobody is there to read
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            return _run(invocation)
    output = _Output(sys.stdout)
    try:
        with contextlib.redirect_stdout(output):
            code = _run(invocation)
            output.flush()
            return code
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        if error is not output.error:
            raise
        return _cannot_write(error)


class _Output:
    """Stdout, which notes the error that it could not be written by: a file's that a verb writes is another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        return self._noting(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._noting(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _noting(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            self.error = error
            raise


def _run(invocation: Invocation) -> int:
    """Runs a verb, and reports how it failed; raises OSError where what it prints can't be written."""
    arguments, as_json = invocation.arguments, "--json" in invocation.arguments
    for verb in (" ".join(arguments[:count]) for count in (1, 2)):
        if instead := LEFT.get(verb):
            return _report(Failure(MISUSE, f"penstock {verb} is gone since 0.2; {instead}", "usage"), as_json)
    try:
        verb = arguments[0] if arguments else ""
        parser = _parser((verb,) if invocation.is_program and verb in VERBS else VERBS)
        code: int | None = parser(arguments, prog_name="penstock", standalone_mode=False, obj=invocation)
        return 0 if code is None else code
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("penstock: interrupted")
        return 128 + signal.SIGINT
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the parser makes this of a closed pipe
            raise error.__context__ from None
        raise
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help, or hands it over to print
            return _no_arguments(error, as_json)
        return _report(_usage_failure(error), as_json)
    except Exception as error:
        if error is getattr(sys.stdout, "error", None):
            raise
        failure = failure_of(error)
        if failure is None:
            if os.environ.get(TRACEBACK):
                raise
            name = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            failure = Failure(INVALID, f"a bug in penstock: {name}\nwith {TRACEBACK}=1 it says where", rule="bug")
        return _report(failure, as_json)


@cache
def _parser(verbs: Sequence[str]) -> Callable[..., Any]:
    """The parser of the command line with some verbs. To make it with all takes longer than most verbs take."""
    return get_command(application(verbs))


def application(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The command line with some verbs, by default with all."""
    for verb in verbs:
        import_module(f"penstock.cli.{verb}")
    return app


def _reader_left() -> int:
    """The reader of our output, like `head`, has seen enough: nothing is wrong, and nothing more to write."""
    _to_nowhere(sys.stdout)
    return 0


def _to_nowhere(stream: TextIO) -> None:
    """What is left in the stream would fail again when the interpreter ends, which says so in its own way."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Writes a line to stderr, if that takes any."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _to_nowhere(sys.stderr)


def _cannot_write(error: OSError) -> int:
    """Stdout takes no more, like a file on a full disk."""
    _to_nowhere(sys.stdout)
    _say(f"penstock: stdout: {error.strerror or error}; what was printed is not whole")
    return INVALID


def _no_arguments(error: Exception, as_json: bool) -> int:
    if as_json:
        return _report(Failure(MISUSE, "no verb given; see penstock --help", rule="usage"), as_json)
    shown = str(error)
    if shown:
        print(shown)
    return MISUSE


def _usage_failure(error: Exception) -> Failure:
    """What the parser found wrong, in one line, and where to read more."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and context is not None:
        name: str = getattr(error, "option_name", "")
        if instead := _instead(name, context):
            message = f"No such option: {name}; {instead}"
    where = context.command_path if context is not None else "penstock"
    return Failure(MISUSE, f"{' '.join(message.split())}\nsee {where} --help", rule="usage")


def _instead(option: str, context: Any) -> str | None:
    """How the verb takes a value that has no option of its own: as a KEY=VALUE, which the help of the option with
    such values names, or from a file. None if it takes no such value.
    """
    key = option.removeprefix("--").replace("-", "_")
    for parameter in context.command.params:
        flag, said = parameter.opts[0], getattr(parameter, "help", None) or ""
        if not (parameter.metavar or "").endswith("=VALUE"):
            continue
        if example := re.search(rf"\b(num_)?{re.escape(key)}=(\[[^]]*\]|\w+)", said):
            return f"give {flag} {example[0]}"
        if re.search(rf"\b{re.escape(key)}: ", said):
            return f"give {flag} {key}=VALUE"
    if any("--config" in parameter.opts for parameter in context.command.params):
        from penstock.train.settings import Settings  # here, as few mistakes need it

        if key in {field.name for field in dataclasses.fields(Settings)}:
            return "write it into a file for --config, such as depth = 8"
    return None


def _report(failure: Failure, as_json: bool) -> int:
    if as_json:
        try:
            print_json({"error": failure.as_json()})
            sys.stdout.flush()
        except BrokenPipeError:  # a failure all the same
            _reader_left()
    else:
        _say(f"penstock: {failure.message}")
    return failure.exit_code
