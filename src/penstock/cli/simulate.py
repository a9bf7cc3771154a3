"""`penstock simulate`: what a schedule costs over given durations and links, or several of them side by side.

penstock simulate zb --ranks 4 --microbatches 12 --warmup 7,5,3,1 --f 10 --i 10 --w 10 --link 0:1=20
penstock simulate zb-h1 zb-v plan.json --costs gpt2-7b --link 1:2=20 --memory-limit 35GiB
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli import options, source
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import (
    Json,
    MaxInFlight,
    MaxMismatch,
    Microbatches,
    Ranks,
    ScheduleOption,
    Stages,
    Warmup,
    Window,
    result_option,
)
from penstock.cli.output import in_colour, print_json, table
from penstock.cost import LinkCondition
from penstock.formats.costs import uneven_json
from penstock.simulation.memory_footprint import in_bytes
from penstock.simulation.simulator import untimed_kinds

if TYPE_CHECKING:
    from penstock.runtime import Emulation

_TIMES = ("waited_to_leave", "travelled", "waited_to_be_taken")


@app.command(short_help="Time a schedule over costs and links.")
def simulate(
    schedules: Annotated[
        list[str],
        typer.Argument(metavar="NAME|FILE...", help=f"{source.SCHEDULE}. Several are compared with the first."),
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages: Stages = None,
    warmup: Warmup = None,
    max_in_flight: MaxInFlight = None,
    window: Window = None,
    max_mismatch: MaxMismatch = None,
    option: ScheduleOption = None,
    f: costs_options.F = None,
    i: costs_options.I = None,
    w: costs_options.W = None,
    b: costs_options.B = None,
    activation: costs_options.Activation = None,
    freed_by_input: costs_options.FreedByInput = None,
    message_bytes: costs_options.MessageBytes = None,
    lengths: costs_options.Lengths = None,
    costs: costs_options.CostsSource = None,
    link: costs_options.Link = None,
    default_delay: costs_options.DefaultDelay = 0.0,
    dispatch: Annotated[
        str,
        typer.Option(
            "--dispatch",
            help="How ranks choose their ops: frozen, hinted, hinted:0.5, dynamic, or auto for the fastest.",
        ),
    ] = "frozen",
    messages: Annotated[
        str,
        typer.Option(
            "--messages",
            help="How messages travel: decoupled (they hold up no rank), blocking or blocking:DEPTH; or as in torch: "
            "gloo, nccl, nccl-pair or nccl-edge.",
        ),
    ] = "decoupled",
    memory_limit: costs_options.MemoryLimit = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            "--emulate",
            metavar="threads|processes",
            help="Also run it on emulated devices, with ranks as threads or processes, and compare.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="How many steps to run, emulated. [3]")] = None,
    stretch: Annotated[
        float | None,
        typer.Option(
            "--stretch", help="Make ops and links slower by this factor, emulated, so that noise matters less. [1]"
        ),
    ] = None,
    timeline_file: Annotated[
        str | None,
        result_option(
            "Where the timeline goes: as a picture, .svg, .html or .txt, or as a trace, .json or .json.gz.",
            "pictures are written as .svg, .html or .txt, traces as .json or .json.gz",
            ".svg",
            ".html",
            ".txt",
            ".json",
            ".json.gz",
            option="--timeline",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time a schedule over costs and links: makespan, bubbles, memory and a picture. Several: a table."""
    given_counts = source.counts_of(ranks, microbatches, stages, warmup, max_in_flight, window, max_mismatch, option)
    given = costs_options.GivenCosts(costs, f, i, w, b, activation, message_bytes, freed_by_input, lengths)
    links = ps.Links.parse(link or [], default_delay)
    mode = options.transport_of(messages)
    if len(schedules) > 1:
        if emulate is not None or timeline_file is not None:
            raise Misuse(
                f"--{'timeline' if emulate is None else 'emulate'} is for one schedule, not {len(schedules)}"
            )
        plans = source.read_or_build_each(schedules, given_counts)
        rows = _compared(schedules, plans, given, {"links": links, "dispatch": dispatch, **mode}, memory_limit)
        if json:
            print_json({"schedules": rows, "links": _links_json(links), "dispatch": dispatch, "transport": messages})
        else:
            _print_compared(rows, given.assumed(plans[0].num_ranks, plans[0].placement), links)
        return
    plan = source.read_or_build(schedules[0], given_counts)
    ps.check(plan, max_in_flight=given_counts.max_in_flight)
    chosen = given.read(plan.num_ranks, plan.placement)
    assumed = given.assumed(plan.num_ranks, plan.placement)
    checked = dispatch == "frozen" and options.limits_of("--memory-limit", memory_limit, plan.num_ranks)[1]
    if checked:  # what is held follows from the order, and is counted below
        given.require_weights(memory_limit, chosen)
    cap = None if checked else given.activations(memory_limit, chosen, plan.placement)
    timeline = ps.simulate(plan, chosen, links=links, dispatch=dispatch, memory_limit=cap, **mode)
    held = cache(partial(ps.footprint, plan, chosen, links, dispatch=dispatch, memory_limit=cap))
    if over := costs_options.above_limit(memory_limit, held):
        rank = over.index(max(over))
        raise ps.ScheduleError(
            f"rank {rank} holds {in_bytes(held().totals[rank], 4)}, messages included, which is "
            f"{in_bytes(over[rank], 4)} more than --memory-limit {memory_limit}; raise the limit, or ask penstock "
            "plan for a schedule within it",
            rule="memory",
            rank=rank,
        )
    emulation = None
    if emulate is not None:
        if mode != {"transport": "decoupled"}:
            raise Misuse(f"--emulate sends messages decoupled from ops; leave out --messages {messages}")
        emulation = _emulate(emulate)(
            plan,
            chosen,
            links=links,
            dispatch=dispatch,
            memory_limit=cap,
            num_steps=3 if steps is None else steps,
            stretch=1.0 if stretch is None else stretch,
        )
    elif steps is not None or stretch is not None:
        raise Misuse(f"--{'steps' if stretch is None else 'stretch'} is for emulated runs; add --emulate threads")
    if timeline_file is not None:
        from penstock.draw import save

        save(timeline, timeline_file)
    if json:
        found = _as_json(timeline, chosen, assumed, links, messages)
        print_json(found if emulation is None else {**found, "emulated": _emulated_json(emulation, str(emulate))})
        return
    _print(timeline, chosen, assumed, links, messages)
    if emulation is not None:
        _print_emulated(emulation)
    if timeline_file is not None:
        print(f"wrote {timeline_file}")


def _compared(
    names: Sequence[str],
    plans: Sequence[ps.Schedule],
    given: costs_options.GivenCosts,
    run: dict[str, Any],
    memory_limit: str | None,
) -> list[dict[str, Any]]:
    """One row for each schedule, all over the same costs.

    Args:
        run: links, dispatch and transport, as arguments of `ps.simulate`.
    """
    if len({plan.num_stages for plan in plans}) > 1 and given.is_of_stages:
        raise Misuse(
            f"the costs are those of stages, and {names[0]} and others have unequal numbers of stages, so that their "
            "models would differ; give --costs with a preset or a profile, which are cut for each schedule"
        )
    limit, in_bytes = options.limits_of("--memory-limit", memory_limit)
    rows: list[dict[str, Any]] = []
    for name, plan in zip(names, plans, strict=True):
        chosen = given.read(plan.num_ranks, plan.placement)
        if in_bytes:
            given.require_weights(memory_limit, chosen)
        timeline = ps.simulate(plan, chosen, **run)
        held = ps.footprint(plan, chosen, run["links"], dispatch=run["dispatch"]) if chosen.weight_bytes else None
        peaks = held.totals if held is not None and in_bytes else timeline.peak_activations
        limits = limit if isinstance(limit, list) else [limit or math.inf] * plan.num_ranks
        rows.append(
            {
                "name": Path(name).stem if source.is_file(name) else name,
                "num_ranks": plan.num_ranks,
                "num_stages": plan.num_stages,
                "num_microbatches": plan.num_microbatches,
                "makespan": timeline.makespan,
                "bubble_ratio": timeline.bubble_ratio,
                "microbatches_per_second": plan.num_microbatches / timeline.makespan * 1e3,
                "speedup": 1.0,
                "peak_activations": max(timeline.peak_activations),
                "peak_bytes": None if held is None else held.peak,
                "fits": None if limit is None else all(map(operator.le, peaks, limits)),
                "mismatch": max(ps.schedule.count_mismatch(plan).values()) if plan.updates else 0,
                "versions": max(ps.schedule.count_versions(plan).values()) if plan.updates else 1,
                "untimed": untimed_kinds(plan, chosen),
            }
        )
        rows[-1]["speedup"] = rows[-1]["microbatches_per_second"] / rows[0]["microbatches_per_second"]
    return rows


def _print_compared(rows: Sequence[dict[str, Any]], assumed: str | None, links: ps.Links) -> None:
    if assumed is not None:
        print(f"assumed  {assumed}\n")
    in_bytes = rows[0]["peak_bytes"] is not None
    head = ["", "makespan ms", "microbatches/s", "speed", "bubbles", "MiB" if in_bytes else "activations"]
    shows_fits, shows_updates = (
        rows[0]["fits"] is not None,
        any(row["mismatch"] or row["versions"] > 1 for row in rows),
    )
    head += ["fits"] * shows_fits + ["mismatch", "versions"] * shows_updates
    cells = [
        [
            row["name"].ljust(max(len(each["name"]) for each in rows)),
            f"{row['makespan']:.6g}",
            f"{row['microbatches_per_second']:.4g}",
            f"{row['speedup']:.2f}x",
            f"{row['bubble_ratio']:.1%}",
            f"{row['peak_bytes'] / 2**20:,.0f}" if in_bytes else f"{row['peak_activations']:.6g}",
            *(["yes" if row["fits"] else "no"] * shows_fits),
            *([str(row["mismatch"]), str(row["versions"])] * shows_updates),
        ]
        for row in rows
    ]
    print(table(head, cells))
    for text in links.texts():
        print(f"link  {text}")
    for row in rows:
        if row["untimed"]:
            print(f"note  {' and '.join(row['untimed'])} of {row['name']} take 0 ms, as the costs do not name them")


def _emulate(ranks: str) -> Callable[..., Emulation]:
    """What emulates, with ranks as threads or as processes; imports torch."""
    if ranks == "threads":
        return ps.emulate
    if ranks == "processes":
        from penstock.runtime.emulation.pipeline import emulate_processes

        return emulate_processes
    raise Misuse(f"--emulate {ranks}: write threads or processes")


def _as_json(
    timeline: ps.Timeline,
    costs: ps.Costs,
    assumed: str | None,
    links: ps.Links,
    transport: str,
) -> dict[str, Any]:
    plan = timeline.schedule
    return {
        "name": plan.name,
        "num_ranks": plan.num_ranks,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "num_ops": plan.num_ops,
        "dispatch": timeline.dispatch,
        "considered": dict(timeline.considered),
        "transport": transport,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_ratio": timeline.bubble_ratio,
        "busy": timeline.busy,
        "blocked": [sum(t.blocked for t in row) for row in timeline.rows],
        "peak_activations": timeline.peak_activations,
        "costs": {
            name: getattr(costs, name)
            for name in ("f", "i", "w", "b", "activation", "freed_by_input", "message_bytes")
        }
        | {"uneven": uneven_json(costs)},
        "assumed": assumed,
        "untimed": untimed_kinds(plan, costs),
        "links": _links_json(links),
        "messages": _messages_json(timeline),
    }


def _messages_json(timeline: ps.Timeline) -> dict[str, dict[str, float]]:
    """For each link, how many messages it carried, and how long (ms) these waited and travelled in all."""
    found: dict[str, dict[str, float]] = {}
    for m in timeline.messages:
        link = found.setdefault(f"{m.source_rank}:{m.target_rank}", dict.fromkeys(_TIMES, 0.0) | {"count": 0})
        link["count"] += 1
        for name, since, until in zip(_TIMES, (m.sent, m.left, m.arrived), (m.left, m.arrived, m.taken), strict=True):
            link[name] += until - since
    return found


def _links_json(links: ps.Links) -> dict[str, Any]:
    """Plain delays in ms, and what each link does in words that say which kind of delay it is."""
    default = links.default or LinkCondition()
    return {
        "default": default.latency.at(0.0, "") if default.is_latency else None,
        "default_condition": str(default),
        "delays": {f"{a}:{b}": delay for (a, b), delay in links.delays.items()} if links.is_constant else {},
        "conditions": {f"{a}:{b}": str(condition) for (a, b), condition in links.conditions.items()},
    }


def _emulated_json(emulation: Emulation, ranks: str) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "stretch": emulation.stretch,
        "makespans": [timeline.makespan for timeline in emulation.timelines],
        "simulated": [timeline.makespan for timeline in emulation.simulated],
        "calibrated": [timeline.makespan for timeline in emulation.calibrated],
        "peak_activations": [timeline.peak_activations for timeline in emulation.timelines],
        "starts": emulation.starts,
        "errors": emulation.errors,
        "calibrated_errors": emulation.calibrated_errors,
        "median_error": emulation.median_error,
        "own_latency": emulation.own_latency,
        "late": {"median": emulation.late.median, "worst": emulation.late.worst},
    }


def _print_emulated(emulation: Emulation) -> None:
    print("\nemulated, against simulated and against simulated with the transport's own latency:\n")
    steps = zip(emulation.timelines, emulation.simulated, emulation.calibrated, strict=True)
    rows = [
        [
            f"step {number}",
            f"{measured.makespan:.1f}",
            f"{simulated.makespan:.1f}",
            f"{error:+.1%}",
            f"{calibrated.makespan:.1f}",
            f"{calibrated_error:+.1%}",
        ]
        for number, ((measured, simulated, calibrated), error, calibrated_error) in enumerate(
            zip(steps, emulation.errors, emulation.calibrated_errors, strict=True)
        )
    ]
    print(table(["", "measured ms", "simulated", "", "with latency", ""], rows), end="\n\n")
    print(f"median error          {emulation.median_error:.1%}")
    print(f"transport's latency   {emulation.own_latency:.3f} ms a message")
    print(f"ops ended late by     {emulation.late.median:.3f} ms (median), {emulation.late.worst:.3f} (worst)")
    if emulation.stretch != 1:
        print(f"stretch               {emulation.stretch:g}; the times above are as without it")


def _print(
    timeline: ps.Timeline,
    costs: ps.Costs,
    assumed: str | None,
    links: ps.Links,
    transport: str,
) -> None:
    from penstock.draw.terminal import to_terminal

    if assumed is not None:
        print(f"assumed       {assumed}")
    if untimed := untimed_kinds(timeline.schedule, costs):
        times = 'its time, as "other"' if len(untimed) == 1 else 'their times, as "other"'
        print(
            f"untimed       {' and '.join(untimed)} take{'s' * (len(untimed) == 1)} 0 ms; a file for --costs gives "
            f'{times}: {{"{untimed[0]}": 2.5}}'
        )
    print(f"transport     {transport}")
    if timeline.considered:
        print(
            f"dispatch      {timeline.dispatch}, of "
            + ", ".join(f"{p} {ms:.10g} ms" for p, ms in timeline.considered)
        )
    for text in links.texts():
        print(f"link          {text}")
    print(f"makespan      {timeline.makespan:.10g} ms")
    print(f"span          {timeline.span:.10g} ms")
    print(f"bubble ratio  {timeline.bubble_ratio:.1%}\n")
    whole = sum(costs.activation)  # of a microbatch in the whole model: so schedules of any number of stages compare
    rows = [
        [
            f"rank {rank}",
            f"{timeline.busy[rank]:.6g}",
            f"{sum(t.blocked for t in row):.6g}",
            f"{peak:.6g}",
            f"{peak / whole:.2f}" if whole else "",
        ]
        for rank, (row, peak) in enumerate(zip(timeline.rows, timeline.peak_activations, strict=True))
    ]
    print(table(["", "busy ms", "blocked ms", "peak activations", "as whole microbatches"], rows), end="\n\n")
    print(to_terminal(timeline, color=in_colour()))
