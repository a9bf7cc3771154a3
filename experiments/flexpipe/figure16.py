"""Figure 16: CLIPs of 4.7B, 8.2B and 9.7B on 40 GPUs, DistMM-Pipe's schedule and FlexPipe's.

    python -m experiments.flexpipe.figure16               simulated, a quarter of an hour
    python -m experiments.flexpipe.figure16 --measured    what it found, all 40 ranks on emulated devices, a minute
    python -m experiments.flexpipe.figure16 --show        what was found last

The paper: FlexPipe is 1.26, 1.29 and 1.18 times as fast. Every method has the layout that is best for it: GPUs a
tower, ranks and replicas, microbatches, and how many of them meet in a gather. Which towers make up the latter two
the paper does not say, see `clip.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf

from experiments.common.command import options
from experiments.common.results import Row, draw, find, known, load, runs, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.clip import BATCH, CLIPS, Layout, Share
from experiments.flexpipe.clip_methods import CLIP_METHODS, DISTMM, MOST_LAYOUTS, ClipRun, best_run
from experiments.flexpipe.measured import measure
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

PAPER = {"4.7B": 1.26, "8.2B": 1.29, "9.7B": 1.18}
BASE = DISTMM
FREE, FEW = {"launch_ms": 0.0}, {"most_group": 16}
VARIANTS: dict[str, tuple[str, dict[str, float]]] = {
    **{method: (method, {}) for method in CLIP_METHODS},
    "DistMM-Pipe, kernels cost nothing": (BASE, FREE),
    "FlexPipe, kernels cost nothing": ("FlexPipe", FREE),
    "DistMM-Pipe, 16 samples in a gather": (BASE, FEW),
    "FlexPipe, 16 samples in a gather": ("FlexPipe", FEW),
}
"""Names of rows: the method, and what is other than in the figure."""


def is_shown(clip: str, name: str) -> bool:
    """A search of three towers takes long: what is other than in the figure is shown of two."""
    return name in CLIP_METHODS or len(CLIPS[clip]) == 2


def row_of(clip: str, name: str, rows: Sequence[Row] = ()) -> Row:
    """A method at its best; ours is also tried with the layout that `rows` have for FlexPipe."""
    method, changed = VARIANTS[name]
    began = time.perf_counter()
    found = [row for row in rows if name == "ours" and (row["clip"], row["method"]) == (clip, "FlexPipe")]
    most = MOST_LAYOUTS if name == "ours" else None
    run = best_run(method, CLIPS[clip], also=[layout_of(row) for row in found], most_layouts=most, **changed)
    return {"clip": clip, "method": name, **facts(run), "seconds": time.perf_counter() - began}


def layout_of(row: Row) -> Layout:
    """The layout that a row chose."""
    return tuple(
        Share(tower, each["pp"], each["dp"], BATCH // (each["dp"] * each["mbs"]))
        for tower, each in zip(CLIPS[row["clip"]], row["towers"], strict=True)
    )


def chosen(row: Row) -> ClipRun:
    """What a row of a method chose, made anew."""
    layout = layout_of(row)
    stages = [each["stages a rank"] for each in row["towers"]]
    return next(
        run
        for run in CLIP_METHODS[row["method"]](layout, inf)
        if (run.group, list(run.stages), run.split) == (row["group"], stages, row["split"])
    )


def facts(run: ClipRun) -> Row:
    return {
        "towers": [
            {"tower": share.tower.name, "pp": share.pp, "dp": share.dp, "mbs": share.microbatch, "stages a rank": v}
            for share, v in zip(run.layout, run.stages, strict=True)
        ],
        "group": run.group,
        "split": run.split,
        "iteration_ms": run.iteration_ms(),
        "makespan_ms": run.timeline.makespan,
        "bubble": run.timeline.bubble_ratio,
        "gather_share": run.gather_share(),
        "peak_gb": max(run.peaks()) / 1e9,
        "samples": run.samples(),
        "measured": None,
    }


def speedup(rows: Sequence[Row], clip: str, method: str, kind: str = "samples", over: str = BASE) -> float | None:
    """How many times as fast as DistMM-Pipe."""
    its, base = (find(rows, clip=clip, method=name)[kind] for name in (method, over))
    return its / base if its and base else None


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "samples a second, and how: ranks x replicas, samples a microbatch, stages a rank of each tower"
    body = []
    for row in rows:
        towers = "; ".join(
            f"{each['tower']} {each['pp']}x{each['dp']}, {each['mbs']}, {each['stages a rank']}"
            for each in row["towers"]
        )
        measured = "" if row["measured"] is None else f"{row['measured']:.1f}"
        numbers = [
            f"{row['samples']:.1f}",
            measured,
            str(row["group"]),
            f"{row['gather_share']:.1%}",
            f"{row['bubble']:.1%}",
        ]
        body.append([f"{row['clip']}, {row['method']}", *numbers, towers])
    yield from table(["", "samples/s", "measured", "in a gather", "gathers", "idle", "towers"], body)
    yield ""
    yield "as a multiple of DistMM-Pipe"
    kinds = ("samples", "measured") if any(row["measured"] for row in rows) else ("samples",)
    body = [["FlexPipe, paper", *(f"{each:.2f}" for each in PAPER.values())]]
    for method in ("FlexPipe", "ours"):
        for kind in kinds:
            said = "simulated" if kind == "samples" else "measured"
            body.append([f"{method}, {said}", *(f"{speedup(rows, clip, method, kind):.2f}" for clip in CLIPS)])
    for name in VARIANTS:
        if name.startswith("FlexPipe, "):
            base = name.replace("FlexPipe", BASE)
            shown = [f"{speedup(rows, c, name, over=base):.2f}" if is_shown(c, name) else "" for c in CLIPS]
            body.append([name, *shown])
    yield from table(["", *CLIPS], body)


def chart(rows: Sequence[Row]) -> Figure:
    base = [find(rows, clip=clip, method=BASE)["samples"] for clip in CLIPS]
    series = []
    for method in CLIP_METHODS:
        paper = [PAPER[clip] * each for clip, each in zip(CLIPS, base, strict=True)] if method == "FlexPipe" else ()
        series.append(Bars(method, [find(rows, clip=clip, method=method)["samples"] for clip in CLIPS], paper=paper))
    return bar_chart(
        [f"CLIP {clip}" for clip in CLIPS],
        series,
        title="Figure 16: CLIPs on 40 GPUs",
        note="each method with the layout that is best for it; simulated",
        paper="paper's speedup",
        y=Axis("samples/s", low=0.0),
        show="{:.0f}".format,
        comment="made by: python -m experiments.flexpipe.figure16",
    )


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--measured", action="store_true", help="run the figure's schedules on emulated devices too")
    parser.add_argument("--resume", action="store_true", help="go on with what is there already")
    parser.add_argument("--stretch", type=float, default=5.0, help="seconds of the clock to one of an op")
    given = parser.parse_args()
    if not (given.show or given.measured):
        rows, earlier = (each(given.out, "figure16", given.resume) for each in (known, runs))
        for clip in CLIPS:
            for name in VARIANTS:
                if [row for row in rows if (row["clip"], row["method"]) == (clip, name)] or not is_shown(clip, name):
                    continue
                rows.append(row_of(clip, name, rows))
                print(
                    f"{clip}, {name}: {rows[-1]['samples']:.1f} samples/s ({rows[-1]['seconds']:.0f} s)", flush=True
                )
                save(given.out, "figure16", rows, earlier=earlier)
    rows = load(given.out, "figure16")
    if given.measured:
        for row in rows:
            if row["method"] in CLIP_METHODS:
                run = chosen(row)
                row["measured_ms"] = measure(run.whole(), given.stretch)
                row["measured"] = run.samples(row["measured_ms"])
                print(
                    f"{row['clip']}, {row['method']}: {row['samples']:.1f} simulated, {row['measured']:.1f} measured"
                )
        save(given.out, "figure16", rows, measured=True, stretch=given.stretch)
    print("\n".join(lines(rows)))
    draw(given.out, "figure16", chart(rows))


if __name__ == "__main__":
    main()
