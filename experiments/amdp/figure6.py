"""Figure 6: memory of each GPU under all methods, for both models on 4 and 8 GPUs.

    python -m experiments.amdp.figure6              about a minute; figure 8 comes from the same numbers
    python -m experiments.amdp.figure6 --show       what was found last

What is counted: see memory.py. Of numbers the paper gives none but these: Inter-1F1B's first GPU holds 1.5
microbatches (d = 4) and 3.5 (d = 8) more than others'. In words, AMDP is the most even, and its peak slightly above
PipeDream-2BW's and XPipe's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from experiments.amdp import RESULTS
from experiments.amdp.memory import DEPTHS, NAMES, PARTS, rows
from experiments.amdp.setups import MODELS
from experiments.common.command import options
from experiments.common.results import Row, find, load, save, table
from penstock.draw.chart import Axis, Bars, Figure, Level, bar_chart, save_chart

DEVICE = 80.0
"""GB."""


def lines(rows: Sequence[Row]) -> Iterator[str]:
    rows = [row for row in rows if row["zero"] or row["method"] == "chimera"]
    yield "GB a GPU: most, average, average / most; and what the fullest GPU holds"
    for model in MODELS:
        for d in DEPTHS:
            body = []
            for method, name in NAMES.items():
                row = find(rows, model=model, d=d, method=method)
                fullest = max(row["ranks"], key=sum)
                body.append(
                    [
                        name,
                        f"{row['peak']:.1f}",
                        f"{row['mean']:.1f}",
                        f"{row['balance']:.2f}",
                        *(f"{part:.1f}" for part in fullest),
                        f"{row['ktokens']:.1f}",
                    ]
                )
            yield ""
            yield from table([f"{model}, d={d}", "peak", "mean", "balance", *PARTS, "ktokens/s"], body)
    yield ""
    for model in MODELS:
        for d, paper in zip(DEPTHS, (1.5, 3.5), strict=True):
            yield _words(rows, model, d, paper)


def _words(rows: Sequence[Row], model: str, d: int, paper: float) -> str:
    found = {method: find(rows, model=model, d=d, method=method) for method in NAMES}
    more = (found["interleaved-1f1b"]["peak"] - found["1f1b"]["peak"]) / found["1f1b"]["activation"]
    times = {name: found[name]["peak"] / found["pipedream-2bw"]["peak"] for name in ("amdp", "amdp, fastest")}
    by_balance = sorted(found, key=lambda name: -found[name]["balance"])
    even = ", ".join(f"{NAMES[name]} {found[name]['balance']:.2f}" for name in by_balance)
    return (
        f"{model}, d={d}: Inter-1F1B's peak is {more:.1f} microbatches of a GPU above DAPPLE's (paper {paper}); "
        f"AMDP's is {times['amdp']:.2f}, fastest {times['amdp, fastest']:.2f} times 2BW's (paper: slightly above 1); "
        f"average / most: {even}"
    )


def chart(rows: Sequence[Row], model: str, d: int) -> Figure:
    shown = [
        row for row in rows if row["model"] == model and row["d"] == d and (row["zero"] or row["method"] == "chimera")
    ]
    hues = ("blue", "brick", "green", "amber", "purple", "grey", "navy", "blue")
    series = [
        Bars(f"GPU {rank}", [sum(find(shown, method=method)["ranks"][rank]) for method in NAMES], hue=hues[rank])
        for rank in range(d)
    ]
    return bar_chart(
        list(NAMES.values()),
        series,
        title=f"Figure 6: memory of each GPU, {model}-style model on {d}",
        note="simulated; weights, gradients, optimizer state, activations, messages",
        y=Axis("GB", low=0.0),
        levels=[Level(DEVICE, "the device's 80")],
        show="{:.0f}".format,
        width=1080,
        comment="made by: python -m experiments.amdp.figure6",
    )


def main() -> None:
    given = options(__doc__, RESULTS, show=True).parse_args()
    if not given.show:
        began = time.perf_counter()
        save(given.out, "figure6", list(rows()), parts=PARTS, seconds=time.perf_counter() - began)
    found = load(given.out, "figure6")
    print("\n".join(lines(found)))
    for model in MODELS:
        for d in DEPTHS:
            path = given.out / f"figure6-{model.lower()}-{d}.svg"
            save_chart(chart(found, model, d), path)
            print(f"chart: {path}")


if __name__ == "__main__":
    main()
