"""`penstock links`: latency and bandwidth between all ranks, which links are late, and what they cost a schedule.

penstock links --ranks 4                                                   one host
torchrun --nproc-per-node 4 -m penstock links                              the same on each of several hosts
penstock links --ranks 4 --schedule zb --microbatches 8 --costs gpt2-7b
penstock lab run --hosts 4 --link 2:3=latency:30ms -- torchrun -m penstock links
"""

from __future__ import annotations

import json as json_format
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import INVALID, Misuse
from penstock.cli.options import Json, Microbatches, ScheduleOption, Stages, Warmup
from penstock.cli.output import print_json, table
from penstock.cost import CostError
from penstock.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from penstock.tune.links import MeasuredLinks

TRANSPORTS = ("gloo", "nccl")
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_IN_MATRIX = 16
"""Ranks up to which all pairs are shown."""


@app.command(short_help="Measure the links between ranks, and what late ones cost.")
def links(
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Number of ranks, on this host. [those of torchrun]")
    ] = None,
    transport: Annotated[
        str, typer.Option("--transport", help="What carries messages: gloo, or nccl where each rank has a GPU.")
    ] = "gloo",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="For how many seconds to measure, all pairs together.")
    ] = 10.0,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", help="Library schedule by name, or a file, to simulate; may be repeated."),
    ] = None,
    microbatches: Microbatches = None,
    stages: Stages = None,
    warmup: Warmup = None,
    option: ScheduleOption = None,
    f: costs_options.F = None,
    i: costs_options.I = None,
    w: costs_options.W = None,
    b: costs_options.B = None,
    message_bytes: costs_options.MessageBytes = None,
    costs: costs_options.CostsSource = None,
    json: Json = False,
) -> None:
    """Measure all pairs of ranks, name the late ones, print --link options, and simulate schedules over them.

    Under torchrun every process is a rank, on any number of hosts. Rank 0 prints.
    """
    if transport not in TRANSPORTS:
        raise Misuse(f"--transport {transport}: write {' or '.join(TRANSPORTS)}")
    environment = RankEnvironment.of(os.environ)
    num_ranks = _num_ranks(ranks, environment)
    priced: list[tuple[ps.Schedule, ps.Costs]] = []
    assumed = None
    if environment is None or environment.rank == 0:
        counts = source.counts_of(num_ranks, microbatches, stages, warmup, None, None, None, option)
        given = costs_options.GivenCosts(costs, f, i, w, b, message_bytes=message_bytes)
        for name in schedule or ():
            plan = source.read_or_build(name, source.GivenCounts() if source.is_file(name) else counts)
            if plan.num_ranks != num_ranks:
                raise Misuse(
                    f"--schedule {name} is for {plan.num_ranks} ranks, and the links of {num_ranks} are measured"
                )
            priced.append((plan, given.read(num_ranks, plan.placement)))
            assumed = assumed or given.assumed(num_ranks, plan.placement)
    found = _measured(environment, num_ranks, seconds, transport)
    if found is None:
        return
    times = [price(plan, each, found.links, seconds) for plan, each in priced]
    if json:
        print_json(_as_json(found, transport, times, assumed))
        return
    _show(found, transport)
    _show_prices(found, times, assumed, any(sum(each.message_bytes) for _, each in priced))


def _num_ranks(ranks: int | None, environment: RankEnvironment | None) -> int:
    if environment is None:
        if ranks is None or ranks < 2:
            given = "" if ranks is None else f"--ranks {ranks}: links are between 2 ranks or more; "
            raise Misuse(f"{given}give --ranks 4, say, or run torchrun -m penstock links on every host")
        return ranks
    if ranks not in (None, environment.num_ranks):
        raise Misuse(f"--ranks {ranks}: torchrun has started {environment.num_ranks}; leave --ranks out")
    return environment.num_ranks


def _measured(
    environment: RankEnvironment | None, num_ranks: int, seconds: float, transport: str
) -> MeasuredLinks | None:
    """The links, measured by this process as one of the ranks, or by ranks that it starts. None except on rank 0."""
    from penstock.runtime import RuntimeFailure
    from penstock.train.start import RunFailed, start_ranks
    from penstock.tune.links import MeasuredLinks, measure_as_rank

    if environment is not None:
        try:
            rank, found = measure_as_rank(seconds, transport)
        except RuntimeFailure as error:
            if environment.rank == 0:
                raise
            print(f"penstock: {error}", file=sys.stderr)
            raise typer.Exit(INVALID) from None
        return found if rank == 0 else None
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "links.json"
        program = ["-m", "penstock.tune.links", str(seconds), transport, str(path)]
        code, said = start_ranks(program, num_ranks, None, "penstock.runtime")
        if code or said:
            raise RunFailed(said, code or INVALID)
        return MeasuredLinks.from_json(json_format.loads(path.read_text()))


def price(schedule: ps.Schedule, costs: ps.Costs, links: ps.Links, seconds: float) -> dict[str, Any]:
    """Simulates a schedule over links. Returns makespans (ms).

    Args:
        seconds: how long the planner may search.

    Returns:
        healthy: without delays. frozen, hinted: over the links, under each dispatch.
        planned: of a plan for these links that needs no more memory, under its faster dispatch. None if there is
            none, with `why`.
    """

    def over_links(plan: ps.Schedule, dispatch: str) -> float:
        return ps.simulate(plan, costs, links=links, dispatch=dispatch).makespan

    healthy = ps.simulate(schedule, costs)
    found: dict[str, Any] = {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "healthy": healthy.makespan,
    }
    found |= {each: over_links(schedule, each) for each in ("frozen", "hinted")}
    try:
        plan = ps.plan(
            costs,
            schedule.num_ranks,
            schedule.num_microbatches,
            costs_options.as_delays(links, costs),
            memory_limit=healthy.peak_activations,
            time_limit=seconds,
            placement=schedule.placement,
        )
    except (ps.ScheduleError, CostError) as error:
        return found | {"planned": None, "why": str(error)}
    return found | {"planned": min(over_links(plan.schedule, each) for each in ("frozen", "hinted")), "why": ""}


def _as_json(
    found: MeasuredLinks, transport: str, times: list[dict[str, Any]], assumed: str | None
) -> dict[str, Any]:
    default = found.links.default
    return {
        "num_ranks": len(found.hosts),
        "hosts": list(found.hosts),
        "transport": transport,
        "seconds": found.seconds,
        "pairs": [
            {
                "link": f"{a}:{b}",
                "latency": pair.latency,
                "median_latency": pair.median,
                "bandwidth": pair.there,
                "bandwidth_back": pair.back,
                "loopback": found.is_loopback((a, b)),
                "late": found.is_late((a, b)),
                "slow": found.is_slow(a, b),
                "slow_back": found.is_slow(b, a),
            }
            for (a, b), pair in found.pairs.items()
        ],
        "links": found.links.texts(),
        "default_delay": 0.0 if default is None else default.latency.at(0.0, ""),
        "assumed": assumed,
        "schedules": times,
    }


def _show(found: MeasuredLinks, transport: str) -> None:
    num_ranks, num_hosts = len(found.hosts), len(set(found.networks))
    where = "this host, over loopback" if num_hosts == 1 else f"{num_hosts} hosts"
    print(
        f"{len(found.pairs)} links between {num_ranks} ranks on {where}, by {transport}, in {found.seconds:.1f} s\n"
    )
    if found.late:
        head = ["late", "hosts", "latency ms", "usual", "bandwidth", "back", "usual"]
        rows = [
            [
                f"{a}:{b}",
                f"{found.hosts[a]} {found.hosts[b]}",
                f"{found.pairs[a, b].latency:.3g}",
                f"{found.usual_latency((a, b)):.3g}",
                *(_rate(rate) for rate in (*found.pairs[a, b][2:], found.usual_rate((a, b)))),
            ]
            for a, b in found.late
        ]
        print(table(head, rows), end="\n\n")
    else:
        print("No link stands out of the others.\n" if len(found.pairs) > 2 else "Too few links to compare.\n")
    if num_ranks <= MOST_IN_MATRIX:
        names = [str(rank) for rank in range(num_ranks)]
        pairs = [[(min(a, b), max(a, b)) for b in range(num_ranks)] for a in range(num_ranks)]
        latencies = [[f"{found.pairs[p].latency:.3g}" if p in found.pairs else "" for p in row] for row in pairs]
        rates = [["" if a == b else _rate(found.rate(a, b)) for b in range(num_ranks)] for a in range(num_ranks)]
        for title, cells in (("latency, ms", latencies), ("bandwidth, bit/s", rates)):
            print(table([title, *names], [[name, *row] for name, row in zip(names, cells, strict=True)]), end="\n\n")


def _rate(rate: float | None) -> str:
    """Bytes a second as 940M or 9.4G, in bits."""
    if rate is None:
        return "-"
    size, unit = next(((size, unit) for size, unit in _UNITS if rate * 8 >= size), _UNITS[-1])
    return f"{float(f'{rate * 8 / size:.3g}'):g}{unit}"


def _show_prices(
    found: MeasuredLinks,
    times: list[dict[str, Any]],
    assumed: str | None,
    has_sizes: bool,
) -> None:
    print("options   " + (" ".join(f"--link {text}" for text in found.links.texts()) or "none: no link is late"))
    if found.links.default is not None:
        print(f"          and, for simulate and plan, --default-delay {found.links.default.latency.at(0.0, '')}")
    if not times:
        print("cost      not known: give --schedule zb --microbatches 8 and --costs, or --f, --i and --w")
        return
    if assumed is not None:
        print(f"assumed   {assumed}")
    if not has_sizes and any(each.bandwidth for each in found.links.conditions.values()):
        print("note      bandwidth costs nothing here, as the costs have no sizes of messages; give --message-bytes")
    for each in times:
        planned = f"no plan: {each['why']}" if each["why"] else f"{each['planned']:.4g} planned for these links"
        print(
            f"{each['name']}, {each['num_microbatches']} microbatches: {each['healthy']:.4g} ms without delays, "
            f"{each['frozen']:.4g} as is, {each['hinted']:.4g} with hinted dispatch, {planned}"
        )
