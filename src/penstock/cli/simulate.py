"""`penstock simulate`: what a schedule costs over given durations and links, or several of them side by side.

penstock simulate zb --ranks 4 --microbatches 12 --warmup 7,5,3,1 --f 10 --i 10 --w 10 --link 0:1=20
penstock simulate zb-h1 zb-v plan.json --costs gpt2-7b --link 1:2=20 --memory-limit 35GiB
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, limits_of, result_option, taken, transport_of
from penstock.cli.output import in_colour, print_json, table
from penstock.cost import LinkCondition
from penstock.formats.costs import uneven_json
from penstock.schedule.messages import BUFFERED
from penstock.simulation.simulator import AUTO, untimed_kinds
from penstock.train.options import LINKS, SCHEDULE, setting, with_options
from penstock.train.options import counts as whole_numbers

_TIMES = ("waited_to_leave", "travelled", "waited_to_be_taken")


@dataclass(frozen=True)
class GivenRun:
    """How a schedule runs: its links, dispatch and memory."""

    link: str = setting("", costs_options.LINK, LINKS, metavar="A:B=CONDITION", is_repeated=True)
    dispatch: str = setting(
        "frozen",
        "How ranks choose their ops: frozen, hinted, hinted:0.5, dynamic, or auto for the fastest.",
        SCHEDULE,
    )
    memory_limit: str | None = setting(None, costs_options.MEMORY_LIMIT, SCHEDULE, metavar="SIZE")

    @property
    def links(self) -> ps.Links:
        """Raises CostError for a condition that makes no sense."""
        return costs_options.read_links(shlex.split(self.link))


SimulatedRun = tuple[ps.Timeline, ps.Costs, Any, Callable[[], ps.simulation.Footprint]]
"""A timeline, its costs, the limits of activations per rank that the run has (None for those of its own), and what
gives its footprint, which takes another simulation."""


@app.command(short_help="Time a schedule over costs and links.")
@with_options(source.GivenCounts, costs_options.GivenCosts, GivenRun)
def simulate(
    schedules: Annotated[
        list[str],
        typer.Argument(metavar="NAME|FILE...", help=f"{source.SCHEDULE}. Several are compared with the first."),
    ],
    warmup: Annotated[
        str | None,
        typer.Option(
            "--warmup", metavar="X0,X1,...", help="Warm-up counts, one per rank (zb): --option warmup=[...]."
        ),
    ] = None,
    messages: Annotated[
        str,
        typer.Option(
            "--messages",
            help="How messages travel: decoupled (they hold up no rank), blocking or blocking:DEPTH; or as in torch: "
            "gloo, nccl, nccl-pair or nccl-edge.",
        ),
    ] = "decoupled",
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
    **options: Any,
) -> None:
    """Time a schedule over costs and links: makespan, bubbles, memory and a picture. Several: a table."""
    counts, given = taken(source.GivenCounts, options), taken(costs_options.GivenCosts, options)
    run, mode = taken(GivenRun, options), transport_of(messages)
    if warmup is not None:
        if "warmup" in counts.options:
            raise Misuse("--option warmup and --warmup say the same; give one of them")
        counts = replace(counts, options={**counts.options, "warmup": whole_numbers("--warmup", warmup)})
    if len(schedules) > 1:
        if timeline_file is not None:
            raise Misuse(f"--timeline is for one schedule, not {len(schedules)}")
        plans = source.read_or_build_each(schedules, counts)
        require_ops_of(given, plans)
        rows = _compared(schedules, plans, given, run, mode)
        if json:
            links = _links_json(run.links)
            print_json({"schedules": rows, "links": links, "dispatch": run.dispatch, "transport": messages})
        else:
            _print_compared(rows, given.assumed(plans[0].num_ranks, plans[0].placement), run)
        return
    plan = source.read_or_build(schedules[0], counts)
    ps.check(plan, max_in_flight=counts.most)
    require_ops_of(given, [plan])
    timeline, chosen, *_ = simulated(plan, given, run, mode)
    assumed = given.assumed(timeline.schedule.num_ranks, timeline.schedule.placement)
    if timeline_file is not None:
        from penstock.draw import save

        save(timeline, timeline_file)
    if json:
        print_json(_as_json(timeline, chosen, assumed, run.links, messages))
        return
    _print(timeline, chosen, assumed, run.links, messages)
    if timeline_file is not None:
        print(f"wrote {timeline_file}")


def require_ops_of(given: costs_options.GivenCosts, plans: Sequence[ps.Schedule]) -> None:
    """Raises Misuse for a time of ops that none of the schedules has."""
    if not given.own_kinds:
        return
    kinds = {op.kind for plan in plans for row in plan.order for op in row}
    if lacking := [kind for kind in given.own_kinds if kind not in kinds]:
        raise Misuse(f"--cost {lacking[0]}: no schedule here has such ops; leave it out")


def simulated(
    plan: ps.Schedule, given: costs_options.GivenCosts, run: GivenRun, mode: dict[str, Any]
) -> SimulatedRun:
    """Simulates a schedule under --memory-limit.

    Args:
        mode: how messages travel, as arguments of `ps.simulate`.

    Raises:
        Misuse, CostError: values that do not go together.
        ScheduleError: a schedule that holds more than --memory-limit.
    """
    chosen = given.read(plan.num_ranks, plan.placement, plan.num_microbatches)
    checked = run.dispatch == "frozen" and limits_of("--memory-limit", run.memory_limit, plan.num_ranks)[1]
    if checked:  # what is held follows from the order, and is counted below
        given.require_weights(run.memory_limit, chosen)
    cap = None if checked else given.activations(run.memory_limit, chosen, plan.placement)
    under: dict[str, Any] = {"dispatch": run.dispatch, "memory_limit": cap}
    timeline = ps.simulate(plan, chosen, run.links, **under, **mode)
    channels = mode.get("channels", BUFFERED)
    held = cache(partial(ps.footprint, plan, chosen, run.links, **under, channels=channels))
    costs_options.require_within(run.memory_limit, timeline, held)
    return timeline, chosen, cap, held


def _compared(
    names: Sequence[str],
    plans: Sequence[ps.Schedule],
    given: costs_options.GivenCosts,
    run: GivenRun,
    mode: dict[str, Any],
) -> list[dict[str, Any]]:
    """One row for each schedule, all over the same costs. `mode` is as for `simulated`."""
    if len({plan.num_stages for plan in plans}) > 1 and given.is_of_stages:
        raise Misuse(
            f"the costs are those of stages, and {names[0]} and others have unequal numbers of stages, so that their "
            "models would differ; give --costs with a preset or a profile, which are cut for each schedule"
        )
    rows: list[dict[str, Any]] = []
    for name, plan in zip(names, plans, strict=True):
        fits = None if run.memory_limit is None else True
        try:
            timeline, chosen, _, held = simulated(plan, given, run, mode)
        except (ps.CostError, ps.ScheduleError):  # what is not due to the limit is raised again without one
            timeline, chosen, _, held = simulated(plan, given, replace(run, memory_limit=None), mode)
            fits = False
        if not timeline.makespan:
            raise Misuse(f"{name} takes 0 ms, and so no speeds compare; give times above 0, as --f 10")
        rows.append(
            {
                **source.counts_of(plan),
                "name": Path(name).stem if source.is_file(name) else name,
                "makespan": timeline.makespan,
                "dispatch": timeline.dispatch,
                "bubble_ratio": timeline.bubble_ratio,
                "microbatches_per_second": plan.num_microbatches / timeline.makespan * 1e3,
                "speedup": 1.0,
                "peak_activations": max(timeline.peak_activations),
                "peak_bytes": held().peak if chosen.weight_bytes else None,
                "fits": fits,
                "mismatch": max(ps.schedule.count_mismatch(plan).values()) if plan.updates else 0,
                "versions": max(ps.schedule.count_versions(plan).values()) if plan.updates else 1,
                "untimed": untimed_kinds(plan, chosen),
                "unsized": costs_options.unsized_links(chosen, run.links),
            }
        )
        rows[-1]["speedup"] = rows[-1]["microbatches_per_second"] / rows[0]["microbatches_per_second"]
    return rows


MOST_NAME = 20
"""Letters of a name in the table; the middle of a longer one is left out."""


def _shortened(name: str) -> str:
    half = MOST_NAME // 2
    return name if len(name) <= MOST_NAME else f"{name[:half]}…{name[half + 1 - MOST_NAME :]}"


def _print_compared(rows: Sequence[dict[str, Any]], assumed: str | None, run: GivenRun) -> None:
    if assumed is not None:
        print(f"assumed  {assumed}\n")
    shows_updates = any(row["mismatch"] or row["versions"] > 1 for row in rows)
    width = min(MOST_NAME, max(len(each["name"]) for each in rows))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda row: _shortened(row["name"]).ljust(width),
        "makespan ms": lambda row: f"{row['makespan']:.6g}",
    }
    if not shows_updates:  # all columns together do not fit a terminal of 80, and the speed says as much
        columns["microbatches/s"] = lambda row: f"{row['microbatches_per_second']:.4g}"
    columns |= {"speed": lambda row: f"{row['speedup']:.2f}x", "bubbles": lambda row: f"{row['bubble_ratio']:.1%}"}
    if rows[0]["peak_bytes"] is not None:
        columns["MiB"] = lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"
    else:
        columns["activations"] = lambda row: f"{row['peak_activations']:.6g}"
    if rows[0]["fits"] is not None:
        columns["fits"] = lambda row: "yes" if row["fits"] else "no"
    if shows_updates:
        columns |= {"mismatch": lambda row: str(row["mismatch"]), "versions": lambda row: str(row["versions"])}
    print(table([*columns], [[show(row) for show in columns.values()] for row in rows]))
    for text in run.links.texts():
        print(f"link  {text}")
    for row in rows if run.dispatch == AUTO else ():
        print(f"note  {row['name']} runs {row['dispatch']}, the fastest for it")
    if rows[0]["unsized"]:
        print(f"note  {costs_options.UNSIZED}")
    for row in rows:
        if row["untimed"]:
            print(f"note  of {row['name']}, {untimed_words(row['untimed'])}")


def untimed_words(kinds: Sequence[str]) -> str:
    """What ops without a time take, and how to give it."""
    return f"{' and '.join(kinds)} take{'s' * (len(kinds) == 1)} 0 ms; give the time, as --cost {kinds[0]}=2.5"


def _as_json(
    timeline: ps.Timeline, costs: ps.Costs, assumed: str | None, links: ps.Links, transport: str
) -> dict[str, Any]:
    plan = timeline.schedule
    rows = ("f", "i", "w", "b", "activation", "freed_by_input", "message_bytes")
    return {
        **source.counts_of(plan),
        **{name: getattr(timeline, name) for name in ("dispatch", "makespan", "span", "bubble_ratio", "busy")},
        "considered": dict(timeline.considered),
        "transport": transport,
        "blocked": [sum(t.blocked for t in row) for row in timeline.rows],
        "peak_activations": timeline.peak_activations,
        "costs": {name: getattr(costs, name) for name in rows} | {"uneven": uneven_json(costs)},
        "assumed": assumed,
        "untimed": untimed_kinds(plan, costs),
        "unsized": costs_options.unsized_links(costs, links),
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


def _print(timeline: ps.Timeline, costs: ps.Costs, assumed: str | None, links: ps.Links, transport: str) -> None:
    from penstock.draw.terminal import to_terminal

    if assumed is not None:
        print(f"assumed       {assumed}")
    if untimed := untimed_kinds(timeline.schedule, costs):
        print(f"untimed       {untimed_words(untimed)}")
    print(f"transport     {transport}")
    if timeline.considered:
        print(
            f"dispatch      {timeline.dispatch}, of "
            + ", ".join(f"{p} {ms:.10g} ms" for p, ms in timeline.considered)
        )
    for text in links.texts():
        print(f"link          {text}")
    if costs_options.unsized_links(costs, links):
        print(f"unsized       {costs_options.UNSIZED}")
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
