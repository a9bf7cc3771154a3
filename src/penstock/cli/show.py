"""`penstock show`: a schedule as a grid in the terminal, as a picture, or in another format.

penstock show zb-v --ranks 4 --microbatches 8          penstock show mine.json --out mine.svg
penstock show mine.txt --out mine.json                 penstock show mine.json --out mine.csv
penstock show theirs.csv --declare-order --out theirs.json
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, Out, taken
from penstock.cli.output import in_colour, print_json
from penstock.formats import save as save_schedule
from penstock.formats.native import DIALECTS
from penstock.schedule import Schedule, ScheduleError, check
from penstock.schedule.messages import BUFFERED, CHANNELS, NCCL, has_communication, remove_communication
from penstock.train.options import with_options


@app.command(short_help="Show a schedule, or write its picture.")
@with_options(source.GivenCounts)
def show(
    schedule: Annotated[str, typer.Argument(metavar="NAME|FILE", help=f"{source.SCHEDULE}.")],
    dialect: Annotated[
        str | None,
        typer.Option(
            "--dialect",
            metavar="|".join(DIALECTS),
            help="Messages in a .csv: those of the schedule (torch, the default), none, or all.",
        ),
    ] = None,
    declare_order: Annotated[
        bool,
        typer.Option(
            "--declare-order",
            help="Declare the order of microbatches that the rows of a file show, where it is not the ascending one.",
        ),
    ] = False,
    out: Out = None,
    json: Json = False,
    **given: Any,
) -> None:
    """Show a schedule: rows are ranks, colour is the kind of op, the number is the microbatch.

    With --out it is written, as a picture or in another format. JSON and text keep what a file says as it is, valid
    or not. A CSV is for torch to run, so only what is proved is written, and what torch's pipelining lacks is named.
    """
    given_counts = taken(source.GivenCounts, given)
    of_csv, to_csv = schedule.endswith(".csv"), out is not None and out.endswith(".csv")
    if dialect is not None and not of_csv and not to_csv:
        raise Misuse(f"--dialect {dialect} is for .csv files; read or write one, or leave it out")
    if declare_order and not source.is_file(schedule):
        raise Misuse(f"--declare-order is for the rows of a file, and {schedule} is a library schedule; leave it out")
    plan = source.read_or_build(schedule, given_counts, dialect if of_csv else None, declare_order)
    channels = carrying_channels(plan) if to_csv and not (dialect or "").endswith("compute_only") else ()
    if out is not None:
        from penstock.draw import save

        if to_csv:
            save_schedule(plan, out, dialect, channels[0] if channels else NCCL)
        else:
            save(plan, out)
    left_out = {}
    if to_csv and plan.max_in_flight is not None:
        left_out["max_in_flight"] = (
            f"at most {plan.max_in_flight:g} activations in flight, for which a CSV has no place"
        )
    if to_csv and plan.microbatch_orders:
        left_out["microbatch_orders"] = (
            "that microbatches run in the order of the rows; read the CSV with --declare-order"
        )
    if json:
        print_json(
            {
                **source.counts_of(plan),
                "grid": str(plan),
                "out": out,
                "left_out": list(left_out),
                "channels": list(channels),
            }
        )
    elif out is not None:
        print("\n".join([f"wrote {out}", *(f"left out: {each}" for each in left_out.values())]))
        if channels and NCCL not in channels:
            print(f"its messages are placed for {' and '.join(channels)}; on {NCCL} they would wait for one another")
    else:
        from penstock.draw.terminal import to_terminal

        ops = remove_communication(plan)
        print(to_terminal(ops, color=in_colour()))
        if left := plan.num_ops - ops.num_ops:
            print(f"{left:,} ops that send and receive are left out here; --json has them in its grid")


def carrying_channels(schedule: Schedule) -> tuple[str, ...]:
    """The channels of torch on which a schedule's placed messages are proved to arrive, "nccl" first.

    None of a schedule without messages as ops, and none if no channel carries them: then the error of writing says
    which messages wait for one another.
    """
    if not has_communication(schedule):
        return ()
    found = []
    for channel in (NCCL, *(each for each in CHANNELS if each not in (NCCL, BUFFERED))):
        with contextlib.suppress(ScheduleError):
            check(schedule, channels=channel)
            found.append(channel)
    return tuple(found)
