"""Figure 15: weak scaling of GPT 5B with 1M words from 16 to 64 GPUs.

    python -m experiments.flexpipe.figure15             a minute, with the choices that figure12.py found
    python -m experiments.flexpipe.figure15 --show      what was found last

As the paper says: each method keeps what was best for it on 32 GPUs and scales dp with the GPUs. The batch grows with
them, so that a replica's work stays the same, and only rings of gradients grow and nodes are shared otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.command import options
from experiments.common.results import Row, draw, find, load, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.methods import METHODS
from experiments.flexpipe.setups import GPT_5B
from experiments.flexpipe.sweep import chosen, facts
from penstock.draw.chart import Axis, Figure, Line, line_chart

VOCABULARY = 1000
GPUS = (16, 32, 64)


def rows_of(figure12: Sequence[Row]) -> Iterator[Row]:
    for method in METHODS:
        row = find(figure12, vocabulary=VOCABULARY, method=method)
        for num_gpus in GPUS:
            yield {"method": method, "gpus": num_gpus, **facts(chosen(GPT_5B, row, num_gpus))}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "samples a second, in brackets FlexPipe as a multiple"
    body = []
    for method in METHODS:
        cells = []
        for num_gpus in GPUS:
            ours, its = (find(rows, method=name, gpus=num_gpus)["samples"] for name in ("FlexPipe", method))
            cells.append(f"{its:.1f} ({ours / its:.2f})")
        body.append([method, *cells])
    yield from table(["", *(f"{num} GPUs" for num in GPUS)], body)


def chart(rows: Sequence[Row]) -> Figure:
    return line_chart(
        [Line(method, GPUS, [find(rows, method=method, gpus=num)["samples"] for num in GPUS]) for method in METHODS],
        title="Figure 15: weak scaling of GPT 5B with 1000K words",
        note="4 samples a GPU; each method as it was best on 32 GPUs; simulated",
        x=Axis("GPUs", low=0.0),
        y=Axis("samples/s", low=0.0),
        comment="made by: python -m experiments.flexpipe.figure15",
    )


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    if not given.show:
        save(given.out, "figure15", list(rows_of(load(given.out, "figure12"))))
    rows = load(given.out, "figure15")
    print("\n".join(lines(rows)))
    draw(given.out, "figure15", chart(rows))


if __name__ == "__main__":
    main()
