"""`penstock analyze`: what slowed a recorded run, what each cause costs, and what would help.

penstock analyze trace.parquet            penstock analyze profiles/ --framework torchtitan --out page.html --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, page_option
from penstock.cli.output import print_json
from penstock.formats.files import require_place, write_whole


@app.command(short_help="Find out what slowed a recorded run, and what would help.")
def analyze(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="What was recorded: a file, a folder, or the profiles of all ranks."),
    ],
    out: Annotated[
        str | None,
        page_option("Where the result goes: the page, .html. [TRACE.analysis.html in this folder]", "the analysis"),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework",
            help="Whose names ops have: torch (torchtitan), ranges, stacks, megatron, deepspeed, penstock. [found]",
        ),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            metavar="[OP=]REGEX",
            help="How op names in profiles read, with groups named op, stage, microbatch, rank, ...; repeatable.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="OURS=THEIRS",
            help="What a table calls a column, such as microbatch=mb; may be repeated.",
        ),
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help="Unit of the times in a table: s, ms, us or ns.")] = "ms",
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="Number of ranks, of one pipeline, where names in profiles do not say the stage."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", min=1, help="Number of microbatches, per step, where profiles do not say it."),
    ] = None,
    only_steps: Annotated[
        str | None, typer.Option("--only-steps", metavar="LIST", help="Analyse only these steps, such as 12,20-23.")
    ] = None,
    drop_incomplete: Annotated[
        bool, typer.Option("--drop-incomplete", help="Leave out steps in which ops are missing.")
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="LIST",
            help="How many layers each stage has, such as 8,8,8,6. With it a better cut is suggested.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Replay a run of torch, Megatron, TorchTitan, DeepSpeed or Penstock, and say what slowed it, on a page too."""
    # Imported here, as only this verb needs them.
    from penstock.analyze import analyze_trace
    from penstock.analyze.analysis_page import to_page
    from penstock.analyze.words import headline, more
    from penstock.formats.traces import read_trace

    trace = read_trace(
        traces,
        patterns=pattern or (),
        preset=framework,
        columns=_columns(column or ()),
        unit=unit,
        num_ranks=ranks,
        num_microbatches=microbatches,
        steps=None if only_steps is None else _whole_numbers(only_steps, "--only-steps"),
    )
    target = None if json and out is None else Path(out or f"{trace.name}.analysis.html")
    if target is not None:
        require_place(target)
    found = analyze_trace(
        trace,
        layers=() if layers is None else _whole_numbers(layers, "--layers"),
        drop_incomplete=drop_incomplete,
    )
    if target is not None:
        write_whole(target, to_page(found))
    if json:
        print_json({**found.to_json(), "headline": headline(found), "out": None if target is None else str(target)})
        return
    print(" ".join([headline(found), *more(found)]))
    for note in found.notes:
        print(f"note: {note}")
    print(f"wrote {target}")


MOST = 1_000_000
"""Numbers of a range."""


def _columns(given: list[str] | tuple[str, ...]) -> dict[str, str]:
    found = {}
    for each in given:
        ours, equals, theirs = each.partition("=")
        if not (ours and equals and theirs):
            raise Misuse(f"--column {each}: write OURS=THEIRS, like --column microbatch=mb")
        found[ours] = theirs
    return found


def _whole_numbers(text: str, option: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise Misuse(f"{option} {text}: give whole numbers, like 12,20-23")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= MOST:
            raise Misuse(f"{option} {part}: give ranges that rise, of at most {MOST:,} numbers")
        found += numbers
    return found
