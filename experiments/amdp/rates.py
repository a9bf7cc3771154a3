"""What AMDP's delay of one update costs by learning rate: its loss over the synchronous one's, at four rates.

    python -m experiments.amdp.rates        twenty minutes of one core; what was done before is kept

Figure 7's task. The synchronous loss is that of whole batches as one microbatch, which is the same mean and faster.

With Adam a mode of the loss begins to oscillate where its curvature (preconditioned) times the rate is above
2 (1 + b1) / (1 - b1), 38 at b1 = 0.9; where a share s of the gradient is one update late, above 1/s if that is less.
Training comes to that edge by itself (Cohen et al. 2022, arXiv 2207.14484), the sooner the higher the rate. In
windows of 4d microbatches s is a quarter on AMDP's first stages. So a delay costs most above the rate that is best
without it, and little where a low rate or a noisy gradient keeps training away from the edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.amdp import RESULTS
from experiments.amdp.figure7 import TASK
from experiments.amdp.learning import Method, Task, shown, train
from experiments.common.command import options
from experiments.common.results import Row, known, runs, save, table

KEPT = ("method", "peak", "final", "mismatch", "seconds", "curve")

RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def methods(peak: float, task: Task = TASK) -> tuple[Method, Method]:
    return Method("synchronous", peak=peak, samples=task.batch), Method("amdp", "amdp", peak=peak)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "validation loss by peak learning rate"
    by = {(row["method"], row["peak"]): row["final"] for row in rows}
    body = []
    for peak in dict.fromkeys(row["peak"] for row in rows):
        sync, amdp = by.get(("synchronous", peak)), by.get(("amdp", peak))
        over = "-" if sync is None or amdp is None else f"{amdp / sync - 1:+.2%}"
        body.append([f"{peak:g}", shown(sync), shown(amdp), over])
    yield from table(["rate", "synchronous", "amdp", "over it"], body)


def main() -> None:
    given = options(__doc__, RESULTS).parse_args()
    found, earlier = known(given.out, "rates"), runs(given.out, "rates")
    for peak in RATES:
        for method in methods(peak):
            if not any((row["method"], row["peak"]) == (method.name, peak) for row in found):
                row = train(method, TASK, print)
                found.append(
                    {name: row[name] for name in ("method", "peak", "final", "mismatch", "seconds", "curve")}
                )
                save(given.out, "rates", found, seeds=[TASK.seed], earlier=earlier)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
