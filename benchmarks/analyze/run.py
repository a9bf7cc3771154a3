"""How near the replay comes to what was measured and to the authors' own tool, and how long it takes: see README.md.

    python benchmarks/analyze/run.py TRACE.parquet [TRACE.parquet ...] --out benchmarks/analyze/results.json
    python benchmarks/analyze/run.py --readme        writes the table of README.md from results.json

Beside each `trace-NAME.parquet` lie the authors' `result-NAME.json`, `mw-NAME.json` and `ms-NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.analyze import analyze_trace
from penstock.analyze.page import to_page
from penstock.formats.traces import RunTrace, read_trace

FOLDER = Path(__file__).resolve().parent
LARGE = 230_000
"""Ops of the largest analysis that is timed: a given trace, its steps repeated."""


def one(path: Path) -> dict[str, Any]:
    """One trace against the authors' results."""
    name = path.stem.removeprefix("trace-")
    theirs = json.loads(path.with_name(f"result-{name}.json").read_text(encoding="utf-8"))
    began = time.perf_counter()
    trace = read_trace(path)
    found = analyze_trace(trace)
    page = to_page(found)
    seconds = time.perf_counter() - began
    steps = [str(int(step)) for step in found.run.table.steps]
    base, no_delay = ([theirs[key][step] * 1e3 for step in steps] for key in ("step_t_base", "step_t_nodelay"))
    m = found.metrics
    by_kind = theirs["blocking_decompose_by_optype"]
    row = {
        "trace": name,
        "ops": len(trace),
        "steps": len(steps),
        "seconds": seconds,
        "page_bytes": len(page.encode()),
        "against_their_replay": _median_error(found.run.replayed.tolist(), no_delay),
        "against_measured": _median_error(found.run.replayed.tolist(), base),
        "theirs_against_measured": _median_error(no_delay, base),
        "slowdown": m.slowdown,
        "their_slowdown": theirs["blocking_slowdown"],
        "slowdown_off": abs(m.slowdown / theirs["blocking_slowdown"] - 1),
        "launch_slowdown": m.launch_slowdown,
        "their_launch_slowdown": theirs["launch_slowdown"],
        "largest_difference_by_kind": max(abs(m.by_kind[kind] - value) for kind, value in by_kind.items()),
        "largest_difference_by_replica": max(
            abs(m.by_replica[int(key)] - value) for key, value in theirs["blocking_decompose_by_dp_rank"].items()
        ),
        "largest_difference_by_rank": max(
            abs(m.by_rank[int(key)] - value) for key, value in theirs["blocking_decompose_by_stage"].items()
        ),
        "causes": [each.to_json() for each in found.causes[:3]],
        "what_ifs": [each.to_json() for each in found.what_ifs[:3]],
    }
    for key, ours, file in (("Mw", m.worst_workers, "mw"), ("Ms", m.last_stage, "ms")):
        said = path.with_name(f"{file}-{name}.json")
        row[key] = ours
        row[f"their_{key}"] = json.loads(said.read_text(encoding="utf-8"))[key] if said.exists() else None
    return row


def large(path: Path) -> dict[str, Any]:
    """The same trace with its steps repeated until it has as many ops as a long recording."""
    trace = read_trace(path)
    times = -(-LARGE // len(trace))
    last = int(trace.step.max()) + 1
    columns = {name: np.concatenate([getattr(trace, name)] * times) for name in RunTrace.COLUMNS}
    columns["step"] = columns["step"] + np.repeat(np.arange(times) * last, len(trace))
    repeated = RunTrace(trace.name, trace.kinds, **columns)
    began = time.perf_counter()
    found = analyze_trace(repeated)
    to_page(found)
    return {
        "ops": len(repeated),
        "seconds": time.perf_counter() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "slowdown": found.slowdown,
    }


def _median_error(ours: list[float], theirs: list[float]) -> float:
    return median(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def table(found: dict[str, Any]) -> str:
    """The README's table."""
    head = (
        "| trace | ops | replay against their replay | against measured (theirs) | S (theirs) | first cause "
        "| seconds |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {row['trace']} | {row['ops']:,} | {row['against_their_replay']:.0e} | {row['against_measured']:.2%} "
        f"({row['theirs_against_measured']:.2%}) | {row['slowdown']:.4f} ({row['their_slowdown']:.4f}) | "
        f"{row['causes'][0]['what']} | {row['seconds']:.1f} |\n"
        for row in found["traces"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER / "results.json")
    parser.add_argument("--readme", action="store_true", help="only write the table of README.md")
    options = parser.parse_args()
    if options.readme:
        results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
        write_between(FOLDER / "README.md", "results", table(results))
        return
    if not options.traces:
        parser.error("name the traces to analyze, or give --readme")
    found = {
        **record(),
        "traces": [one(path) for path in options.traces],
        "large": large(options.traces[0]),
    }
    save_summary(options.out, found)
    print(table(found))
    print(found["large"])


if __name__ == "__main__":
    main()
