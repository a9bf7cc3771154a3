"""Figure 8: how much more memory AMDP takes without ZeRO, on average over GPUs.

    python -m experiments.amdp.figure8              a second, from what figure6.py found

Without ZeRO each of the d/2 copies of a stage has the optimizer's state, so a GPU holds d/2 stages' instead of one's.
The paper: 11.4% and 19.4% more (GPT, d = 4 and 8), 9.7% and 15.4% (BERT). What is added is counted exactly; the base
is mostly activations, and those depend on how far the order reads ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from experiments.amdp import RESULTS
from experiments.amdp.memory import PARTS, STEPPED_BYTES
from experiments.common.command import options
from experiments.common.results import Row, draw, find, load, table
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

PAPER: Mapping[tuple[str, int], float] = {
    ("GPT", 4): 0.114,
    ("GPT", 8): 0.194,
    ("BERT", 4): 0.097,
    ("BERT", 8): 0.154,
}
"""How much the average grows without ZeRO."""

ORDERS: Mapping[str, str] = {"amdp": "AMDP", "amdp, fastest": "AMDP, fastest order"}
WITHOUT_GRADIENTS = 12 / STEPPED_BYTES
"""Share of the optimizer's state without gradients in 32 bits."""


def rise(rows: Sequence[Row], model: str, d: int, method: str, share: float = 1.0) -> float:
    """How much the average grows without ZeRO; `share` of the optimizer's state counted."""
    means = []
    for zero in (True, False):
        ranks = find(rows, model=model, d=d, method=method, zero=zero)["ranks"]
        state = PARTS.index("optimizer")
        means.append(sum(sum(rank) - (1 - share) * rank[state] for rank in ranks) / len(ranks))
    return means[1] / means[0] - 1


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "average memory of a GPU (GB), and how much it grows without ZeRO"
    body = []
    for (model, d), paper in PAPER.items():
        for method, name in ORDERS.items():
            means = [find(rows, model=model, d=d, method=method, zero=zero)["mean"] for zero in (True, False)]
            body.append(
                [
                    f"{model}, d={d}, {name}",
                    *(f"{mean:.1f}" for mean in means),
                    f"{rise(rows, model, d, method):.1%}",
                    f"{rise(rows, model, d, method, WITHOUT_GRADIENTS):.1%}",
                    f"{paper:.1%}",
                ]
            )
    yield from table(["", "ZeRO", "without", "more", "without 32-bit gradients", "paper"], body)


def chart(rows: Sequence[Row]) -> Figure:
    series = [
        Bars(name, [100 * rise(rows, *key, method) for key in PAPER], paper=[100 * paper for paper in PAPER.values()])
        for method, name in ORDERS.items()
    ]
    return bar_chart(
        [f"{model}, d = {d}" for model, d in PAPER],
        series,
        title="Figure 8: memory that AMDP takes more without ZeRO, average over GPUs",
        y=Axis("%", low=0.0),
        show="{:.1f}".format,
        comment="made by: python -m experiments.amdp.figure8",
    )


def main() -> None:
    given = options(__doc__, RESULTS).parse_args()
    rows = load(given.out, "figure6")
    print("\n".join(lines(rows)))
    draw(given.out, "figure8", chart(rows))


if __name__ == "__main__":
    main()
