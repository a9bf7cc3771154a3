"""Options of the command line, made from the fields of a settings dataclass. Needs no torch.

    depth: int | None = setting(None, "Number of blocks. [the preset's]", MODEL)

declares the setting, the option `--depth`, its help, and the group in which `--help-all` lists it. The
TOML file that `--config` reads has the same names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from penstock.library.options import read_options
from penstock.train.checks import SettingsError

SCHEDULE, MESH, MODEL, DATA, TRAINING = "Schedule", "Mesh", "Model", "Data", "Training"
UPDATES, LINKS = "Asynchronous schedules", "Links"
MACHINE, RUN, COSTS = "Machine", "The run", "Costs"
GROUPS = SCHEDULE, MESH, MODEL, DATA, TRAINING, UPDATES, LINKS, MACHINE, RUN
"""The groups of settings, in the order in which the help lists them."""


class Declaration(NamedTuple):
    """What the metadata of a field says about its option.

    Attributes:
        help: one sentence. group: one of GROUPS, or another that is listed after them.
        is_common: `--help` shows it, and not only `--help-all`.
        flags: its names on the command line; empty for `--` and the name of the field.
        metavar: what stands for its value in the help. is_repeated: the option may be given several times.
        is_rare: it has no option of its own: `--set NAME=VALUE` gives it.
    """

    help: str
    group: str
    is_common: bool
    flags: tuple[str, ...]
    metavar: str | None
    is_repeated: bool
    is_rare: bool


def setting(
    default: Any,
    help: str,
    group: str,
    *,
    is_common: bool = False,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    is_repeated: bool = False,
    is_rare: bool = False,
) -> Any:
    """A field of a settings dataclass with an option. A mapping as the default is copied for each instance."""
    said = Declaration(help, group, is_common, flags, metavar, is_repeated, is_rare)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"option": said})
    return dataclasses.field(default=default, metadata={"option": said})


class Option(NamedTuple):
    """A setting and its option: `name` is the field's, `kind` its type without None."""

    name: str
    kind: Any
    default: Any
    said: Declaration

    @property
    def flags(self) -> tuple[str, ...]:
        if self.said.is_rare:
            return (f"{SET} {self.name}",)
        return self.said.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def help(self) -> str:
        shown = self.default is not None and self.default is not False and self.default not in ({}, "")
        return f"{self.said.help} [{self.default}]" if shown and not self.said.help.endswith("]") else self.said.help

    def parameter(self) -> inspect.Parameter:
        """The option as typer takes it: text where one word stands for several values."""
        kind: Any = self.kind if self.kind in (int, float, bool) else str
        if self.said.is_repeated:
            kind = list[str]
        declared = typer.Option(*self.said.flags, help=self.help, show_default=False, metavar=self.said.metavar)
        annotation: Any = Annotated[kind | None, declared]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def read(self, given: Any) -> Any:
        """The setting, from a word of the command line or a value of a TOML file. Raises SettingsError."""
        if self.said.is_repeated and isinstance(given, list):
            if self.kind is tuple:
                return tuple(given)
            return read_options(given, self.flags[0]) if self.kind is dict else shlex.join(given)
        if self.kind is tuple and isinstance(given, str):
            return counts(self.flags[0], given)
        if self.kind is dict and isinstance(given, str):
            return _object(self.flags[0], given)
        return given


@functools.cache
def options_of(*kinds: Any) -> dict[str, Option]:
    """The options of some settings classes, by the name of the field. The first class that has a name declares it."""
    found: dict[str, Option] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            said = _declaration(kind, field.name)
            if said is not None and field.name not in found:
                default = field.default if field.default is not dataclasses.MISSING else {}
                found[field.name] = Option(field.name, _plain(hints[field.name]), default, said)
    return found


def _declaration(kind: type, name: str) -> Declaration | None:
    """What a class says of a field's option, or the class that it extends, if it only changes the default."""
    for base in kind.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(name)
        if field is not None and "option" in field.metadata:
            declared: Declaration = field.metadata["option"]
            return declared
    return None


def _plain(hint: Any) -> Any:
    """A type without None, and without what is in it: int, float, bool, str, tuple or dict."""
    is_union = isinstance(hint, types.UnionType)
    kind = next(k for k in typing.get_args(hint) if k is not types.NoneType) if is_union else hint
    origin = typing.get_origin(kind) or kind
    return dict if isinstance(origin, type) and issubclass(origin, Mapping) else origin


SET = "--set"
"""The option that gives settings without an option of their own."""


def _rare(options: Mapping[str, Option]) -> dict[str, Option]:
    return {name: option for name, option in options.items() if option.said.is_rare}


def _set_parameter(rare: Mapping[str, Option]) -> inspect.Parameter:
    """The parameter of `--set`, whose help lists what it gives."""
    listed = "; ".join(f"{name}: {option.help.removesuffix('.')}" for name, option in rare.items())
    declared = typer.Option(SET, help=f"Another setting; may be repeated. {listed}", metavar="NAME=VALUE")
    return inspect.Parameter(
        "more", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, declared]
    )


def _read_set(texts: Iterable[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """The settings that `--set NAME=VALUE` gives.

    Raises:
        SettingsError: a name that has an option of its own, or that is unknown.
    """
    rare, found = _rare(options), dict[str, Any]()
    for text in texts:
        given, equals, value = text.partition("=")
        name = given.strip().replace("-", "_")
        if name in options and name not in rare:
            raise SettingsError(f"{SET} {text}: give {options[name].flags[0]}")
        if not equals or name not in rare:
            raise SettingsError(f"{SET} {text}: write NAME=VALUE with one of {', '.join(rare)}")
        if name in found:
            raise SettingsError(f"{SET} {text}: {name} is given twice")
        found[name] = _value(value) if rare[name].kind in (int, float, bool) else value
    return found


def _value(text: str) -> Any:
    """A number or a truth value, or the text if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def with_options(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function for typer that takes `**given`: it gets the options of settings classes that are given."""

    def decorated(act: Callable[..., Any]) -> Callable[..., Any]:
        own = [
            each
            for each in inspect.signature(act, eval_str=True).parameters.values()
            if each.kind != each.VAR_KEYWORD
        ]
        options = options_of(*kinds)
        parameters = [*own, *(option.parameter() for option in options.values() if not option.said.is_rare)]
        if rare := _rare(options):
            parameters.append(_set_parameter(rare))

        @functools.wraps(act)
        def called(**arguments: Any) -> Any:
            further = _read_set(arguments.pop("more", None) or (), options)
            return act(**{name: value for name, value in arguments.items() if value is not None}, **further)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorated


ALL = "penstock.train.help_all"
"""In the meta of a context: that its help is to show all options."""


def grouped_help(common: Iterable[str], *kinds: type) -> type[TyperCommand]:
    """A command whose help lists its options in groups, `--help` only the common ones.

    Args:
        common: of the options that belong to no setting, the names of those that `--help` shows.
    """
    options = options_of(*kinds)
    shown = {*common, "help", *(name for name, option in options.items() if option.said.is_common)}

    class GroupedHelpCommand(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            others = (option.said.group for option in options.values())
            grouped: dict[str, list[Any]] = {title: [] for title in (*GROUPS[:-1], *others, RUN)}
            num_hidden = 0
            for parameter in self.get_params(ctx):
                record = parameter.get_help_record(ctx)
                if ALL not in ctx.meta and parameter.name not in shown:
                    num_hidden += 1
                elif record:
                    title = options[parameter.name].said.group if parameter.name in options else RUN
                    grouped[title].append(record)
            for title, records in grouped.items():
                if records:
                    with formatter.section(title):
                        formatter.write_dl(records)
            if num_hidden:
                formatter.write_paragraph()
                formatter.write_text(f"{num_hidden} more options, with --help-all")

    return GroupedHelpCommand


def print_all(context: typer.Context, wanted: bool) -> None:
    """What `--help-all` calls."""
    if wanted:
        context.meta[ALL] = True
        print(context.get_help())
        raise typer.Exit


def read_given(given: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """The settings that options stand for. Raises SettingsError, ScheduleError for words that can't be read."""
    options = options_of(*kinds)
    return {name: options[name].read(value) if name in options else value for name, value in given.items()}


def read_config(path: Path, *kinds: type) -> dict[str, Any]:
    """The settings of a TOML file, or of the settings.json of a run, by the names of options without dashes ahead.

    Raises:
        SettingsError: a file that can't be read, or a name that is no setting.
    """
    import tomllib  # here, as most runs have no such file

    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror or error}; give a TOML file of settings") from None
    except ValueError as error:
        raise SettingsError(f"--config {path} can't be read: {error}; write NAME = VALUE, like steps = 100") from None
    options = options_of(*kinds)
    names = {flag.removeprefix("--"): name for name, option in options.items() for flag in option.flags}
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(key.replace("_", "-"), key.replace("-", "_"))
        if name not in known:
            raise SettingsError(
                f"--config {path} has {key}, which is no setting; see penstock train --help-all, but give --out, "
                "--resume, --verify and --export on the command line"
            )
        if value is not None:
            found[name] = options[name].read(value) if name in options else value
    return found


def counts(option: str, text: str) -> tuple[int, ...]:
    """Reads `7,5,3,1`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{option} {text}: whole numbers are needed, like 7,5,3,1") from None


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{option} {text!r}: give a JSON object, like '{{\"depth\": 4}}'")
    return value
