"""What `max_mismatch` 0 and 1 each buy, with the best schedule there is for the same batch, ranks and memory.

    python experiments/amdp/mismatch.py              a few minutes

d ranks, an update gathers n microbatches. Numbers are the share of the time that ranks are busy amid many updates;
no schedule here stops all ranks at an update: a stage goes on when its own is done (`ps.repeat_windows`). Costs:

    even            F = I = W on all stages, B = I + W
    I over W        F 1, I 1.2, W 0.8: the attention's scores have no weights
    GPT             AMDP's GPT-style model on its device, blocks dealt out evenly, the head on top of the last stage
    GPT, balanced   the same, the costliest stage as cheap as whole blocks allow

With those of the GPT, links, updates and taking parameters over take their time. A schedule is within the memory if
no rank holds more than amdp's fullest: weights and gradients of all its copies, the optimizer's state of stages it
owns, activations at the peak. The even costs' weights weigh as much to their activations as the GPT's.

    synchronous     the best of the library's, whole and split backwards, by frozen order, retimed, and dynamic
    planned         the best that `ps.plan` finds on four placements in some seconds, repeated, within the memory
    mismatch 0, 1   amdp; no forward or at most one update's forwards ahead of its backward
    2bw             1F1B that is never flushed: also a mismatch of at most 1, one copy and two versions of weights
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from results import RESULTS, Row, load, save, table

import penstock as ps
from penstock.cost.presets import CostPreset, find_preset
from penstock.draw.chart import Axis, Bars, Figure, bar_chart, save_chart
from penstock.simulate.memory import frozen_caps
from penstock.simulate.runner import Runner
from penstock.simulate.transport import as_transport

DEPTHS = (4, 8, 16)
PER_RANK = (1, 2, 4, 8)
"""Microbatches of an update, by ranks."""

WITHIN = 1 + 1e-6
"""Times amdp's memory, that counts as within it."""
CLOSE = 0.001
"""Difference of shares that counts as none."""

GPT = find_preset("amdp-gpt")

SPLIT = {"backward": "split"}
LIBRARY: Mapping[str, Mapping[str, str]] = {
    "1f1b": {},
    "interleaved-1f1b": {},
    "zb-h1": {},
    "zb-h2": {},
    "zb-v": {},
    "v-half": {},
    "chimera": SPLIT,
    "hanayo": SPLIT,
    "bitpipe": SPLIT,
    "vchimera": SPLIT,
    "dualpipe": {},
    "dualpipe-v": {},
}
"""All synchronous ones but those that hold every microbatch (gpipe, looped-bfs), one that is all about memory (v-min)
and those of several towers. Backwards are split where they can be, as that costs nothing here."""

PLACEMENTS: Mapping[str, Callable[[int], ps.Placement]] = {
    "one": ps.placements.one_to_one,
    "V": ps.placements.v_shape,
    "two ways": lambda d: ps.placements.bidirectional(ps.placements.one_to_one(d)),
    "Vs two ways": lambda d: ps.placements.bidirectional(ps.placements.v_shape(d)),
    "all ways": ps.placements.multi_directional,
}


@dataclass(frozen=True)
class Costing:
    """Costs of a model in any number of stages, and its links."""

    name: str
    of: Callable[[int, int], ps.Costs]
    links: ps.LinkConditions | None = None


def _uniform(i: float, w: float) -> Callable[[int, int], ps.Costs]:
    """Of d ranks and so many stages; a rank's share of the model takes F 1, I i, W w."""

    def costs(num_ranks: int, num_stages: int) -> ps.Costs:
        part = num_ranks / num_stages
        like = GPT.costs(num_ranks)
        unit = part / (sum(like.activation) / num_ranks)
        state = {
            name: [sum(getattr(like, name)) / num_ranks * unit] * num_stages
            for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        }
        even = ps.Costs.uniform(num_stages, part, i * part, w * part, activation=part)
        return replace(even, freed_by_input=like.freed_by_input, **state)

    return costs


def _preset(preset: CostPreset) -> Callable[[int, int], ps.Costs]:
    return lambda num_ranks, num_stages: preset.costs(num_stages)


COSTINGS = (
    Costing("even", _uniform(1.0, 1.0)),
    Costing("I over W", _uniform(1.2, 0.8)),
    Costing("GPT", _preset(GPT), GPT.links()),
    Costing("GPT, balanced", _preset(replace(GPT, split="balanced")), GPT.links()),
)


@dataclass(frozen=True)
class Cell:
    """A model, so many ranks, and the microbatches of an update."""

    costing: Costing
    num_ranks: int
    window: int

    @property
    def edge(self) -> int:
        """Windows at each end that are left out, while the pipelines fill and drain."""
        return max(1, -(-2 * self.num_ranks // self.window))

    @property
    def num_windows(self) -> int:
        """Of a run."""
        return 2 * self.edge + 3

    def costs(self, num_stages: int) -> ps.Costs:
        return self.costing.of(self.num_ranks, num_stages)


class Timed:
    """A schedule of many windows, lowered once, which can be run in several ways."""

    def __init__(self, cell: Cell, name: str, schedule: ps.Schedule) -> None:
        self._cell, self._name, self._schedule = cell, name, schedule
        self._costs = cell.costs(schedule.num_stages)
        self._runner = Runner(self._costs, compile=True)
        self._order = self._runner.order(schedule)

    @property
    def own_peaks(self) -> list[float]:
        """Most activations that each rank holds in the frozen order."""
        return frozen_caps(self._order.graph, self._order.change.tolist())

    def row(self, dispatch: str = "frozen", caps: Sequence[float] | None = None) -> Row:
        """How busy ranks are in a steady run, and what the fullest holds."""
        cell, costs = self._cell, self._costs
        ran = self._runner.run(
            self._order,
            cell.costing.links or ps.Links(),
            dispatch=dispatch,
            transport=as_transport("decoupled"),
            caps=caps,
        )
        work = cell.window * sum(f + b for f, b in zip(costs.f, costs.b, strict=True))
        return {
            "way": self._name,
            "dispatch": dispatch,
            "busy": work / (cell.num_ranks * self._period(ran.arrays["end_time"])),
            "memory": max(held(self._schedule, costs, ran.peaks)),
        }

    def _period(self, ends: Sequence[float]) -> float:
        """Milliseconds from one window's last update to the next's, amid many."""
        windows = self._schedule.windows
        assert windows is not None
        last = [0.0] * windows.num_updates
        for op, end in zip(self._order.graph.ops, ends, strict=True):
            if op.kind == "U":
                update, _ = windows.update_of(op.microbatch)
                last[update] = max(last[update], float(end))
        first, final = self._cell.edge - 1, windows.num_updates - 1 - self._cell.edge
        return (last[final] - last[first]) / (final - first)


def held(schedule: ps.Schedule, costs: ps.Costs, peaks: Sequence[float]) -> list[float]:
    """Of each rank: state of its stages and the peak of its activations, in the unit of the costs."""
    versions = 2 if schedule.updates is not None and schedule.updates.rule == "pipedream-2bw" else 1
    state = states(schedule.placement, schedule.num_ranks, costs, versions)
    return [one + peak for one, peak in zip(state, peaks, strict=True)]


def states(placement: ps.Placement, num_ranks: int, costs: ps.Costs, versions: int = 1) -> list[float]:
    """Of each rank: weights and gradients of its copies, the optimizer's state of stages whose owner it has."""
    found = [0.0] * num_ranks
    for pipeline, ranks in enumerate(placement.pipelines):
        for stage, rank in enumerate(ranks):
            found[rank] += versions * costs.weight_bytes[stage] + costs.gradient_bytes[stage]
            found[rank] += costs.optimizer_bytes[stage] if pipeline == 0 else 0.0
    return found


# The ways.


def amdp(cell: Cell, max_mismatch: int) -> Row:
    """AMDP; of a few ratios of B to F that shape its order, the one with which ranks are busiest."""
    costs, num = cell.costs(cell.num_ranks), cell.num_windows * cell.window
    ratios = (1.5, 1.9, sum(costs.b) / sum(costs.f), 2.1, 2.5)
    f, u = (sum(costs.duration(kind, s) for s in range(cell.num_ranks)) / cell.num_ranks for kind in "FU")
    options = {"window": cell.window, "f": f, "u": u, "max_mismatch": max_mismatch}
    orders = (ps.build("amdp", cell.num_ranks, num, b=ratio * f, **options) for ratio in ratios)
    return max((Timed(cell, "amdp", order).row() for order in orders), key=lambda row: row["busy"])


def two_buffers(cell: Cell) -> Row:
    num = cell.num_windows * cell.window
    return Timed(cell, "2bw", ps.build("pipedream-2bw", cell.num_ranks, num, window=cell.window)).row()


def synchronous(cell: Cell, memory: float) -> Iterator[Row]:
    """All of the library's, in each way; dispatch may use `memory`."""
    for name, options in LIBRARY.items():
        try:
            window = ps.build(name, cell.num_ranks, cell.window, **options)
            costs = cell.costs(window.num_stages)
        except (ps.ScheduleError, ps.CostError):
            continue  # it needs other counts, or more stages than the model has layers
        yield from _each_way(cell, name, window, costs, memory)


def planned(cell: Cell, memory: float, seconds: float) -> Iterator[Row]:
    """What `ps.plan` finds for one window within the memory, repeated."""
    for name, placement in PLACEMENTS.items():
        laid = placement(cell.num_ranks)
        try:
            costs = cell.costs(laid.num_stages)
            caps = _room(laid, cell, costs, memory)
            plan = ps.plan(
                costs,
                cell.num_ranks,
                cell.window,
                memory_limit=caps,
                placement=laid,
                objective="span",
                time_limit=seconds,
            )
        except (ps.ScheduleError, ps.CostError):
            continue  # the memory holds not even one microbatch
        yield from _each_way(cell, f"plan, {name}", plan.schedule, costs, memory)


def _each_way(cell: Cell, name: str, window: ps.Schedule, costs: ps.Costs, memory: float) -> Iterator[Row]:
    """By the order given, and by readiness under all the memory, or under its own peaks where these are higher."""
    timed = Timed(cell, name, ps.repeat_windows(window, cell.num_windows))
    yield timed.row()
    room = _room(window.placement, cell, costs, memory)
    yield timed.row("dynamic", [max(pair) for pair in zip(room, timed.own_peaks, strict=True)])


def _room(placement: ps.Placement, cell: Cell, costs: ps.Costs, memory: float) -> list[float]:
    """What is left of the memory for activations on each rank."""
    return [memory - state for state in states(placement, cell.num_ranks, costs)]


def cells(
    costings: Iterable[Costing] = COSTINGS, depths: Sequence[int] = DEPTHS, per_rank: Sequence[int] = PER_RANK
) -> list[Cell]:
    """The smaller ones first."""
    return [Cell(costing, depth, each * depth) for depth in depths for costing in costings for each in per_rank]


def rows(cell: Cell, search: float = 2.0) -> Iterator[Row]:
    """A row for each way; `search` seconds for each plan, none at 0."""
    keys = {"costs": cell.costing.name, "d": cell.num_ranks, "n": cell.window}
    one = amdp(cell, 1)
    memory = one["memory"]
    for kind, found in (
        ("mismatch 1", [one]),
        ("mismatch 0", [amdp(cell, 0)]),
        ("2bw", [two_buffers(cell)]),
        ("synchronous", synchronous(cell, memory)),
        ("planned", planned(cell, memory, search) if search else ()),
    ):
        for row in found:
            yield keys | {"kind": kind} | row | {"over_memory": row["memory"] / memory}


# What comes of it.

Found = dict[str, Row | None]
"""The best row of a cell by kind; "any memory" is that of the synchronous ones without a limit."""


def best(rows: Sequence[Row]) -> Found:
    """Of the rows of one cell."""

    def most(*kinds: str, limit: float = math.inf) -> Row | None:
        fits = [row for row in rows if row["kind"] in kinds and row["over_memory"] <= limit]
        return max(fits, key=lambda row: (round(row["busy"], 4), -row["memory"]), default=None)

    return {
        "synchronous": most("synchronous", limit=WITHIN),
        "planned": most("planned", limit=WITHIN),
        "any memory": most("synchronous", "planned"),
        **{kind: most(kind) for kind in ("mismatch 0", "mismatch 1", "2bw")},
    }


def by_cell(rows: Sequence[Row]) -> dict[tuple[str, int, int], Found]:
    grouped: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["costs"], row["d"], row["n"]), []).append(row)
    return {key: best(mine) for key, mine in grouped.items()}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "share of the time that ranks are busy (peak memory of the fullest rank, as a share of amdp's)"
    head = ["d, n", "synchronous", "planned", "mismatch 0", "mismatch 1", "2bw", "at any memory", "best synchronous"]
    found = by_cell(rows)
    for costs in dict.fromkeys(key[0] for key in found):
        yield f"\n{costs}"
        body = []
        for (name, d, n), cell in found.items():
            if name == costs:
                kinds = ("synchronous", "planned", "mismatch 0", "mismatch 1", "2bw", "any memory")
                body.append([f"{d}, {n}", *(_share(cell[kind]) for kind in kinds), verdict(cell)])
        yield from table(head, body)
    ties = [key for key, cell in found.items() if reaches(cell)]
    yield f"\n* without any mismatch, within its memory, amdp is reached in {len(ties)} of {len(found)} cells"


def _share(row: Row | None) -> str:
    return "-" if row is None else f"{row['busy']:.3f} ({row['over_memory']:.2f})"


def reaches(cell: Found) -> bool:
    """Whether a synchronous schedule within the memory is as busy as amdp, to within a thousandth."""
    amdp = cell["mismatch 1"]
    ours = [row for row in (cell["synchronous"], cell["planned"]) if row is not None]
    assert amdp is not None
    return any(row["busy"] >= amdp["busy"] - CLOSE for row in ours)


def verdict(cell: Found) -> str:
    """The best synchronous one, with a star where it reaches amdp."""
    ours = [row for row in (cell["synchronous"], cell["planned"]) if row is not None]
    if not ours:
        return "-"
    most = max(ours, key=lambda row: (round(row["busy"], 3), row["kind"] == "synchronous"))
    return f"{most['way']}, {most['dispatch']}{' *' if reaches(cell) else ''}"


def chart(rows: Sequence[Row], depth: int = 8) -> Figure:
    found = {key: cell for key, cell in by_cell(rows).items() if key[1] == depth}
    kinds = ("synchronous", "planned", "mismatch 0", "mismatch 1", "2bw")
    names = {"mismatch 0": "amdp, mismatch 0", "mismatch 1": "amdp, mismatch 1"}
    return bar_chart(
        [f"{costs}, n = {n}" for costs, _, n in found],
        [
            Bars(
                names.get(kind, kind),
                [None if (row := cell[kind]) is None else row["busy"] for cell in found.values()],
            )
            for kind in kinds
        ],
        title=f"What a mismatch of 0 and of 1 buy, {depth} ranks",
        note="share of the time that ranks are busy amid many updates of n microbatches, within amdp's memory",
        y=Axis("busy", low=0.5, high=1.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=float, default=2.0, help="seconds for each plan")
    parser.add_argument("--again", action="store_true", help="those cells too that are there already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw results and the chart")
    given = parser.parse_args()
    found: list[Row] = [] if given.again else load(given.out, "mismatch")["rows"]
    done = {(row["costs"], row["d"], row["n"]) for row in found}
    for cell in cells():
        if (cell.costing.name, cell.num_ranks, cell.window) in done:
            continue
        began = time.perf_counter()
        found += rows(cell, given.search)
        save(given.out, "mismatch", found, search=given.search)
        print(
            f"({cell.costing.name}, {cell.num_ranks}, {cell.window}: {time.perf_counter() - began:.0f} s)", flush=True
        )
    print("\n".join(lines(found)))
    save_chart(chart(found), given.out / "mismatch.svg")


if __name__ == "__main__":
    main()
