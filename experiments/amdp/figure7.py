"""Figure 7: validation loss by update and by time, every method on the same text.

    python -m experiments.amdp.figure7                       an hour of one core; methods done before are kept
    python -m experiments.amdp.figure7 --only amdp xpipe     these alone, again

A GPT of 8 blocks on 8 stages and the standard library's text as bytes: 1,000 batches of 32 sequences of 16 tokens, a
sequence a microbatch where an update gathers several. All methods see the same batches in the same order from the
same first weights, without clipping. Learning rates are half of each optimizer's best on the synchronous method
(`tuning.py`); `rates.py` says what others do. Where an update gathers one sequence they are divided by 32 (SGD's) or
its root (Adam's).

Pipelines drain every 50 batches, where the loss is measured on the newest weights. Seconds are those of the paper's
ranks, by simulation (`timing.py`): two cores can't be eight accelerators.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from experiments.amdp import RESULTS
from experiments.amdp.learning import Method, Task, by_method, shown, train
from experiments.amdp.setups import Setup
from experiments.amdp.timing import PAPER, batch_seconds
from experiments.common.command import options
from experiments.common.results import Row, facts, known, runs, save, table
from penstock.draw.chart import Axis, Figure, Hue, Line, line_chart, save_chart
from penstock.schedule import TENTATIVE

TASK = Task()
ADAM, SGD, NADAM = 2e-3, 0.05, 1e-3
"""Learning rates, half of the best that `tuning.py` found."""

Stroke = Literal["solid", "dashed", "dotted"]

SYNC, AMDP, WITHOUT, LATE = "synchronous", "amdp", "amdp, mismatch 0", "amdp, tentative"
WHOLE = TASK.batch
"""Samples of a microbatch that is a whole batch."""

METHODS = (
    Method(SYNC, "1f1b", peak=ADAM),
    Method(AMDP, "amdp", peak=ADAM),
    Method(WITHOUT, "amdp", peak=ADAM, options={"max_mismatch": 0}),
    Method("amdp, predicting", "amdp", peak=ADAM, rule="xpipe"),
    Method(LATE, "amdp", peak=ADAM, rule=TENTATIVE),
    Method("pipedream-2bw", "pipedream-2bw", peak=ADAM),
    Method("xpipe", "xpipe", peak=ADAM),
    Method("pipedream", "pipedream", window=1, samples=WHOLE, peak=ADAM),
    Method("vnag", "vnag", window=1, samples=WHOLE, optimizer="NAdam", peak=NADAM),
    Method("spectrain", "spectrain", window=1, samples=WHOLE, optimizer="SGD", peak=SGD),
    Method("no rule", "pipedream", window=1, samples=WHOLE, peak=ADAM, rule="none"),
    Method("synchronous, NAdam", "1f1b", optimizer="NAdam", peak=NADAM),
    Method("synchronous, SGD", "1f1b", optimizer="SGD", peak=SGD),
    Method("synchronous, other order", "1f1b", peak=ADAM, seed=1),
    Method("pipedream, windows", "pipedream", peak=ADAM),
    Method("vnag, windows", "vnag", optimizer="NAdam", peak=NADAM),
    Method("spectrain, windows", "spectrain", optimizer="SGD", peak=SGD),
    Method("pipedream, each", "pipedream", window=1, peak=ADAM / 32**0.5),
    Method("vnag, each", "vnag", window=1, optimizer="NAdam", peak=NADAM / 32**0.5),
    Method("spectrain, each", "spectrain", window=1, optimizer="SGD", peak=SGD / 32),
    Method("synchronous, each", "1f1b", window=1, peak=ADAM / 32**0.5),
)
"""PipeDream, vNAG and SpecTrain update after every microbatch, as published: a batch is one here. "windows" are the
same rules with amdp's window, "each" with an update after every single sequence. All synchronous schedules of one
pipeline give the same, to the last bit; those with another optimizer, window or order of the data are there to be
held against."""

LIKE: Mapping[str, str] = {
    "vnag": "synchronous, NAdam",
    "vnag, windows": "synchronous, NAdam",
    "spectrain": "synchronous, SGD",
    "spectrain, windows": "synchronous, SGD",
    "pipedream, each": "synchronous, each",
}
"""The synchronous run with a method's optimizer and window, where that is not `SYNC`."""

WITHIN = 0.01
"""Of the synchronous loss, that AMDP's is to be."""

SHOWN: Mapping[str, tuple[Hue, Stroke]] = {
    SYNC: ("grey", "solid"),
    AMDP: ("navy", "solid"),
    WITHOUT: ("blue", "dashed"),
    LATE: ("navy", "dashed"),
    "pipedream-2bw": ("green", "solid"),
    "xpipe": ("amber", "solid"),
    "pipedream": ("brick", "solid"),
    "vnag": ("purple", "solid"),
    "spectrain": ("green", "dotted"),
    "no rule": ("brick", "dotted"),
}


def rows(
    methods: Sequence[Method] = METHODS, task: Task = TASK, setup: Setup = PAPER, loud: bool = False
) -> Iterator[Row]:
    """A row for each method: what it learnt, and how long a batch takes it at a setup."""
    for method in methods:
        found = train(method, task, print if loud else lambda text: None)
        yield found | {"batch_seconds": batch_seconds(method, setup)}


def reached(row: Row, loss: float) -> float | None:
    """Batches after which a method first has a validation loss, between those measured in a line; None if never."""
    curve = row["curve"]
    for (b0, v0), (b1, v1) in zip([(0, float("inf")), *curve[:-1]], curve, strict=True):
        if v1 is not None and v1 <= loss:
            share = 1.0 if v0 == float("inf") else (v0 - loss) / (v0 - v1)
            return float(b0 + share * (b1 - b0))
    return None


def lines(rows: Sequence[Row]) -> Iterator[str]:
    found = by_method(rows)
    sync = found[SYNC]
    targets = [max(sync["final"], found[AMDP]["final"]) if AMDP in found else sync["final"]]
    targets.append(sync["curve"][len(sync["curve"]) // 2 - 1][1])
    yield "validation loss after all batches, and seconds on the paper's ranks to two losses (simulated)"
    body = []
    for row in rows:
        like = found.get(LIKE.get(row["method"], SYNC), sync)
        batches = [reached(row, target) for target in targets]
        body.append(
            [
                row["method"],
                row["optimizer"],
                str(row["updates"]),
                str(row["mismatch"]),
                shown(row["final"]),
                _over(row, sync),
                _over(row, like),
                f"{row['batch_seconds']:.3f}",
                *("-" if each is None else f"{each * row['batch_seconds']:.0f}" for each in batches),
            ]
        )
    head = ["method", "optimizer", "updates", "mismatch", "loss", "over sync", "over its like", "s a batch"]
    yield from table([*head, *(f"s to {target:.3f}" for target in targets)], body)
    if AMDP in found:
        yield f"amdp's final loss: {_over(found[AMDP], sync)} (asked: within {WITHIN:.0%}; paper: +0.7%)"
    for name in (AMDP, WITHOUT, LATE):
        for target in targets if name in found else ():
            slow, fast = (reached(row, target) for row in (sync, found[name]))
            if slow is not None and fast is not None:
                ratio = slow * sync["batch_seconds"] / (fast * found[name]["batch_seconds"])
                yield f"to {target:.3f} {name} is {ratio - 1:.1%} faster than the best synchronous one (paper: 23%)"


def _over(row: Row, other: Row) -> str:
    return "-" if row["final"] is None else f"{row['final'] / other['final'] - 1:+.2%}"


def by_update(rows: Sequence[Row]) -> Figure:
    return chart_of(
        rows,
        SHOWN,
        title="Figure 7: loss by update",
        note="an update gathers 32 sequences: 32 microbatches, or one with pipedream, vnag, spectrain and no rule",
        x=Axis("updates"),
    )


def by_time(rows: Sequence[Row]) -> Figure:
    return chart_of(
        [row | {"curve": [(b * row["batch_seconds"], loss) for b, loss in row["curve"]]} for row in rows],
        SHOWN,
        title="Figure 7: loss by time",
        note="a batch takes as long as one of 128 on the paper's 8 ranks, by simulation: our losses, their ranks",
        x=Axis("seconds on the paper's ranks, simulated"),
    )


def chart_of(
    rows: Sequence[Row], shown: Mapping[str, tuple[Hue, Stroke]], *, title: str, note: str, x: Axis
) -> Figure:
    """Validation loss of some methods, from just below the best to where all have learnt something.

    Args:
        rows: of `train`.
        shown: the methods that are drawn, in this order.
    """
    found = by_method(rows)
    best = min(row["final"] for row in rows if row["final"] is not None)
    losses = Axis("validation loss, nats a byte", low=round(best - 0.05, 1), high=round(best + 1.2, 1))
    parts = []
    for name, (hue, stroke) in shown.items():
        # What is above the chart would be drawn over its title.
        points = [(at, loss) for at, loss in found[name]["curve"] if loss <= losses.high] if name in found else []
        if points:
            parts.append(Line(name, *map(list, zip(*points, strict=True)), hue=hue, stroke=stroke))
    return line_chart(parts, title=title, note=note, x=x, y=losses, height=460)


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--only", nargs="+", choices=[method.name for method in METHODS], help="these methods, again")
    given = parser.parse_args()
    task = {"task": asdict(TASK)}
    before = facts(given.out, "figure7")
    same = before.get("task") == json.loads(json.dumps(task["task"]))
    found, earlier = by_method(known(given.out, "figure7", same)), runs(given.out, "figure7", same)
    for method in METHODS:
        if method.name not in (given.only or [m.name for m in METHODS if m.name not in found]):
            continue
        began = time.perf_counter()
        (row,) = rows([method], loud=True)
        found[method.name] = row
        done = [found[m.name] for m in METHODS if m.name in found]
        save(given.out, "figure7", done, seeds=[TASK.seed], raw={"losses": None}, earlier=earlier, **task)
        print(f"({method.name}: {shown(row['final'])}, {time.perf_counter() - began:.0f} s)", flush=True)
    done = [found[m.name] for m in METHODS if m.name in found]
    if SYNC not in found:
        return
    print("\n".join(lines(done)))
    for name, chart in (("figure7-update", by_update), ("figure7-time", by_time)):
        save_chart(chart(done), given.out / f"{name}.svg")


if __name__ == "__main__":
    main()
