"""One meaning per option over all verbs: what `--help` says of it begins alike everywhere, and it takes one type."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.models import OptionInfo

import penstock as ps
from penstock.cli.run import application, main

pytestmark = pytest.mark.unit

SEVERAL = "the verb compares what is given, and so takes several"
OTHER_TYPES: dict[str, str] = {
    "--dp": SEVERAL,
    "--schedule": SEVERAL,
}
"""Options whose type differs between verbs, each with the reason. A new entry needs one."""
OTHER_MEANINGS = {"--verify": "tune runs its best candidates for real, train checks the contract as pipe.verify does"}
"""Options that mean something else in another verb, each with the reason."""


class Given(NamedTuple):
    """An option of a verb. meaning: its help up to the first punctuation."""

    verb: str
    name: str
    type: Any
    meaning: str


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for command in group.registered_commands:
        yield " ".join((*path, command.name or command.callback.__name__)), command.callback
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, (*path, str(inner.name)))


def without_none(annotation: Any) -> Any:
    """`int` of `int | None`."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    kept = [each for each in typing.get_args(annotation) if each is not type(None)]
    return kept[0] if len(kept) == 1 else annotation


def options() -> Iterator[Given]:
    for verb, function in commands(application()):
        for parameter, annotation in typing.get_type_hints(function, include_extras=True).items():
            if typing.get_origin(annotation) is not typing.Annotated:
                continue
            kind, info = typing.get_args(annotation)[:2]
            if not isinstance(info, OptionInfo):
                continue
            first = [info.default] if isinstance(info.default, str) else []
            names = [*first, *(info.param_decls or ())] or [f"--{parameter.replace('_', '-')}"]
            for name in names[0].split("/")[:1]:
                assert info.help, (verb, name)
                yield Given(verb, name, without_none(kind), re.split(r"[.,;:(\[]", info.help)[0].strip())


EVERY = list(options())
BY_NAME: dict[str, list[Given]] = defaultdict(list)
for each in EVERY:
    BY_NAME[each.name].append(each)


def test_the_collection_is_whole() -> None:
    verbs = dict(commands(application()))
    assert {"train", "plan", "lab run", "data lengths"} <= verbs.keys()
    for verb, function in verbs.items():
        hints = typing.get_type_hints(function, include_extras=True)
        taken = [name for name in inspect.signature(function).parameters if hints[name] is not typer.Context]
        arguments = sum("ArgumentInfo" in repr(hints[name]) for name in taken)
        assert len([given for given in EVERY if given.verb == verb]) + arguments == len(taken), verb
    assert {name for name, given in BY_NAME.items() if len(given) > 1} >= OTHER_TYPES.keys()


def test_options_are_at_most_190() -> None:
    """Over all verbs; a new one replaces another, or is a value that `--set`, `--option` or `--cost` takes."""
    assert len(EVERY) <= 190


@pytest.mark.parametrize(
    "name", sorted(n for n, given in BY_NAME.items() if len(given) > 1 and n not in OTHER_MEANINGS)
)
def test_an_option_means_the_same_in_every_verb(name: str) -> None:
    meanings = defaultdict(list)
    for given in BY_NAME[name]:
        meanings[given.meaning].append(given.verb)
    assert len(meanings) == 1, f"{name} begins with other words in other verbs: {dict(meanings)}"
    assert len(next(iter(meanings)).split()) > 1, f"{name}: {meanings} says too little to be a meaning"
    kinds = {given.type for given in BY_NAME[name]}
    assert (len(kinds) == 1) == (name not in OTHER_TYPES), f"{name} takes {kinds}"


def test_out_meant_a_trace_in_simulate_and_a_schedule_elsewhere(tmp_path: Path) -> None:
    """What a .json is that `--out` writes: a schedule, in every verb of schedules."""
    of_schedules = {given.verb for given in BY_NAME["--out"]} & {"show", "plan", "simulate", "tune"}
    assert of_schedules == {"show", "plan", "tune"}
    for verb in ("show 1f1b", "plan --time 0.1", "plan --placement all"):
        words = [*verb.split(), "--ranks", "2", "--microbatches", "2", "--out"]
        assert main([*words, str(tmp_path / "x.json")]) == 0
        assert ps.load(tmp_path / "x.json").num_ranks == 2
        assert main([*words, str(tmp_path / "x.json.gz")]) == 2, "a trace is of a timeline"


RESULTS = sorted(
    {(given.verb, given.name) for given in EVERY if re.fullmatch("Where the (result|timeline) goes", given.meaning)}
    - {("train", "--out"), ("emulate", "--out")}  # a folder, which is made at once
)


@pytest.mark.parametrize(("verb", "name"), RESULTS)
@pytest.mark.parametrize("place", ["nowhere/x", "x.json/x"])
def test_that_a_result_cannot_be_written_was_found_out_after_all_the_work(
    verb: str,
    name: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Now before anything else, so also before files that are to be read are looked for."""
    monkeypatch.chdir(tmp_path)
    Path("x.json").touch()
    given = f"{place}.html" if verb in ("analyze", "report", "play") else f"{place}.json"
    needed = {"analyze": ["t.json"], "report": ["run"], "show": ["zb"], "simulate": ["zb"]}
    needed |= {"plan": []}
    assert main([*verb.split(), *needed.get(verb, []), name, given]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        (f"penstock: {given}: No such file or directory; name", f"penstock: {given}: Not a dir")
    ), told


def test_the_collection_of_results_is_whole() -> None:
    verbs = {
        "analyze",
        "plan",
        "play",
        "report",
    }
    assert {("simulate", "--timeline"), ("tune", "--out"), *((verb, "--out") for verb in verbs)} <= set(RESULTS)
