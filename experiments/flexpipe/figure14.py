"""Figure 14: where an iteration goes at 1M words, in computing and in waiting.

    python -m experiments.flexpipe.figure14     a second, from what figure12.py and figure13.py found

Averages over ranks. Waiting is what a device stands idle for others or for messages; all-reduces of shared stages
count as computing, as the ops they are part of do. The reduction of gradients and the step come after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.common.command import options
from experiments.common.results import Row, draw, find, load, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.methods import METHODS
from penstock.draw.chart import Axis, Bars, Figure, stacked_chart

VOCABULARY = 1000
SOURCES = {"5B": "figure12", "16.1B": "figure13"}
PARTS = ("computing", "waiting", "gradients", "step")


def parts_of(row: Row) -> Mapping[str, float]:
    """Milliseconds of an iteration, on average over ranks."""
    return dict(
        zip(
            PARTS,
            (row["busy_ms"], row["makespan_ms"] - row["busy_ms"], row["reduce_ms"], row["step_ms"]),
            strict=True,
        )
    )


def chosen(folder: Path) -> Iterator[tuple[str, Row]]:
    """Names and rows, of those that fit in memory."""
    for model, source in SOURCES.items():
        rows = load(folder, source)
        for method in METHODS:
            row = find(rows, vocabulary=VOCABULARY, method=method)
            if row["samples"] is not None:
                yield f"{model}, {method}", row


def lines(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    yield f"ms of an iteration at {VOCABULARY}K words, average over ranks"
    body = [
        [name, *(f"{ms:.0f}" for ms in parts_of(row).values()), f"{row['iteration_ms']:.0f}", str(row["mbs"])]
        for name, row in rows
    ]
    yield from table(["", *PARTS, "iteration", "mbs"], body)


def chart(rows: Sequence[tuple[str, Row]]) -> Figure:
    return stacked_chart(
        [name for name, _ in rows],
        [Bars(part, [parts_of(row)[part] for _, row in rows]) for part in PARTS],
        title=f"Figure 14: where an iteration goes, {VOCABULARY}K words, 32 GPUs",
        note="average over ranks; simulated; what is missing does not fit in memory",
        x=Axis("ms"),
        show="{:.0f}".format,
        comment="made by: python -m experiments.flexpipe.figure14",
    )


def main() -> None:
    given = options(__doc__, RESULTS).parse_args()
    rows = list(chosen(given.out))
    print("\n".join(lines(rows)))
    draw(given.out, "figure14", chart(rows))


if __name__ == "__main__":
    main()
