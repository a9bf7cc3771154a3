"""What the commands of figures 12 and 13 share: every method at every vocabulary of a model; saved, shown, drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from experiments.common.command import options
from experiments.common.results import Row, draw, known, load, runs, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.measured import measure
from experiments.flexpipe.methods import METHODS, OURS, SEARCHED, Run
from experiments.flexpipe.search import alternatives, search
from experiments.flexpipe.setups import BATCH, Model, Setup
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

NUM_GPUS = 32


def row_of(model: Model, vocabulary: int, method: str) -> Row:
    """A method at its best; `samples` is None where nothing fits in memory, and the rest of what comes nearest."""
    began = time.perf_counter()
    best = search(method, model, vocabulary, NUM_GPUS)
    run = best.run or best.nearest
    found = {"samples": None, "peak_gb": None, "measured": None} if run is None else facts(run)
    if best.run is None:
        found["samples"] = None
    cost = {"points": best.num_tried, "seconds": time.perf_counter() - began}
    return {"model": model.name, "vocabulary": vocabulary, "method": method, **found, **cost}


def facts(run: Run) -> Row:
    """What there is to say of a run, simulated."""
    setup, timeline = run.setup, run.timeline
    return {
        "pp": setup.pp,
        "dp": setup.dp,
        "mbs": setup.microbatch,
        "recompute": setup.recompute,
        "placement": run.placement,
        "iteration_ms": run.iteration_ms(),
        "makespan_ms": timeline.makespan,
        "busy_ms": sum(timeline.busy) / len(timeline.busy),
        "reduce_ms": run.iteration_ms() - timeline.makespan - run.step_ms,
        "step_ms": run.step_ms,
        "bubble": timeline.bubble_ratio,
        "peak_gb": max(run.peaks()) / 1e9,
        "samples": run.samples(),
        "measured": None,
    }


def speedup(rows: Sequence[Row], vocabulary: int, method: str, over: str, kind: str = "samples") -> float | None:
    """How many times as fast as another a method is; None where either does not fit."""
    found = {row["method"]: row[kind] for row in rows if row["vocabulary"] == vocabulary}
    return found[method] / found[over] if found.get(method) and found.get(over) else None


def lines(rows: Sequence[Row], model: Model, paper: Mapping[str, str]) -> Iterator[str]:
    """Throughputs with the choice behind each, and FlexPipe's speedups with the paper's range."""
    yield f"{model.name}: samples a second, and how; X: does not fit in memory; blank: not run by the clock"
    yield from table(
        ["vocabulary (K), method", "samples/s", "measured", "pp", "dp", "mbs", "again", "idle", "GB", "placement"],
        [_line(row) for row in rows],
    )
    yield ""
    rivals = [method for method in METHODS if method not in SEARCHED]
    kinds = ("samples", "measured") if any(row.get("measured") for row in rows) else ("samples",)
    for method in SEARCHED:
        for kind in kinds:
            yield f"{method}, {'simulated' if kind == 'samples' else 'measured'}, as a multiple of"
            body = [
                [
                    rival,
                    *(_times(rows, v, method, rival, kind) for v in model.vocabularies),
                    paper.get(rival, ""),
                ]
                for rival in rivals
            ]
            yield from table(["", *(f"{v}K" for v in model.vocabularies), "paper's FlexPipe"], body)
            yield ""


def _line(row: Row) -> list[str]:
    name = f"{row['vocabulary']} {row['method']}"
    if row["samples"] is None:
        least = "" if row["peak_gb"] is None else f"{row['peak_gb']:.0f}"
        return [name, "X", "", "", "", "", "", "", least, "out of memory"]
    measured = "" if row["measured"] is None else f"{row['measured']:.1f}"
    counts = [str(row[key]) for key in ("pp", "dp", "mbs", "recompute")]
    return [
        name,
        f"{row['samples']:.1f}",
        measured,
        *counts,
        f"{row['bubble']:.1%}",
        f"{row['peak_gb']:.0f}",
        row["placement"],
    ]


def _times(rows: Sequence[Row], vocabulary: int, method: str, over: str, kind: str) -> str:
    """A speedup; X where either does not fit in memory, nothing where it was not measured."""
    if speedup(rows, vocabulary, method, over) is None:
        return "X"
    value = speedup(rows, vocabulary, method, over, kind)
    return "" if value is None else f"{value:.2f}"


def chart(rows: Sequence[Row], model: Model, figure: str) -> Figure:
    series = [
        Bars(
            method,
            [
                next(r["samples"] for r in rows if (r["vocabulary"], r["method"]) == (v, method))
                for v in model.vocabularies
            ],
        )
        for method in METHODS
    ]
    return bar_chart(
        [f"{v}K" for v in model.vocabularies],
        series,
        title=f"Figure {figure[6:]}: GPT {model.name} on {NUM_GPUS} GPUs, by vocabulary",
        note="each method at its best (pp, dp, microbatch); simulated; – does not fit in memory",
        y=Axis("samples/s", low=0.0),
        show="{:.1f}".format,
        comment=f"made by: python -m experiments.flexpipe.{figure}",
    )


def chosen(model: Model, row: Row, num_gpus: int = NUM_GPUS) -> Run:
    """What a row chose, made anew; on another number of GPUs with as many more replicas and samples."""
    dp, updates = num_gpus // row["pp"], "zero1" if row["method"] == OURS else "all-reduce"
    batch = BATCH * num_gpus // NUM_GPUS
    setup = Setup(model, row["vocabulary"], row["pp"], dp, row["mbs"], row["recompute"], batch, updates)

    def worse(run: Run) -> tuple[bool, float]:
        ms = run.iteration_ms()
        return not run.fits, abs(ms - row["iteration_ms"]) if num_gpus == NUM_GPUS else ms

    return min(alternatives(row["method"], setup), key=worse)


def command(figure: str, about: str | None, model: Model, paper: Mapping[str, str], headline: Sequence[int]) -> None:
    """Runs a figure from the command line.

    Args:
        paper: its ranges of FlexPipe's speedup, by rival. headline: vocabularies that `--measured` runs.
    """
    parser = options(about, RESULTS, show=True)
    parser.add_argument(
        "--measured", action="store_true", help="run what was found on emulated devices: the headline"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is there already")
    parser.add_argument("--stretch", type=float, default=2.0, help="seconds of the clock to one of an op")
    given = parser.parse_args()
    if not (given.show or given.measured):
        rows, earlier = (each(given.out, figure, given.resume) for each in (known, runs))
        for vocabulary, method in list(product(model.vocabularies, METHODS))[len(rows) :]:
            rows.append(row_of(model, vocabulary, method))
            print(" ".join(_line(rows[-1])), f"({rows[-1]['seconds']:.0f} s)", flush=True)
            save(given.out, figure, rows, earlier=earlier)
    rows = load(given.out, figure)
    if given.measured:
        for row in rows:
            if row["samples"] is not None and row["vocabulary"] in headline:
                run = chosen(model, row)
                row["measured_ms"] = measure(run, given.stretch)
                row["measured"] = run.samples(row["measured_ms"])
                print(f"{row['method']}: {row['samples']:.1f} simulated, {row['measured']:.1f} measured", flush=True)
        save(given.out, figure, rows, measured=True, stretch=given.stretch)
    print("\n".join(lines(rows, model, paper)))
    draw(given.out, figure, chart(rows, model, figure))
