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
from penstock.cli.options import Channels, Json, taken
from penstock.cli.output import plural, print_json
from penstock.schedule import needed_channel_depth, peak_in_flight
from penstock.schedule.updates import NEWEST
from penstock.schedule.weight_versions import why_none_is_predicted
from penstock.train.options import with_options

COUNT_DEPTH_BELOW = 20_000
"""Ops below which the channels' needed depth is found out too; the search runs the order several times."""

READS = {
    "pipedream": "a forward the newest, its backward the same again",
    "pipedream-2bw": "a forward and its backward those of t - 1 updates in window t",
    "spectrain": "forwards and backwards those that momentum predicts",
    "vnag": "a forward the newest, its backward the same again, with NAdam",
    "xpipe": "a forward those that Adam's step predicts, its backward the newest",
    "tentative": "a late forward those that a tentative update leads to, its backward the newest by then",
}
"""Which weights ops read by the rules of `Updates.rule`, other than the newest for all of them."""


@app.command(short_help="Prove that schedules can run.")
@with_options(source.GivenCounts)
def check(
    schedules: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help=f"{source.SCHEDULE}.")],
    channels: Channels = None,
    json: Json = False,
    **given: Any,
) -> None:
    """Prove that schedules can run: every op once, every need met, no deadlock, memory under its limit."""
    wanted = taken(source.GivenCounts, given)
    proved: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for name in schedules:
        try:
            several_files = source.is_file(name) and len(schedules) > 1
            found = _proved(name, wanted.of_files if several_files else wanted, channels)
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


def _proved(name: str, wanted: source.GivenCounts, channels: str | None) -> dict[str, Any]:
    plan = source.read_or_build(name, wanted)
    ps.check(plan, channels=channels, max_in_flight=wanted.most)
    limit = plan.max_in_flight if wanted.most is None else wanted.most
    needed = needed_channel_depth(plan) if plan.num_ops <= COUNT_DEPTH_BELOW else None
    return {
        "schedule": name,
        "valid": True,
        **source.counts_of(plan),
        "peak_in_flight": peak_in_flight(plan),
        "max_in_flight": limit,
        "channels": channels,
        "needed_channel_depth": needed,
        "updates": _updates_of(plan),
        "declared_orders": len(plan.microbatch_orders),
    }


def _updates_of(plan: ps.Schedule) -> dict[str, Any] | None:
    """What updates there are, how many fall between forwards and backwards, and how many versions that needs."""
    updates, windows = plan.updates, plan.windows
    if updates is None or windows is None:
        return None
    counted, versions = ps.schedule.count_mismatch(plan), ps.schedule.count_versions(plan)
    sent = ps.schedule.count_versions(plan, sharding="copies")
    return {
        "window": updates.window,
        "num_updates": windows.num_updates,
        "rule": updates.rule,
        "none_predicted": why_none_is_predicted(plan),
        "max_mismatch": updates.max_mismatch,
        "mismatch": max(counted.values()),
        "mismatch_by_stage": [
            max(n for (stage, _, _), n in counted.items() if stage == s) for s in range(plan.num_stages)
        ],
        "mismatched": sorted({m % updates.window for (_, _, m), n in counted.items() if n}),
        "versions": max(versions.values()),
        "versions_by_stage": [
            max(n for (stage, _), n in versions.items() if stage == s) for s in range(plan.num_stages)
        ],
        "versions_sharded": max(sent.values()),
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
        f"  Peak in flight {max(peaks)} stage activations, each from its F to its B or W "
        f"({_shortened(peaks)} by rank)"
        + (f", limit {found['max_in_flight']:g}." if found["max_in_flight"] is not None else ", no limit."),
    ]
    if declared := found["declared_orders"]:
        lines.append(f"  Microbatches run in ascending order but in {plural(declared, 'queue')}, as declared.")
    if found["updates"] is not None:
        lines += _updates_said(**found["updates"])
    return "\n".join(lines)


def _updates_said(
    window: int, num_updates: int, rule: str, max_mismatch: int | None, mismatch: int, mismatched: list[int],
    versions: int, versions_by_stage: list[int], versions_sharded: int, none_predicted: str | None, **_: Any,
) -> list[str]:  # fmt: skip
    bound = "no bound" if max_mismatch is None else f"bound {max_mismatch}"
    noun = "microbatch" if len(mismatched) == 1 else "microbatches"
    which = f"; it meets {noun} {_ranges(mismatched)} of a window" if mismatched else ""
    read = "the newest weights" if rule == NEWEST else f"weights by {rule} ({READS[rule]})"
    held = f" ({_shortened(tuple(versions_by_stage))} by stage)" if versions > 1 else ""
    with_sharding = f", counted without sharding; with --sharding copies, the default in training, {versions_sharded}"
    sharded = with_sharding if versions_sharded != versions else ""
    return [
        f"  {plural(num_updates, 'update')} of {plural(window, 'microbatch', 'microbatches')}. "
        f"{f'At most {mismatch}' if mismatch else 'None'} between a forward and its backward ({bound}){which}.",
        f"  Ops read {read}, of which a stage holds {'at most ' if versions > 1 else ''}"
        f"{plural(versions, 'version')}{held}{sharded}.",
        *([] if none_predicted is None else [f"  Note: {none_predicted}."]),
    ]


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers, neighbours as a range: 0 to 7, 12."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ends)


def _channels(found: dict[str, Any]) -> str:
    needed = found["needed_channel_depth"]
    carried = f" on {found['channels']}" if found["channels"] is not None else ""
    room = (
        f"; each channel between two ranks needs room for {plural(needed, 'message')}"
        if needed and found["num_ranks"] > 1
        else ""
    )
    return carried + room


def _shortened(peaks: tuple[int, ...]) -> str:
    shown = [str(peak) for peak in peaks[:8]]
    return " ".join(shown) + (" ..." if len(peaks) > 8 else "")
