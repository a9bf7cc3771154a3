"""The learning rates of figure 7 and table 5: each optimizer's, tuned on the synchronous method alone.

    python -m experiments.amdp.tuning       five minutes

400 batches of 32 sequences at each rate, every run with its own warm-up and decay. Half the rate with the least
validation loss is taken for all methods with that optimizer: the best is best only where nothing is late. A batch is
one microbatch here, which is faster and the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from experiments.amdp import RESULTS
from experiments.amdp.learning import Method, Task, shown, train
from experiments.common.command import options
from experiments.common.results import Row, load, save, table

TASK = Task(num_batches=400, every=400, samples=32)
RATES = {
    "AdamW": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "SGD": (0.05, 0.1, 0.2, 0.4, 0.8),
    "NAdam": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
}


def rows(task: Task = TASK) -> Iterator[Row]:
    for optimizer, rates in RATES.items():
        for peak in rates:
            found = train(Method(optimizer, optimizer=optimizer, peak=peak), task)
            yield {name: found[name] for name in ("optimizer", "peak", "final", "seconds")}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "validation loss of the synchronous method by peak learning rate"
    yield from table(
        ["optimizer", "rate", "loss", ""],
        [
            [row["optimizer"], f"{row['peak']:g}", shown(row["final"]), "taken" if row is best(rows, row) else ""]
            for row in rows
        ],
    )


def best(rows: Sequence[Row], like: Row) -> Row:
    """The best row of the same optimizer."""
    return min(
        (row for row in rows if row["optimizer"] == like["optimizer"]), key=lambda row: row["final"] or math.inf
    )


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    found: list[Row] = []
    for row in () if given.show else rows():
        found.append(row)
        print(f"{row['optimizer']} {row['peak']:g}: {shown(row['final'])} ({row['seconds']:.0f} s)", flush=True)
        save(given.out, "tuning", found, seeds=[TASK.seed], batches=TASK.num_batches)
    print("\n".join(lines(load(given.out, "tuning"))))


if __name__ == "__main__":
    main()
