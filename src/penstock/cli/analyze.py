"""`penstock analyze`: what slowed a recorded run, what each cause costs, and what would help.

penstock analyze trace.parquet            penstock analyze profiles/ --framework torchtitan --out page.html --json
penstock analyze profiles/ --try zb --link 2:3=120ms --channels gloo
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import costs as costs_options
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Channels, Json, counts, one_count, page_option
from penstock.cli.output import print_json
from penstock.cli.source import is_file
from penstock.formats import load
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
        typer.Option(help="Whose names ops have: torch, torchtitan, ranges, stacks, megatron, deepspeed, penstock."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(metavar="[OP=]REGEX", help="How op names read, with groups op, stage, microbatch, rank, ..."),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="OURS=THEIRS", help="A table's own name of a column: microbatch=mb.")
    ] = None,
    unit: Annotated[str, typer.Option("--unit", help="Unit of the times in a table: s, ms, us or ns.")] = "ms",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, of one pipeline, where names do not say the stage.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Number of microbatches, where profiles do not say it.")
    ] = None,
    only_steps: Annotated[
        str | None, typer.Option(metavar="LIST", help="Analyse only these steps, such as 12,20-23.")
    ] = None,
    drop_incomplete: Annotated[
        bool, typer.Option("--drop-incomplete", help="Leave out steps in which ops are missing.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers of each stage, as 8,8,8,6, to suggest a better cut.")
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME|FILE", help="Predict a step of this schedule; may be repeated."),
    ] = None,
    link: costs_options.Link = None,
    channels: Channels = None,
    cut: Annotated[
        str | None, typer.Option(metavar="LIST", help="How many layers each stage has, to predict.")
    ] = None,
    message_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes that one forward sends to the next stage.")
    ] = None,
    json: Json = False,
) -> None:
    """Replay a run of torch, Megatron, TorchTitan, DeepSpeed or Penstock, and say what slowed it, on a page too.

    With --try, --link, --channels or --cut: say how long a step would take then, and no more.
    """
    # Imported here, as only this verb needs them.
    from penstock.analyze import analyze_trace, predict
    from penstock.analyze.page import headline, more, prediction_table, to_page
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
    predicts = any((tries, link, channels, cut))
    target = None if (json or predicts) and out is None else Path(out or f"{trace.name}.analysis.html")
    if target is not None:
        require_place(target)
    num_layers = () if layers is None else _whole_numbers(layers, "--layers")
    found = analyze_trace(trace, layers=num_layers, drop_incomplete=drop_incomplete)
    change: dict[str, Any] = {
        "links": costs_options.read_links(link, None) if link else None,
        "channels": channels or "buffered",
        "cut": counts("--cut", cut) if cut else (),
        "message_bytes": one_count("--message-bytes", message_bytes) or 0.0,
    }
    schedules: list[Any] = [load(each) if is_file(each) else each for each in tries or ()]
    tried = [predict(found, each, layers=num_layers, **change) for each in (schedules or [None] if predicts else ())]
    if target is not None:
        write_whole(target, to_page(found))
    if json:
        whole = {**found.to_json(), "headline": headline(found), "tried": [each.to_json() for each in tried]}
        print_json({**whole, "out": None if target is None else str(target)})
        return
    print(prediction_table(found, tried) if tried else " ".join([headline(found), *more(found)]))
    for note in found.notes:
        print(f"note: {note}")
    if target is not None:
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
