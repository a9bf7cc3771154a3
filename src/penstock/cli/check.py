"""`penstock check`: proves that schedules can run, and says what was proved.

penstock check mine.txt                        penstock check zb-v --ranks 4 --microbatches 12
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import MISUSE, Failure, failure_of
from penstock.cli.options import Json, MemoryLimit, Microbatches, Ranks, Stages, Warmup, counts
from penstock.cli.output import plural, print_json
from penstock.schedule import needed_channel_depth, peak_in_flight

COUNT_DEPTH_BELOW = 20_000
"""Ops below which the channels' needed depth is found out too; the search runs the order several times."""


@app.command(short_help="Prove that schedules can run.")
def check(
    schedules: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help=f"{source.SCHEDULE}.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages: Stages = None,
    warmup: Warmup = None,
    memory_limit: MemoryLimit = None,
    channel_depth: Annotated[
        int | None,
        typer.Option(
            "--channel-depth", min=1, help="Messages a channel holds; by default all that its ranks have in flight."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that schedules can run: every op once, every need met, no deadlock, memory under its limit."""
    wanted = source.Counts(
        ranks, microbatches, stages, None if warmup is None else counts("--warmup", warmup), memory_limit
    )
    proved: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for name in schedules:
        try:
            several_files = source.is_file(name) and len(schedules) > 1
            found = _proved(
                name, source.Counts(memory_limit=memory_limit) if several_files else wanted, channel_depth
            )
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            failures.append(failure)
            proved.append({"schedule": name, "valid": False, "error": failure.as_json()})
            if not json:
                what = failure.message.removeprefix(f"{name}: ")
                said = failure.message if failure.exit_code == MISUSE else f"{name} is not valid: {what}"
                print(f"penstock: {said}", file=sys.stderr)
        else:
            proved.append(found)
            if not json:
                print(_sentence(found))
    if json:
        print_json({"checked": proved} | ({"error": failures[0].as_json()} if failures else {}))
    if failures:
        raise typer.Exit(MISUSE if any(f.exit_code == MISUSE for f in failures) else failures[0].exit_code)


def _proved(name: str, wanted: source.Counts, channel_depth: int | None) -> dict[str, Any]:
    plan = source.read_or_build(name, wanted)
    ps.check(plan, channel_depth=channel_depth, memory_limit=wanted.memory_limit)
    limit = plan.memory_limit if wanted.memory_limit is None else wanted.memory_limit
    needed = needed_channel_depth(plan) if plan.num_ops <= COUNT_DEPTH_BELOW else None
    return {
        "schedule": name,
        "valid": True,
        "name": plan.name,
        "num_ranks": plan.num_ranks,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "num_ops": plan.num_ops,
        "peak_in_flight": peak_in_flight(plan),
        "memory_limit": limit,
        "channel_depth": channel_depth,
        "needed_channel_depth": needed,
    }


def _sentence(found: dict[str, Any]) -> str:
    """What was proved, in words."""
    peaks = found["peak_in_flight"]
    lines = [
        f"{found['schedule']}: valid. "
        f"{plural(found['num_ops'], 'op')} of {plural(found['num_ranks'], 'rank')}, "
        f"{plural(found['num_stages'], 'stage')} and "
        f"{plural(found['num_microbatches'], 'microbatch', 'microbatches')}: "
        "each once, in place, after what it needs.",
        f"  No deadlock{_channels(found)}.",
        f"  Peak in flight {max(peaks)} stage activations ({_shortened(peaks)} by rank)"
        + (f", limit {found['memory_limit']:g}." if found["memory_limit"] is not None else ", no limit."),
    ]
    return "\n".join(lines)


def _channels(found: dict[str, Any]) -> str:
    needed, asked = found["needed_channel_depth"], found["channel_depth"]
    with_depth = f" with channels of depth {asked}" if asked is not None else ""
    return with_depth + (f"; depth {needed} is enough" if needed is not None else "")


def _shortened(peaks: tuple[int, ...]) -> str:
    shown = [str(peak) for peak in peaks[:8]]
    return " ".join(shown) + (" ..." if len(peaks) > 8 else "")
