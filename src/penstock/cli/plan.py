"""`penstock plan`: the best schedule for given costs, links and memory, and how far from the best it can be.

penstock plan --ranks 4 --microbatches 12 --f 10 --i 10 --w 10 --link 0:1=20 --max-in-flight 7
penstock plan --ranks 4 --microbatches 12 --f 10 --i 10 --w 10 --link 0:1=20 --channels nccl-edge --out plan.csv
penstock plan --ranks 8 --microbatches 32 --memory-limit 32 --placement all
penstock plan --placement own.json --costs costs.json
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, Out, limits_of, numbers, taken
from penstock.cli.output import in_colour, print_json, show_progress
from penstock.cli.search import PARTS_A_RANK, SHARED_ENDS, SearchSpace, search
from penstock.cli.simulate import GivenRun, simulated, untimed_words
from penstock.cli.source import is_file
from penstock.cost.conditions import LinkQueue
from penstock.formats import load
from penstock.planning import Progress
from penstock.planning.result import certain, measured
from penstock.program import placements
from penstock.schedule import StageGraph
from penstock.schedule.messages import BUFFERED
from penstock.simulation.simulator import untimed_kinds
from penstock.train.options import LINKS, RUN, SCHEDULE, setting, with_options

PlacedStages = tuple[ps.Placement, StageGraph | None, int, int]
"""A placement, the graph of its stages (None for a chain), and the numbers of ranks and microbatches."""


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for, and how long it is sought."""

    link: tuple[str, ...] | None = setting(
        None,
        "What messages between A and B meet, both ways unless B:A is given: a delay in ms, 0:1=20, or what lasts, as "
        "0:1=latency:20ms+bandwidth:1GB/s; default=0.2 is the delay of all other links; may be repeated.",
        LINKS,
        metavar="A:B=CONDITION",
        is_repeated=True,
    )
    max_in_flight: str | None = setting(
        None,
        "Most stage activations that a rank may hold, each until its B or W: 7, or 7,5 by rank.",
        SCHEDULE,
        metavar="COUNT",
    )
    memory_limit: str | None = setting(None, costs_options.MEMORY_LIMIT, SCHEDULE, metavar="SIZE")
    placement: tuple[str, ...] | None = setting(
        None,
        "Which ranks host which stages: one-to-one, circular, v-shape or wave; with +bidirectional behind it, a "
        "second pipeline runs the other way. A schedule file stands for its placement, with the stages that branch "
        "and the ops of your own that it has. Several names, all, or shared-ends (all, with a first and a last stage "
        "that all ranks run together) are searched. [one-to-one]",
        SCHEDULE,
        metavar="NAME|FILE",
        is_repeated=True,
    )
    stages: int | None = setting(
        None,
        "Number of stages, for --placement circular and wave [two and four per rank]; for a search, the equal parts "
        "of the model of which stages are made. [four per rank]",
        SCHEDULE,
    )
    objective: str = setting(
        "makespan", "What is to be short: makespan, or span (a rank's first start to its last end).", SCHEDULE
    )
    dispatch: str = setting(
        "frozen", "How ranks choose their ops: frozen, hinted or dynamic. For that the plan is made.", SCHEDULE
    )
    channels: str = setting(
        "buffered",
        "What carries messages: buffered (Penstock itself), gloo, nccl, nccl-pair or nccl-edge. But for buffered, "
        "the plan has its messages placed, and the search knows that they wait for one another.",
        LINKS,
    )
    split: bool | None = setting(
        None, "Split every backward into I and W, or keep it whole. [the better for each]", SCHEDULE
    )
    recompute: bool | None = setting(
        None,
        "Let forwards run again, so that blocks keep only their input, or forbid it. [allowed if the costs say what "
        "that keeps]",
        SCHEDULE,
    )
    offload: str | None = setting(
        None,
        "Most activations in host memory for each rank: 7, or 7,5 by rank; 'any' for no limit. The costs say how "
        "long OFFLOAD and RELOAD take.",
        SCHEDULE,
        metavar="AMOUNT",
    )
    time: float = setting(10.0, "Most seconds to spend on a plan with one placement.", RUN, metavar="SECONDS")

    @property
    def links(self) -> list[str]:
        return [*(self.link or ())]

    @property
    def search_space(self) -> SearchSpace | None:
        """What is searched; None for a plan with one placement."""
        names = self.placement or ()
        if len(names) < 2 and not {"all", SHARED_ENDS} & {*names}:
            return None
        if files := [name for name in names if is_file(name)]:
            raise Misuse(f"--placement {files[0]}: a search tries placements by name; give the file alone")
        named = () if "all" in names else tuple(name for name in names if name != SHARED_ENDS)
        return SearchSpace(named, self.stages, SHARED_ENDS in names, self.split is not False)

    def require_for_search(self, given: costs_options.GivenCosts) -> None:
        """Raises Misuse for an option that only a plan with one placement has."""
        default = PlanSettings()
        names = ("max_in_flight", "recompute", "offload", "objective", "dispatch", "channels", "time")
        only = [f"--cost {name}" for name in ("lengths", *given.own_kinds) if name in given.others]
        only += ["--" + name.replace("_", "-") for name in names if getattr(self, name) != getattr(default, name)]
        if not only:
            return
        instead = "leave it out"
        if only[0] == "--max-in-flight":
            instead = (
                "a search of placements takes --memory-limit, such as --memory-limit 28, which counts activations of "
                f"parts, {PARTS_A_RANK} of which make a rank's share of the model"
            )
        raise Misuse(f"{only[0]} is for a plan with one placement; {instead}, or give one --placement alone")

    def place(self, ranks: int | None, microbatches: int | None) -> PlacedStages:
        """The one placement, with the graph of the stages and the numbers that a schedule file gives.

        Raises:
            Misuse, ScheduleError: no rank, no such placement, or a file that is no valid schedule.
        """
        name = self.placement[0] if self.placement else "one-to-one"
        if not is_file(name):
            ranks, microbatches = _said(ranks, microbatches)
            if ranks < 1:
                raise Misuse(f"--ranks {ranks}: at least 1 is needed")
            return placements.named(name, ranks, self.stages), None, ranks, microbatches
        if self.stages is not None:
            raise Misuse(f"--stages {self.stages}: {name} says how many stages there are; leave --stages out")
        schedule = load(name)
        ps.check(schedule)
        if ranks not in (None, schedule.num_ranks):
            raise Misuse(f"--ranks {ranks}: {name} places its stages on {schedule.num_ranks}; give as many")
        num = schedule.num_microbatches if microbatches is None else microbatches
        if schedule.graph.needs and num != schedule.num_microbatches:
            raise Misuse(f"--microbatches {num}: {name} has ops for {schedule.num_microbatches}; give as many")
        return schedule.placement, schedule.stage_graph, schedule.num_ranks, num

    def found(self, given: costs_options.GivenCosts, placed: PlacedStages) -> ps.Plan:
        """The plan with one placement, timed over the links as they are. Ctrl-C ends the search with the best so far.

        Raises:
            Misuse, CostError, ScheduleError: values that do not go together, or limits within which nothing fits.
        """
        where, graph, ranks, microbatches = placed
        chosen = given.read(ranks, where, microbatches)
        links = searched = costs_options.read_links(self.links)
        if self.channels == BUFFERED:
            searched = _least_delays(links, chosen, graph)
        most, in_bytes = limits_of("--memory-limit", self.memory_limit, ranks)
        if in_bytes:
            given.require_weights(self.memory_limit, chosen)
        same = {name: getattr(self, name) for name in ("objective", "dispatch", "channels", "split", "recompute")}
        found = ps.plan(
            chosen,
            ranks,
            microbatches,
            searched,
            max_in_flight=_limit("--max-in-flight", self.max_in_flight),
            memory_limit=None if in_bytes else most,
            total_limit=most if in_bytes else None,
            time_limit=self.time,
            placement=where,
            offload=True if self.offload == "any" else _limit("--offload", self.offload),
            stages=graph,
            progress=_show_search if sys.stderr.isatty() else None,
            **same,
        )
        if searched == links:
            return found
        run = GivenRun(shlex.join(self.links), self.dispatch, self.memory_limit)
        timeline, *_ = simulated(found.schedule, given, run, {})
        value = measured(timeline, self.objective)
        bound = certain(found.lower_bound, value)
        return replace(found, makespan=timeline.makespan, value=value, lower_bound=bound, timeline=timeline)


def _least_delays(links: ps.Links, costs: ps.Costs, graph: StageGraph | None) -> ps.Links:
    """The least delay of a message over each link that does not change: that of the smallest one, which waits for no
    other.

    The smallest counts as one of no bytes where ops of your own send such messages, and where messages differ by
    microbatch.
    """
    smallest = 0.0 if graph is not None or costs.factors.message else min(costs.message_bytes[:-1], default=0.0)
    delays = {
        link: each.delay_of(smallest, 0.0, LinkQueue()).arrived if each.is_steady else each
        for link, each in links.conditions.items()
    }
    return ps.Links(delays, links.default)


def _said(ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """Both numbers; Misuse where one is missing."""
    if ranks is None or microbatches is None:
        raise Misuse("give --ranks and --microbatches, like --ranks 4 --microbatches 12, or a file as --placement")
    return ranks, microbatches


NUMBER = "Number of {}. [that of a schedule file as --placement]"


@app.command(short_help="Find the best schedule, with a proof of how good it is.")
@with_options(costs_options.GivenCosts, PlanSettings)
def plan(
    ranks: Annotated[int | None, typer.Option("--ranks", help=NUMBER.format("ranks"))] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", help=NUMBER.format("microbatches"))] = None,
    out: Out = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Find the best schedule within the limits. Ctrl-C ends the search with the best so far.

    With --placement all, or several, simulate every placement with many rules, list the shortest schedule of each,
    and draw the best. Costs are then those of a part, and nothing is proved.
    """
    given, settings = taken(costs_options.GivenCosts, options), taken(PlanSettings, options)
    if (space := settings.search_space) is not None:
        settings.require_for_search(given)
        search(*_said(ranks, microbatches), given, settings.links, settings.memory_limit, space, out, json)
        return
    where, _, ranks, microbatches = placed = settings.place(ranks, microbatches)
    found = settings.found(given, placed)
    show_progress("")
    if out is not None:
        found.save(out)
    assumed = given.assumed(ranks, where)
    costs = given.read(ranks, where, microbatches)
    unsized = costs_options.unsized_links(costs, costs_options.read_links(settings.links))
    untimed = untimed_kinds(found.schedule, costs)
    if json:
        counts = {"num_ranks": ranks, "num_microbatches": microbatches}
        rest = {"objective": settings.objective, "assumed": assumed, **counts, "dispatch": settings.dispatch}
        print_json({**_as_json(found), **rest, "untimed": untimed, "unsized": unsized, "out": out})
        return
    _show(found, settings.objective, assumed)
    if untimed:
        print(f"untimed      {untimed_words(untimed)}")
    if unsized:
        print(f"unsized      {costs_options.UNSIZED}")
    if out is not None:
        print(f"wrote {out}")


def _as_json(found: ps.Plan) -> dict[str, Any]:
    family = found.certificate
    names = ("makespan", "value", "lower_bound", "gap", "seconds", "how", "microbatch_order")
    allowed = ("backward", "microbatches", "recompute", "offload", "pairs", "order", "channel")
    return {
        **{name: getattr(found, name) for name in names},
        "certificate": {
            "placement": family.placement.pipelines,
            "shared": family.placement.shared,
            **{name: getattr(family, name) for name in allowed},
        },
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


def _show_search(now: Progress) -> None:
    """Shows on a terminal where the search stands."""
    show_progress(f"{now.seconds:.0f} s, {now.how}: {now.value:.6g} ms, gap {now.gap:.2%}")


def _limit(option: str, text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    values = numbers(option, text)
    return values[0] if len(values) == 1 else values
