"""What the paper compares, each as a schedule of one replica over its costs, with what comes after the last backward.

Megatron-LM     1F1B; embedding on the first stage, head on the last
balanced        the same with blocks dealt out so that the longest stage is shortest (not the paper's)
T-1F1B          1F1B between an embedding and a head that all ranks share
Tessel          the library's `mllm` on the same placement
FlexPipe        the best of the paper's grid of placements and priorities, gradients separated
ours            the best of a wider grid (`grid.py`), with ZeRO-1, gradients reduced while ranks compute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import penstock as ps
from experiments.flexpipe.grid import PAPER, WIDER, Grid
from experiments.flexpipe.setups import Setup
from penstock.cost.cut import partition
from penstock.passes import separate_gradients
from penstock.planning.programs import Found
from penstock.simulation import TimedOp

MEMORY = 80e9
TESSEL_RANKS = 8
"""Tessel's search fails from 16 ranks on (section 7.1, Table 5)."""


@dataclass(frozen=True)
class Run:
    """A schedule of every replica, and what an iteration takes besides.

    Attributes:
        method: a name of `METHODS`. placement: of the schedule, in words.
        source: the schedule, or what the search found, which is built and proved once it is asked for.
        costs: of its stages, whole backwards in them or split ones as the schedule has them.
        sharing: ranks that share head and embedding.
    """

    method: str
    setup: Setup
    source: ps.Schedule | Found
    costs: ps.Costs
    placement: str
    sharing: int

    @property
    def links(self) -> ps.Links:
        return self.setup.links

    @property
    def schedule(self) -> ps.Schedule:
        return self.source.schedule if isinstance(self.source, Found) else self.source

    @property
    def makespan(self) -> float:
        """Milliseconds from the first op to the last."""
        return self.source.makespan if isinstance(self.source, Found) else self.timeline.makespan

    @property
    def is_whole(self) -> bool:
        """Whether its backwards are."""
        if isinstance(self.source, Found):
            return not self.source.program.split
        return all(op.kind != "W" for row in self.source.order for op in row)

    @cached_property
    def timeline(self) -> ps.Timeline:
        """By simulation."""
        return ps.simulate(self.schedule, self.costs, links=self.links)

    @cached_property
    def parameters(self) -> list[float]:
        return self.setup.parameters(self.schedule.placement, self.costs)

    @property
    def two_copies(self) -> bool:
        return self.schedule.placement.num_pipelines > 1

    def iteration_ms(self, timeline: ps.Timeline | None = None) -> float:
        """A timeline of the schedule (the simulated one where not given), the gradients' reduction, the step."""
        rows = (timeline or self.timeline).rows
        return max(self._reduced_ms(rank, row) for rank, row in enumerate(rows)) + self.step_ms

    @cached_property
    def step_ms(self) -> float:
        """Of the slowest rank, which all wait for."""
        return max(self.setup.step_ms(count, self.two_copies) for count in self.parameters)

    def _reduced_ms(self, rank: int, row: Sequence[TimedOp]) -> float:
        """When a rank has its gradients: after its last op; or stage by stage, each as soon as its own are whole."""
        if self.setup.updates == "all-reduce":
            return row[-1].end + self.setup.tail_ms(self.parameters[rank], self.two_copies)
        whole = {timed.op.stage: timed.end for timed in row if timed.op.kind in ("B", "W")}
        done = 0.0
        for stage, end in sorted(whole.items(), key=lambda item: item[1]):
            copies = sum(rank in self.schedule.placement.hosts(k, stage) for k in self._pipelines_of(stage))
            done = max(done, end) + self.setup.tail_ms(copies * self.costs.weight_bytes[stage] / 2, self.two_copies)
        return max(done, row[-1].end)

    def _pipelines_of(self, stage: int) -> range:
        placement = self.schedule.placement
        return range(1 if stage in dict(placement.shared) else placement.num_pipelines)

    def samples(self, iteration_ms: float | None = None) -> float:
        """Samples a second, of all replicas."""
        return 1e3 * self.setup.batch / (self.iteration_ms() if iteration_ms is None else iteration_ms)

    def peaks(self) -> list[float]:
        """Bytes that each rank needs at most."""
        work = self.setup.work_bytes(self.sharing)
        state = [self.setup.state_bytes(count) for count in self.parameters]
        return [held + own + work for held, own in zip(self.timeline.peak_activations, state, strict=True)]

    @property
    def fits(self) -> bool:
        return max(self.peaks()) <= MEMORY


def separated(run: Run) -> Run:
    """With its gradients separated (section 5.2, Figure 10), if that makes it shorter."""
    room = MEMORY - run.setup.work_bytes(run.sharing) - run.setup.state_bytes(max(run.parameters))
    schedule = separate_gradients(run.schedule, run.costs, run.links, room)
    return replace(run, source=schedule, placement=f"{run.placement}, separated")


Runs = Iterator[Run]
Method = Callable[[Setup, float], Runs]
"""The runs of a setup; those whose iterations take `below` ms or longer may be left out."""


def megatron(setup: Setup, below: float = inf) -> Runs:
    if setup.fits(setup.pp):
        schedule = ps.build("1f1b", setup.pp, setup.num_microbatches)
        yield Run("Megatron-LM", setup, schedule, setup.ends_on_ranks(), "one-to-one", 1)


def balanced(setup: Setup, below: float = inf) -> Runs:
    """1F1B whose costliest stage costs least, whatever blocks each gets; no ends shared. Not the paper's."""
    layers = [setup.embedding(), *[setup.block] * setup.model.num_blocks, setup.head()]
    stages = partition([layer.f + layer.i + layer.w for layer in layers], setup.pp)
    costs = setup.costs([[layers[at] for at in stage] for stage in stages])
    schedule = ps.build("1f1b", setup.pp, setup.num_microbatches)
    yield Run("1F1B, cut for balance", setup, schedule, costs, "one-to-one", 1)


def t_1f1b(setup: Setup, below: float = inf) -> Runs:
    """One forward, one backward, between shared ends: rank r holds at most pp - r microbatches."""
    if setup.fits(setup.pp):
        costs = setup.ends_shared(setup.pp)
        rules = ps.Rules(max_in_flight={1 + rank: setup.pp - rank for rank in range(setup.pp)})
        placement = ps.placements.shared_ends(ps.placements.one_to_one(setup.pp))
        program = ps.Program(placement, setup.num_microbatches, rules, costs=costs, links=setup.links, name="t-1f1b")
        yield Run("T-1F1B", setup, program.build(), costs, "shared ends, one-to-one", setup.pp)


def tessel(setup: Setup, below: float = inf) -> Runs:
    if setup.fits(setup.pp) and setup.pp <= TESSEL_RANKS:
        schedule = ps.build("mllm", setup.pp, setup.num_microbatches)
        yield Run("Tessel", setup, schedule, setup.ends_shared(setup.pp), "shared ends, one-to-one", setup.pp)


def searched(method: str, grid: Grid) -> Method:
    """The best schedules of each of a grid's placements."""

    def runs(setup: Setup, below: float = inf) -> Runs:
        for name, placement in grid.placements(setup.pp, setup.model.num_blocks):
            costs = setup.ends_shared(placement.num_stages - 2)
            parameters = max(setup.parameters(placement, costs))
            room = MEMORY - setup.state_bytes(parameters) - setup.work_bytes(setup.pp)
            two_copies = placement.num_pipelines > 1
            after = setup.step_ms(parameters, two_copies)
            if setup.updates == "all-reduce":
                after += setup.tail_ms(parameters, two_copies)
            for found in grid.best(name, setup, room, below - after):
                yield Run(method, setup, found, costs, f"shared ends, {name}", setup.pp)

    return runs


OURS = "ours"
SEARCHED = ("FlexPipe", OURS)
METHODS: Mapping[str, Method] = {
    "Megatron-LM": megatron,
    "1F1B, cut for balance": balanced,
    "T-1F1B": t_1f1b,
    "Tessel": tessel,
    "FlexPipe": searched("FlexPipe", PAPER),
    OURS: searched(OURS, WIDER),
}
