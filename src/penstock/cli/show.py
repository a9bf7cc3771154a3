"""`penstock show`: a schedule as a grid in the terminal, or written as a picture.

penstock show zb-v --ranks 4 --microbatches 8          penstock show mine.json --out mine.svg
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.options import (
    Json,
    MaxInFlight,
    MaxMismatch,
    Microbatches,
    Out,
    Ranks,
    ScheduleOption,
    Stages,
    Warmup,
    Window,
)
from penstock.cli.output import in_colour, print_json


@app.command(short_help="Show a schedule, or write its picture.")
def show(
    schedule: Annotated[str, typer.Argument(metavar="NAME|FILE", help=f"{source.SCHEDULE}.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages: Stages = None,
    warmup: Warmup = None,
    max_in_flight: MaxInFlight = None,
    window: Window = None,
    max_mismatch: MaxMismatch = None,
    option: ScheduleOption = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Show a schedule: rows are ranks, colour is the kind of op, the number is the microbatch."""
    given_counts = source.counts_of(ranks, microbatches, stages, warmup, max_in_flight, window, max_mismatch, option)
    plan = source.read_or_build(schedule, given_counts)
    if out is not None:
        from penstock.draw import save

        save(plan, out)
    if json:
        print_json(
            {
                "name": plan.name,
                "num_ranks": plan.num_ranks,
                "num_stages": plan.num_stages,
                "num_microbatches": plan.num_microbatches,
                "num_ops": plan.num_ops,
                "grid": str(plan),
                "out": out,
            }
        )
    elif out is not None:
        print(f"wrote {out}")
    else:
        from penstock.draw.terminal import to_terminal

        print(to_terminal(plan, color=in_colour()))
