"""`penstock plan`: the best schedule for given costs, links and memory, and how far from the best it can be.

penstock plan --ranks 4 --microbatches 12 --f 10 --i 10 --w 10 --link 0:1=20 --max-in-flight 7
penstock plan --ranks 4 --microbatches 12 --f 10 --i 10 --w 10 --link 0:1=20 --channels nccl-edge --out plan.csv
penstock plan --ranks 8 --microbatches 32 --memory-limit 32 --placement all
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import MAX_IN_FLIGHT, Json, Out, PlacementNames, limits_of, numbers, taken
from penstock.cli.output import in_colour, print_json
from penstock.cli.search import SearchSpace, search
from penstock.planning import Progress
from penstock.program import placements
from penstock.train.options import with_options


@app.command(short_help="Find the best schedule, with a proof of how good it is.")
@with_options(costs_options.GivenCosts)
def plan(
    ranks: Annotated[int, typer.Option("--ranks", help="Number of ranks.")],
    microbatches: Annotated[int, typer.Option("--microbatches", help="Number of microbatches.")],
    link: costs_options.LateLink = None,
    max_in_flight: Annotated[
        str | None,
        typer.Option("--max-in-flight", metavar="COUNT", help=MAX_IN_FLIGHT),
    ] = None,
    memory_limit: costs_options.MemoryLimit = None,
    placement: PlacementNames = None,
    stages: Annotated[
        int | None,
        typer.Option("--stages", help="Number of stages, for --placement circular and wave. [two and four per rank]"),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective", help="What is to be short: makespan, or span (a rank's first start to its last end)."
        ),
    ] = "makespan",
    dispatch: Annotated[
        str,
        typer.Option(
            "--dispatch", help="How ranks choose their ops: frozen, hinted or dynamic. For that the plan is made."
        ),
    ] = "frozen",
    channels: Annotated[
        str,
        typer.Option(
            "--channels",
            help="What carries messages: buffered (Penstock itself), gloo, nccl, nccl-pair or nccl-edge. But for "
            "buffered, the plan has its messages placed, and links may have a bandwidth.",
        ),
    ] = "buffered",
    parts: Annotated[
        int | None,
        typer.Option(
            "--parts", help="Equal parts of the model, of which a search of placements makes stages. [4 per rank]"
        ),
    ] = None,
    shared_ends: Annotated[
        bool,
        typer.Option(
            "--shared-ends/--no-shared-ends",
            help="Let all ranks together run the first and the last part, such as embedding and head, in a search of "
            "placements.",
        ),
    ] = False,
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--no-split", help="Split every backward into I and W, or keep it whole. [the better for each]"
        ),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Let forwards run again, so that blocks keep only their input, or forbid it. [allowed if the costs "
            "say what that keeps]",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="AMOUNT",
            help="Most activations in host memory for each rank: 7, or 7,5 by rank; 'any' for no limit. The costs "
            "say how long OFFLOAD and RELOAD take.",
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option("--time", metavar="SECONDS", help="Most seconds to spend.")] = 10.0,
    out: Out = None,
    json: Json = False,
    **costs: Any,
) -> None:
    """Find the best schedule within the limits. Ctrl-C ends the search with the best so far.

    With --placement all, or several, simulate every placement with many rules, list the shortest schedule of each,
    and draw the best. Costs are then those of a part, and nothing is proved.
    """
    given = taken(costs_options.GivenCosts, costs)
    space = SearchSpace(placement or (), parts, shared_ends, split is not False)
    if space.is_asked:
        for name, is_given in {
            "--cost lengths": "lengths" in given.others, "--max-in-flight": max_in_flight, "--stages": stages,
            "--recompute": recompute, "--offload": offload, "--objective": objective != "makespan",
            "--dispatch": dispatch != "frozen", "--channels": channels != "buffered",
        }.items():  # fmt: skip
            if is_given:
                raise Misuse(f"{name} is for a plan with one placement; leave it out, or give one --placement alone")
        search(ranks, microbatches, given, link or [], memory_limit, space, out, json)
        return
    where = _placement(placement, ranks, stages)
    chosen = given.read(ranks, where)
    links = costs_options.read_links(link or [])
    if channels == "buffered":
        links = costs_options.late_links(link or [], chosen)
    most, in_bytes = limits_of("--memory-limit", memory_limit, ranks)
    if in_bytes:
        given.require_weights(memory_limit, chosen)
    with ProgressLine(time_limit) as show:
        found = ps.plan(
            chosen,
            ranks,
            microbatches,
            links,
            max_in_flight=_limit("--max-in-flight", max_in_flight),
            memory_limit=None if in_bytes else most,
            total_limit=most if in_bytes else None,
            time_limit=time_limit,
            objective=objective,
            dispatch=dispatch,
            channels=channels,
            placement=where,
            split=split,
            recompute=recompute,
            offload=True if offload == "any" else _limit("--offload", offload),
            progress=show,
        )
    if out is not None:
        found.save(out)
    assumed = given.assumed(ranks, where)
    if json:
        counts = {"num_ranks": ranks, "num_microbatches": microbatches}
        rest = {"objective": objective, "assumed": assumed, **counts, "dispatch": dispatch, "out": out}
        print_json({**_as_json(found), **rest})
        return
    _show(found, objective, assumed)
    if out is not None:
        print(f"wrote {out}")


def _as_json(found: ps.Plan) -> dict[str, Any]:
    certificate = found.certificate
    return {
        "makespan": found.makespan,
        "value": found.value,
        "lower_bound": found.lower_bound,
        "certificate": {
            "placement": certificate.placement.pipelines,
            "shared": certificate.placement.shared,
            "backward": certificate.backward,
            "microbatches": certificate.microbatches,
            "recompute": certificate.recompute,
            "offload": certificate.offload,
            "pairs": certificate.pairs,
            "order": certificate.order,
            "channel": certificate.channel,
        },
        "gap": found.gap,
        "seconds": found.seconds,
        "how": found.how,
        "microbatch_order": found.microbatch_order,
        "grid": str(found.schedule),
    }


def _show(found: ps.Plan, objective: str, assumed: str | None) -> None:
    from penstock.draw.terminal import to_terminal

    if assumed is not None:
        print(f"assumed      {assumed}\n")
    print(to_terminal(ps.passes.remove_communication(found.schedule), color=in_colour()))
    print()
    print(f"makespan     {found.makespan:.10g} ms")
    if found.value != found.makespan:
        print(f"{objective:<12} {found.value:.10g} ms")
    print(f"lower bound  {found.lower_bound:.10g} ms")
    print(f"gap          {found.gap:.2%}")
    print(f"covers       {found.certificate}")
    if found.microbatch_order is not None:
        print(f"microbatches {' '.join(map(str, found.microbatch_order))}")
    print(f"found by     {found.how}, {found.seconds:.2g} s")


class ProgressLine:
    """A line on stderr that says where the search stands, where that is a terminal."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._progress: Any = None

    def __enter__(self) -> Any:
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._progress = Bar(TextColumn("{task.description}"), BarColumn(), console=console, transient=True)
        self._progress.start()
        task = self._progress.add_task("planning", total=self._time_limit)

        def show(now: Progress) -> None:
            said = f"{now.how}: {now.value:.6g} ms, gap {now.gap:.2%}"
            self._progress.update(task, completed=min(now.seconds, self._time_limit), description=said)

        return show

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _placement(names: list[str] | None, ranks: int, stages: int | None) -> ps.Placement:
    if ranks < 1:
        raise Misuse(f"--ranks {ranks}: at least 1 is needed")
    return placements.named(names[0] if names else "one-to-one", ranks, stages)


def _limit(option: str, text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    values = numbers(option, text)
    return values[0] if len(values) == 1 else values
