"""What `max_mismatch` 0 and 1 each buy, with the best schedule there is for the same batch, ranks and memory.

    python -m experiments.amdp.mismatch                            an hour and a half of one core
    python -m experiments.amdp.mismatch --costs GPT --ranks 16     some of it; what is there already is gone on with

d ranks, an update gathers n microbatches. Numbers are the share of the time that ranks are busy amid many updates;
no schedule here stops all ranks at an update: a stage goes on when its own is done
(`ps.passes.repeat_windows`). Costs:

    even            F = I = W on all stages, B = I + W
    I over W        F 1, I 1.2, W 0.8: the attention's scores have no weights
    GPT             AMDP's GPT-style model on its device, blocks dealt out evenly, the head on top of the last stage
    GPT, balanced   the same, the costliest stage as cheap as whole blocks allow

With those of the GPT, links, updates and taking parameters over take their time. A schedule is within the memory if
no rank holds more than amdp's fullest: weights and gradients of all its copies, the optimizer's state of stages it
owns, activations at the peak. The even costs' weights weigh as much to their activations as the GPT's.

    whole, split    the best synchronous schedule with whole or with split backwards, within the memory: of the
                    library's and of what `ps.plan` finds in some seconds on five placements; by frozen order and
                    by readiness (dynamic dispatch) under all the memory there is
    mismatch 0, 1   amdp, whose backwards are whole; the best of its orders for several times of F and B
    2bw             1F1B that is never flushed: also a mismatch of at most 1, one copy and two versions of weights

That a backward can be split at no cost is an assumption: I and W together take as long as B.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from experiments.amdp import RESULTS
from experiments.common.command import options
from experiments.common.results import Row, known, runs, save, table
from penstock.cost.presets import CostPreset, find_preset
from penstock.draw.chart import Axis, Bars, Figure, bar_chart, save_chart
from penstock.simulation.lowered import frozen_caps
from penstock.simulation.memory_footprint import count_buffers
from penstock.simulation.runner import Runner
from penstock.simulation.transport import as_transport

DEPTHS = (4, 8, 16)
PER_RANK = (1, 2, 4, 8)
"""Microbatches of an update, by ranks."""

STEADY = 2
"""Windows over which an order is timed that repeats itself every window."""
WITHIN = 1 + 1e-6
"""Times amdp's memory, that counts as within it."""
CLOSE = 0.001
"""Difference of shares that counts as none."""

GPT = find_preset("amdp-gpt")

LIBRARY: Sequence[tuple[str, Mapping[str, str]]] = (
    *((name, {}) for name in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half")),
    *((name, {}) for name in ("dualpipe", "dualpipe-v")),
    *((name, {"backward": "whole"}) for name in ("chimera", "hanayo", "bitpipe", "vchimera")),
    *((name, {"backward": "split"}) for name in ("chimera", "hanayo", "bitpipe", "vchimera")),
)
"""All synchronous ones but those that hold every microbatch (gpipe, looped-bfs), one that is all about memory (v-min)
and those of several towers."""

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
    links: ps.Links | None = None


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

    def num_windows(self, steady: int) -> int:
        """Of a run that has so many besides."""
        return 2 * self.edge + steady

    def costs(self, num_stages: int) -> ps.Costs:
        return self.costing.of(self.num_ranks, num_stages)


Times = NDArray[np.float64]


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
        return {
            "way": self._name,
            "dispatch": dispatch,
            "busy": self._busy(np.array(ran.start_time), np.array(ran.end_time)),
            "memory": max(held(self._schedule, costs, ran.peaks)),
        }

    def _busy(self, starts: Times, ends: Times) -> float:
        """The share of the time between two updates, many others between them, in which ranks run F, B, I or W."""
        windows, ops, edge = self._schedule.windows, self._order.graph.ops, self._cell.edge
        assert windows is not None
        updates = [windows.update_of(op.microbatch)[0] if op.kind == "U" else -1 for op in ops]
        since, until = (
            max(end for end, update in zip(ends, updates, strict=True) if update == which)
            for which in (edge - 1, windows.num_updates - 1 - edge)
        )
        within = np.minimum(ends, until) - np.maximum(starts, since)
        work = within[(within > 0) & (np.array(updates) < 0)].sum()
        return float(work / (self._cell.num_ranks * (until - since)))


def held(schedule: ps.Schedule, costs: ps.Costs, peaks: Sequence[float]) -> list[float]:
    """Of each rank: state of its stages and the peak of its activations, in the unit of the costs."""
    return [one + peak for one, peak in zip(states(schedule, costs), peaks, strict=True)]


def states(schedule: ps.Schedule, costs: ps.Costs) -> list[float]:
    """Of each rank: weights, their versions and gradients of its copies, the optimizer's state of stages it owns.

    As `ps.footprint` has it, which also simulates the messages under way: they are left out here.
    """
    versions, buffers = ps.schedule.count_versions(schedule), count_buffers(schedule)
    found = [0.0] * schedule.num_ranks
    for pipeline, ranks in enumerate(schedule.placement.pipelines):
        for stage, rank in enumerate(ranks):
            found[rank] += versions[stage, pipeline] * costs.weight_bytes[stage]
            found[rank] += buffers[stage, pipeline] * costs.gradient_bytes[stage]
            found[rank] += costs.optimizer_bytes[stage] if pipeline == 0 else 0.0
    return found


# The ways.


def amdp(cell: Cell, max_mismatch: int) -> Row:
    """AMDP; of the orders for several guesses at the times of F and B the one with which ranks are busiest."""
    # An order is a matter of time, and repeats itself only after a while.
    num = cell.num_windows(max(3, 16 * cell.num_ranks // cell.window)) * cell.window
    options = {"window": cell.window, "max_mismatch": max_mismatch}
    orders = (ps.build("amdp", cell.num_ranks, num, **times, **options) for times in _guesses(cell))
    return max((Timed(cell, "amdp", order).row() for order in orders), key=lambda row: row["busy"])


def _guesses(cell: Cell) -> list[dict[str, Any]]:
    """The stages' own times, and stages taken to be alike."""
    costs = cell.costs(cell.num_ranks)
    mean = sum(costs.f) / cell.num_ranks
    alike = (1.5, 1.9, sum(costs.b) / sum(costs.f), 2.1, 2.5)
    return [{"f": costs.f, "b": costs.b}, *({"f": mean, "b": ratio * mean} for ratio in alike)]


def two_buffers(cell: Cell) -> Row:
    num = cell.num_windows(STEADY) * cell.window
    return Timed(cell, "2bw", ps.build("pipedream-2bw", cell.num_ranks, num, window=cell.window)).row()


def synchronous(cell: Cell, memory: float) -> Iterator[Row]:
    """All of the library's, in each way; dispatch may use `memory`."""
    for name, given in LIBRARY:
        try:
            window = ps.build(name, cell.num_ranks, cell.window, **given)
            costs = cell.costs(window.num_stages)
        except (ps.ScheduleError, ps.CostError):
            continue  # it needs other counts, or more stages than the model has layers
        yield from _each_way(cell, name, window, costs, memory)


def planned(cell: Cell, memory: float, seconds: float) -> Iterator[Row]:
    """What `ps.plan` finds for one window within the memory, repeated."""
    for (name, placement), split in product(PLACEMENTS.items(), (True, False)):
        laid = placement(cell.num_ranks)
        try:
            costs = cell.costs(laid.num_stages)
            caps = _room(ps.Schedule("bare", laid, ((),) * cell.num_ranks, ()), costs, memory)
            plan = ps.plan(
                costs,
                cell.num_ranks,
                cell.window,
                memory_limit=caps,
                placement=laid,
                objective="span",
                split=split,
                time_limit=seconds,
            )
        except (ps.ScheduleError, ps.CostError):
            continue  # the memory holds not even one microbatch, or the model has fewer layers than stages
        yield from _each_way(cell, f"plan, {name}", plan.schedule, costs, memory)


def _each_way(cell: Cell, name: str, window: ps.Schedule, costs: ps.Costs, memory: float) -> Iterator[Row]:
    """By the order given, and by readiness under all the memory, or under its own peaks where these are higher."""
    kind = {"kind": "split" if window.splits_backward() else "whole"}
    timed = Timed(cell, name, ps.passes.repeat_windows(window, cell.num_windows(STEADY)))
    yield timed.row() | kind
    room = _room(window, costs, memory)
    yield timed.row("dynamic", [max(pair) for pair in zip(room, timed.own_peaks, strict=True)]) | kind


def _room(schedule: ps.Schedule, costs: ps.Costs, memory: float) -> list[float]:
    """What is left of the memory for activations on each rank."""
    return [memory - state for state in states(schedule, costs)]


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
    found = [
        one | {"kind": "mismatch 1"},
        amdp(cell, 0) | {"kind": "mismatch 0"},
        two_buffers(cell) | {"kind": "2bw"},
    ]
    found += synchronous(cell, memory)
    found += planned(cell, memory, search) if search else ()
    for row in found:
        yield keys | row | {"over_memory": row["memory"] / memory}


# What comes of it.

Found = dict[str, Row | None]
"""The best row of a cell by kind; "any memory" is that of the synchronous ones without a limit."""

KINDS = ("whole", "split", "mismatch 0", "mismatch 1", "2bw", "any memory")


def best(rows: Sequence[Row]) -> Found:
    """Of the rows of one cell."""

    def most(*kinds: str, limit: float = math.inf) -> Row | None:
        fits = [row for row in rows if row["kind"] in kinds and row["over_memory"] <= limit]
        return max(fits, key=lambda row: (round(row["busy"], 3), -row["memory"]), default=None)

    return {
        "whole": most("whole", limit=WITHIN),
        "split": most("split", limit=WITHIN),
        **{kind: most(kind) for kind in ("mismatch 0", "mismatch 1", "2bw")},
        "any memory": most("whole", "split"),
    }


def kept(rows: Iterable[Row]) -> list[Row]:
    """The rows of one cell that are the best of a kind: a tenth of all, and what tables and charts show."""
    found = list(rows)
    chosen = best(found).values()
    return [row for row in found if any(row is each for each in chosen)]


def by_cell(rows: Sequence[Row]) -> dict[tuple[str, int, int], Found]:
    grouped: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["costs"], row["d"], row["n"]), []).append(row)
    return {key: best(mine) for key, mine in grouped.items()}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "share of the time that ranks are busy (peak memory of the fullest rank, as a share of amdp's)"
    found = by_cell(rows)
    for costs in dict.fromkeys(key[0] for key in found):
        yield f"\n{costs}"
        mine = {(d, n): cell for (name, d, n), cell in found.items() if name == costs}
        body = [[f"{d}, {n}", *(_share(cell[kind]) for kind in KINDS), _named(cell)] for (d, n), cell in mine.items()]
        yield from table(["d, n", *KINDS, "best synchronous"], body)
    yield ""
    for kind in ("whole", "split"):
        ties = [f"{costs} {d}, {n}" for (costs, d, n), cell in found.items() if reaches(cell, kind)]
        yield f"amdp (mismatch 1) is reached without mismatch, {kind} backwards, in {len(ties)} cells of {len(found)}"
        yield f"  {'; '.join(ties)}"


def _share(row: Row | None) -> str:
    return "-" if row is None else f"{row['busy']:.3f} ({row['over_memory']:.2f})"


def reaches(cell: Found, kind: str) -> bool:
    """Whether a synchronous schedule within the memory is as busy as amdp, to within a thousandth."""
    ours, amdp = cell[kind], cell["mismatch 1"]
    return ours is not None and amdp is not None and ours["busy"] >= amdp["busy"] - CLOSE


def _named(cell: Found) -> str:
    """The best synchronous one within the memory."""
    row = max((row for kind in ("whole", "split") if (row := cell[kind])), key=lambda row: row["busy"], default=None)
    return "-" if row is None else f"{row['way']}, {row['dispatch']}"


def chart(rows: Sequence[Row], costs: str = "GPT") -> Figure:
    found = {key: cell for key, cell in by_cell(rows).items() if key[0] == costs}
    shown = {
        "synchronous, whole B": "whole",
        "synchronous, I and W": "split",
        "amdp, mismatch 0": "mismatch 0",
        "amdp, mismatch 1": "mismatch 1",
        "2bw": "2bw",
    }
    return bar_chart(
        [f"{d}, {n}" for _, d, n in found],
        [
            Bars(name, [None if (row := cell[kind]) is None else row["busy"] for cell in found.values()])
            for name, kind in shown.items()
        ],
        title="What a mismatch of 0 and of 1 buy",
        note=f"{costs}: how busy d ranks are amid many updates of n microbatches each, within amdp's memory",
        y=Axis("busy", low=0.4, high=1.0),
    )


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--search", type=float, default=2.0, help="seconds for each plan")
    parser.add_argument("--again", action="store_true", help="those cells too that are there already")
    names = [each.name for each in COSTINGS]
    parser.add_argument("--costs", action="append", choices=names, help="only these; may be repeated")
    parser.add_argument("--ranks", action="append", type=int, choices=DEPTHS, help="only these; may be repeated")
    given = parser.parse_args()
    found, earlier = (each(given.out, "mismatch", not given.again) for each in (known, runs))
    done = {(row["costs"], row["d"], row["n"]) for row in found}
    costings = [each for each in COSTINGS if given.costs is None or each.name in given.costs]
    for cell in cells(costings, given.ranks or DEPTHS):
        if (cell.costing.name, cell.num_ranks, cell.window) in done:
            continue
        began = time.perf_counter()
        found += kept(rows(cell, given.search))
        save(given.out, "mismatch", found, earlier=earlier, search=given.search)
        print(
            f"({cell.costing.name}, {cell.num_ranks}, {cell.window}: {time.perf_counter() - began:.0f} s)", flush=True
        )
    print("\n".join(lines(found)))
    save_chart(chart(found), given.out / "mismatch.svg")


if __name__ == "__main__":
    main()
