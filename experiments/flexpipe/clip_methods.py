"""DistMM-Pipe and FlexPipe's Figure 9, as schedules of one replica of every tower, and the best layout of each.

DistMM-Pipe     1F1B in every tower, a gather every k microbatches that its ranks wait for (`ps.build("distmm")`)
FlexPipe        interleaved 1F1B for audio and video, 1F1B for text; gathers run while their ranks compute
ours            the same with split backwards, W where nothing else can run; fewer layouts are tried
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf

import penstock as ps
from experiments.flexpipe.clip import (
    BATCH,
    LAUNCH_MS,
    NUM_GPUS,
    TEXT,
    Layout,
    Share,
    Tower,
    costs,
    gather_ms,
    layouts,
    links,
    shares,
)
from experiments.flexpipe.methods import MEMORY
from penstock.dispatch.queues import Lister
from penstock.planning import BranchLayout, search_branches

DISTMM = "DistMM-Pipe"
STAGES_A_RANK = (1, 2, 3, 5)
"""What an interleaved tower may have; in the paper's Figure 9 they are 2."""

MOST_LAYOUTS = 300
"""That `ours` is tried with for each number of gathers: without bubbles to tell them apart, far more come near the
best."""


@dataclass(frozen=True)
class ClipRun:
    """A schedule of one replica of every tower, while the others do the same; or of all replicas.

    Attributes:
        layout: of the towers. parts: what the ranks are, tower by tower or replica by replica.
        num_gathers: of an iteration. stages: a rank, by part. split: whether backwards are.
    """

    method: str
    layout: Layout
    parts: Layout
    schedule: ps.Schedule
    costs: ps.Costs
    num_gathers: int
    stages: tuple[int, ...]
    split: bool = False

    @cached_property
    def links(self) -> ps.Links:
        return links(self.parts)

    @cached_property
    def timeline(self) -> ps.Timeline:
        """By simulation."""
        return ps.simulate(self.schedule, self.costs, links=self.links)

    def iteration_ms(self, timeline: ps.Timeline | None = None) -> float:
        """A timeline of the schedule (the simulated one where not given), then each rank's reduction and step."""
        rows = (timeline or self.timeline).rows
        tails = [share.tail_ms for share in self.parts for _ in range(share.pp)]
        return max(row[-1].end + tail for row, tail in zip(rows, tails, strict=True))

    def samples(self, iteration_ms: float | None = None) -> float:
        """Samples a second."""
        return 1e3 * BATCH / (self.iteration_ms() if iteration_ms is None else iteration_ms)

    def peaks(self) -> list[float]:
        """Bytes that each rank needs at most."""
        state = [share.state_bytes for share in self.parts for _ in range(share.pp)]
        return [held + own for held, own in zip(self.timeline.peak_activations, state, strict=True)]

    @property
    def fits(self) -> bool:
        return max(self.peaks()) <= MEMORY

    @property
    def group(self) -> int:
        """Samples that a gather brings together."""
        return BATCH // self.num_gathers

    def gather_share(self) -> float:
        """Of the iteration, what the last rank of the tower with most work spends in gathers and waiting for them."""
        heaviest = max(range(len(self.parts)), key=lambda at: self.parts[at].work_ms)
        rank = list(accumulate(share.pp for share in self.parts))[heaviest] - 1
        spent = sum(t.waited + t.end - t.start for t in self.timeline.rows[rank] if t.op.kind == "GATHER")
        return spent / self.iteration_ms()

    def whole(self) -> ClipRun:
        """The same on all GPUs, every replica with ranks of its own."""
        copies = [(part, v) for part, v in zip(self.layout, self.stages, strict=True) for _ in range(part.dp)]
        parts, stages = tuple(part for part, _ in copies), tuple(v for _, v in copies)
        if self.method == DISTMM:
            return _gathered(self.layout, parts, self.num_gathers)
        program = _program(self.layout, parts, stages, self.num_gathers, self.split)
        return replace(self, parts=parts, stages=stages, schedule=program.build(), costs=program.all_costs)


Runs = Iterator[ClipRun]


def distmm(layout: Layout, below: float = inf) -> Runs:
    """With every k that divides the microbatches, of which all towers have as many."""
    n = layout[0].num_microbatches
    if all(share.num_microbatches == n for share in layout):
        for num_gathers in _halves(n):
            yield _gathered(layout, layout, num_gathers)


def _gathered(layout: Layout, parts: Layout, num_gathers: int) -> ClipRun:
    ranks, n = [share.pp for share in parts], parts[0].num_microbatches
    stages = (1,) * len(parts)
    times = costs(parts, stages).with_other({("GATHER", ranks[0] - 1): gather_ms(layout)})
    schedule = ps.build("distmm", sum(ranks), n, branches=ranks, gather_every=n // num_gathers)
    return ClipRun(DISTMM, layout, parts, schedule, times, num_gathers, stages)


def flexpipe(layout: Layout, below: float = inf) -> Runs:
    return _mixed("FlexPipe", layout, below, split=False)


def ours(layout: Layout, below: float = inf) -> Runs:
    return _mixed("ours", layout, below, split=True)


def _mixed(method: str, layout: Layout, below: float, split: bool) -> Runs:
    """With every number of stages a rank that divides a tower's blocks, and every number of gathers.

    Those that take `below` ms or longer, before their gradients are reduced, are left out.
    """
    for stages in product(*map(_stages_a_rank, layout)):
        if max(least_ms(share, v, split) for share, v in zip(layout, stages, strict=True)) >= below:
            continue
        for num_gathers in _halves(min(share.num_microbatches for share in layout)):
            program = _program(layout, layout, stages, num_gathers, split)
            graph = program.queues()
            if Lister(graph, compile=True).list_by_rules(program.tables(graph)).makespan < below:
                schedule = program.build()
                yield ClipRun(method, layout, layout, schedule, program.all_costs, num_gathers, stages, split)


def _program(layout: Layout, parts: Layout, stages: tuple[int, ...], num_gathers: int, split: bool) -> ps.Program:
    """The gather of the last stages of all parts, after each has run its share of a group's forwards."""
    branches = {
        f"{share.tower.name}-{at}": ps.Branch(*_laid(share, v, share.num_microbatches // num_gathers))
        for at, (share, v) in enumerate(zip(parts, stages, strict=True))
    }
    groups = {name: share.num_microbatches // num_gathers for name, share in zip(branches, parts, strict=True)}
    gather = _gather(groups, gather_ms(layout))
    return ps.Program.of_branches(
        branches, split=split, costs=costs(parts, stages), links=links(parts), ops=[gather], name="mixed"
    )


def _gather(groups: Mapping[str, int], time: float) -> ps.NewOp:
    """Over the last ranks of branches, each after so many of its forwards and before as many backwards."""
    ends = {(name, -1): group for name, group in groups.items()}
    return ps.NewOp(
        "GATHER",
        next(iter(ends)),
        after={("F", end): group for end, group in ends.items()},
        before={("B", end): group for end, group in ends.items()},
        on=tuple(ends),
        time=time,
        asynchronous=True,
    )


def _laid(share: Share, v: int, group: int) -> tuple[ps.Placement, int, ps.Rules]:
    """1F1B, or interleaved 1F1B of v stages a rank; `group` forwards of the last stage end before backwards begin."""
    p, n = share.pp, share.num_microbatches
    if v == 1:
        rules = ps.Rules(max_in_flight=[min(n, p - r + group - 1) for r in range(p)])
        return ps.placements.one_to_one(p), n, rules
    warmup = [min(v * n, 2 * (p - 1 - r) + (v - 1) * p + group - 1) for r in range(p)]
    rules = ps.Rules("interleaved", forward=ps.breadth_first(p), backward=ps.depth_first(p), warmup=warmup)
    return ps.placements.circular(p, v * p), n, rules


CLIP_METHODS: Mapping[str, Callable[[Layout, float], Runs]] = {DISTMM: distmm, "FlexPipe": flexpipe, "ours": ours}


@dataclass(frozen=True)
class ClipLayout(BranchLayout):
    """A tower's share with so many stages a rank, as the product's search takes it."""

    share: Share = field(kw_only=True)
    stages: int = field(kw_only=True)


def best_run(
    method: str,
    towers: Sequence[Tower],
    launch_ms: float = LAUNCH_MS,
    most_group: int = BATCH,
    also: Sequence[Layout] = (),
    most_layouts: int | None = None,
) -> ClipRun:
    """The fastest of all layouts that fits in memory, with `most_group` samples in a gather at the most.

    Layouts go by what they take at least, `also` before them. DistMM-Pipe's schedule has a name and is built; the
    others' are programs, which `penstock.planning.search_branches` finds, among no more than `most_layouts`.
    """
    best: ClipRun | None = None
    below = inf
    trials: Sequence[Layout] = also
    if method == DISTMM:
        trials = sorted((each for each in layouts(tuple(towers), launch_ms)), key=_least_one_stage)
    for layout in trials:
        if method == DISTMM and _least_one_stage(layout) >= below:
            break
        for run in CLIP_METHODS[method](layout, below):
            if run.group <= most_group and run.iteration_ms() < below and run.fits:
                best, below = run, run.iteration_ms()
    if method != DISTMM:
        counts = [count for count in reversed(list(_halves(BATCH))) if BATCH // count <= most_group]
        for num_gathers in counts:
            found = _search(method, towers, launch_ms, num_gathers, below, most_layouts)
            if found is not None:
                best, below = found, found.iteration_ms()
    assert best is not None
    return best


def _search(
    method: str, towers: Sequence[Tower], launch_ms: float, num_gathers: int, below: float, most: int | None
) -> ClipRun | None:
    """By the product's search, with so many gathers in an iteration."""
    split = method == "ours"
    found = search_branches(
        {tower.name: list(_ways(tower, launch_ms, num_gathers)) for tower in towers},
        NUM_GPUS,
        split=split,
        ops=lambda chosen: [_gather_of(chosen, num_gathers)],
        memory_limit=MEMORY,
        below=below,
        most_tried=most,
    )
    if found is None:
        return None
    ways = [way for way in found.ways.values() if isinstance(way, ClipLayout)]
    layout, stages = tuple(way.share for way in ways), tuple(way.stages for way in ways)
    return ClipRun(method, layout, layout, found.schedule, found.program.all_costs, num_gathers, stages, split)


def _ways(tower: Tower, launch_ms: float, num_gathers: int) -> Iterator[ClipLayout]:
    for num_gpus in range(2, NUM_GPUS, 2):
        for share in shares(tower, num_gpus, launch_ms):
            if share.num_microbatches < num_gathers:
                continue
            own = share.mesh.links(share.shape.message_bytes)
            for v in _stages_a_rank(share):
                branch = ps.Branch(*_laid(share, v, share.num_microbatches // num_gathers))
                yield ClipLayout(
                    branch,
                    costs((share,), (v,)),
                    num_gpus,
                    own,
                    share.tail_ms,
                    share.state_bytes,
                    share=share,
                    stages=v,
                )


def _gather_of(chosen: Mapping[str, BranchLayout], num_gathers: int) -> ps.NewOp:
    layout = tuple(way.share for way in chosen.values() if isinstance(way, ClipLayout))
    groups = {name: way.branch.num_microbatches // num_gathers for name, way in chosen.items()}
    return _gather(groups, gather_ms(layout))


def _least_one_stage(layout: Layout) -> float:
    return max(least_ms(share, 1, False) for share in layout)


def least_ms(share: Share, v: int, split: bool) -> float:
    """No schedule of a tower with v stages a rank takes less: its last rank waits for a first forward, does its work,
    and where backwards are whole, first ranks wait for the last one."""
    f, i, w = share.block_ms
    chain = f if split else f + i + w
    return share.work_ms + (share.pp - 1) * chain * share.tower.num_blocks / (share.pp * v)


def _stages_a_rank(share: Share) -> list[int]:
    choices = (1,) if share.tower.name == TEXT.name else STAGES_A_RANK
    return [v for v in choices if share.tower.num_blocks % (v * share.pp) == 0]


def _halves(most: int) -> Iterator[int]:
    """A power of two, and all below it."""
    while most:
        yield most
        most //= 2
