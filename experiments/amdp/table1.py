"""Table 1: bubbles, weights, activations, mismatch and versions of all methods, by simulation.

    python -m experiments.amdp.table1               half a minute
    python -m experiments.amdp.table1 --show        what was found last

F takes 1 and B 2 units of time on every stage (I and W 1 each where a schedule splits it), updates and messages
nothing. A stage's weights weigh 1, what a forward keeps on it 1, freed when B or W ends. `n` microbatches an update;
PipeDream, SpecTrain and vNAG update after each. A synchronous method is one drained window, an asynchronous one a run
of a thousand microbatches, filling and draining included.

The paper's formulas stand beside, and what they should say where they do not hold:

    DAPPLE     activations    min(d, n), not n
    Inter-1F1B activations    (3d - 1) / 2, as the paper's section 4.2 has it (1.5 and 3.5 more than others), not d
    Chimera    bubble         at B = 2F 2(d-2) / (3n + 2(d-2)) with n = d; the formula is for B = F. Longer windows
                              are blocks of d on end, which at B = 2F do not join without gaps
    ZB-V       activations    d; 2d - 1 is ZB-H2's
               bubble         none from a rank's first op to its last where n is 2d - 1 at least; of the whole step
                              (d-1) / (6n + d-1)
    XPipe      weights        2, where predictions do not overwrite weights that the optimizer has besides
    AMDP       weights        d/2: a rank hosts a stage of each pipeline
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import penstock as ps
from experiments.amdp import RESULTS
from experiments.common.command import options
from experiments.common.results import Row, find, load, save, table

SIZES = ((4, 4), (4, 16), (8, 8), (8, 32))
"""(d, n)."""
LONG = 1024
"""Microbatches of an asynchronous run."""

Formula = Callable[[int, int], float]


def _none(d: int, n: int) -> float:
    return 0.0


def _one(d: int, n: int) -> float:
    return 1.0


def _depth(d: int, n: int) -> float:
    return float(d)


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: in the paper. window: microbatches an update gathers, 0 for n; None for a synchronous one.
        bubble, weights, activations: the paper's formulas of d and n, at most over ranks.
        right: corrected formulas, by the same names; not a number where there is none for that n.
    """

    name: str
    window: int | None
    bubble: Formula
    weights: Formula
    activations: Formula
    right: Mapping[str, Formula]

    def schedule(self, method: str, d: int, n: int) -> ps.Schedule:
        if self.window is None:
            return ps.build(method, d, n)
        return ps.build(method, d, LONG, window=self.window or n)


METHODS: Mapping[str, Method] = {
    "1f1b": Method(
        "DAPPLE",
        None,
        lambda d, n: (d - 1) / (n + d - 1),
        _one,
        lambda d, n: n,
        {"activations": lambda d, n: min(d, n)},
    ),
    "interleaved-1f1b": Method(
        "Inter-1F1B",
        None,
        lambda d, n: (d - 1) / (2 * n + d - 1),
        _one,
        _depth,
        {"activations": lambda d, n: min((3 * d - 1) / 2, n)},
    ),
    "chimera": Method(
        "Chimera",
        None,
        lambda d, n: (d - 2) / (2 * n + d - 2),
        lambda d, n: 2.0,
        _depth,
        {"bubble": lambda d, n: 2 * (d - 2) / (3 * n + 2 * (d - 2)) if n == d else float("nan")},
    ),
    "zb-v": Method(
        "ZB-V",
        None,
        _none,
        _one,
        lambda d, n: 2 * d - 1,
        {
            "bubble": lambda d, n: (d - 1) / (6 * n + d - 1) if n >= 2 * d - 1 else float("nan"),
            "activations": lambda d, n: min(d, n),
        },
    ),
    "pipedream": Method("PipeDream", 1, _none, _depth, _depth, {}),
    "pipedream-2bw": Method("PipeDream-2BW", 0, _none, lambda d, n: 2.0, _depth, {}),
    "xpipe": Method("XPipe", 0, _none, _one, _depth, {"weights": lambda d, n: 2.0}),
    "spectrain": Method("SpecTrain", 1, _none, lambda d, n: float("nan"), _depth, {}),
    "vnag": Method("vNAG", 1, _none, _depth, _depth, {}),
    "amdp": Method("AMDP", 0, _none, _one, _depth, {"weights": lambda d, n: d / 2}),
}
"""SpecTrain is not in the paper's table; its activations are those of all in PipeDream's order."""

COLUMNS = ("bubble", "weights", "activations")


def rows(sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Row]:
    """A row for each size and method."""
    for d, n in sizes:
        for name, method in METHODS.items():
            schedule = method.schedule(name, d, n)
            costs = unit_costs(schedule)
            held = ps.footprint(schedule, costs).ranks
            ran = ps.simulate(schedule, costs)
            weights = [rank.weights + rank.versions for rank in held]
            activations = [rank.activations for rank in held]
            yield {
                "method": name,
                "d": d,
                "n": n,
                "bubble": ran.bubble_ratio,
                "bubble_of_span": 1 - sum(ran.busy) / (d * ran.span),
                "weights": max(weights),
                "least_weights": min(weights),
                "gradients": max(rank.gradients for rank in held),
                "activations": max(activations),
                "least_activations": min(activations),
                "mismatch": max(ps.schedule.count_mismatch(schedule).values()),
                "versions": max(ps.schedule.count_versions(schedule).values()),
                **{f"paper_{column}": getattr(method, column)(d, n) for column in COLUMNS},
                **{f"right_{column}": formula(d, n) for column, formula in method.right.items()},
            }


def unit_costs(schedule: ps.Schedule) -> ps.Costs:
    """What makes all stages of a rank, in one copy, take 1 for F, 2 for B, 1 for weights and 1 for activations."""
    stages = schedule.num_stages
    share = schedule.num_ranks / stages
    costs = ps.Costs.uniform(stages, f=share, i=share, w=share, activation=share, freed_by_input=0.0)
    return replace(costs, weight_bytes=[share] * stages)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "ours | the paper's formula [what it should say]; least..most over ranks; weights, activations: in stages"
    sizes = list(dict.fromkeys((row["d"], row["n"]) for row in rows))
    for d, n in sizes:
        yield ""
        body = []
        for name, method in METHODS.items():
            row = find(rows, method=name, d=d, n=n)
            body.append(
                [
                    method.name,
                    _beside(f"{row['bubble']:.1%}", row, "bubble", "{:.1%}".format),
                    _beside(_range(row, "weights"), row, "weights", "{:g}".format),
                    f"{row['gradients']:g}",
                    _beside(_range(row, "activations"), row, "activations", "{:g}".format),
                    str(row["mismatch"]),
                    str(row["versions"]),
                ]
            )
        yield from table(
            [f"d={d}, n={n}", "bubble", "weights", "gradients", "activations", "mismatch", "versions"], body
        )
    yield ""
    spans = ", ".join(f"{find(rows, method='zb-v', d=d, n=n)['bubble_of_span']:.1%} (d={d}, n={n})" for d, n in sizes)
    yield f"ZB-V from the first op of a rank to its last: {spans}"


def _range(row: Row, column: str) -> str:
    least, most = row[f"least_{column}"], row[column]
    return f"{most:g}" if least == most else f"{least:g}..{most:g}"


def _beside(ours: str, row: Row, column: str, show: Callable[[float], str]) -> str:
    paper, right = row[f"paper_{column}"], row.get(f"right_{column}")
    told = "-" if paper is None or paper != paper else show(paper)
    corrected = "" if right is None or right != right or right == paper else f" [{show(right)}]"
    return f"{ours} | {told}{corrected}"


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    if not given.show:
        began = time.perf_counter()
        save(given.out, "table1", list(rows()), seconds=time.perf_counter() - began, microbatches=LONG)
    print("\n".join(lines(load(given.out, "table1"))))


if __name__ == "__main__":
    main()
