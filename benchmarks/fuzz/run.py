"""Random models, schedules, meshes and options, trained by the pipeline and by the plain loop.

    python benchmarks/fuzz/run.py --cases 2000 --between 500 --out benchmarks/fuzz/fuzz.json
    python benchmarks/fuzz/run.py --planted               the known mistakes: which of them this source has
    python benchmarks/fuzz/run.py --case 17 --shape 2,2,1 --smaller
    python benchmarks/fuzz/run.py --cases 500 --device cuda   the plain loop and the pipeline on a GPU
    python benchmarks/fuzz/run.py --cases 2000 --so-far ended.json --minutes 3 --out ...   in pieces, till it exits 0

Exits with 1 where numbers differ silently, an error is not one of ours, or too many cases are refused. To try another
source, put it in front of PYTHONPATH: the runs themselves (tests/fuzz_cases.py) use the public names alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from fuzz_cases import PLANTED, Case, Outcome, draw, run, smaller, with_turns
from fuzz_runs import SHAPES, between_processes
from processes import forkserver

MOST_REFUSED = 0.1
"""Of the cases whose plain loop runs."""
FRESH = 250
"""Cases after which processes are started anew."""
BATCH = 25
"""Cases in one start of the processes."""


def _drawn(seed: int, shape: tuple[int, int, int] | None, device: str, turns: bool) -> Case:
    case = replace(draw(seed, shape), device=device)
    return with_turns(case) if turns else case


def _alone(device: str, turns: bool, seed: int) -> tuple[Case, Outcome]:
    case = _drawn(seed, None, device, turns)
    return case, run(case, None)


def _begin() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


class Ended:
    """How cases ended, by seed, those of earlier pieces too.

    Args:
        path: a file that keeps them from piece to piece; None where all run in one.
        until: when no further batch is begun, by the monotonic clock.
    """

    def __init__(self, path: Path | None, until: float) -> None:
        self._path, self._until, self._lock = path, until, threading.Lock()
        self.found: dict[int, dict[str, str]] = {}
        if path is not None and path.exists():
            self.found = {int(seed): row for seed, row in json.loads(path.read_text()).items()}

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until

    def add(self, seeds: Iterable[int], found: Iterable[tuple[Case, Outcome]]) -> None:
        """Takes down a batch, and prints what is wrong at once."""
        with self._lock:
            self._add(seeds, found)

    def _add(self, seeds: Iterable[int], found: Iterable[tuple[Case, Outcome]]) -> None:
        before = len(self.found)
        for seed, (case, outcome) in zip(seeds, found, strict=True):
            if outcome.kind in ("different", "raw"):
                print(f"{outcome.kind}: {case}\n    {outcome.detail[:600]}", flush=True)
            self.found[seed] = {"case": str(case), "schedule": case.schedule, **vars(outcome)}
        print(f"{len(self.found) - before} cases more", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.found))


def in_one_process(seeds: range, workers: int, ended: Ended, device: str, turns: bool) -> None:
    for first in range(0, len(seeds), FRESH):  # what torch.compile keeps would grow
        part = [seed for seed in seeds[first : first + FRESH] if seed not in ended.found]
        if part and not ended.is_over:
            with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as pool:
                ended.add(part, pool.map(partial(_alone, device, turns), part))


def between(seeds: range, ended: Ended, device: str, beside: int, turns: bool) -> None:
    """Batches over 2, 3 and 4 processes, so many at the same time."""
    cases: dict[int, list[tuple[int, Case]]] = {n: [] for n in SHAPES}
    for place, seed in enumerate(seeds):
        n = (2, 4, 4, 3, 2)[place % 5]
        cases[n].append((seed, _drawn(seed, SHAPES[n][len(cases[n]) % len(SHAPES[n])], device, turns)))
    batches = []
    for n, all_cases in cases.items():
        own = [(seed, case) for seed, case in all_cases if seed not in ended.found]
        batches += [(n, own[first : first + BATCH]) for first in range(0, len(own), BATCH)]

    def run_batch(batch: tuple[int, list[tuple[int, Case]]]) -> None:
        if not ended.is_over:
            numbers, part = zip(*batch[1], strict=True)
            ended.add(numbers, zip(part, between_processes(batch[0], part), strict=True))

    forkserver()  # which only the main thread can start
    with ThreadPoolExecutor(beside) as pool:
        list(pool.map(run_batch, batches))


def report(rows: list[dict[str, str]]) -> dict[str, Any]:
    kinds = Counter(row["kind"] for row in rows)
    reasons = Counter(_reason(row["detail"]) for row in rows if row["kind"] in ("refused", "late"))
    return {
        "cases": len(rows),
        **{kind: kinds[kind] for kind in ("same", "different", "refused", "late", "raw", "invalid")},
        "same_in_float64": sum(row["kind"] == "same" and bool(row["detail"]) for row in rows),
        "reasons": dict(reasons.most_common()),
        "schedules": dict(sorted(Counter(row["schedule"] for row in rows).items())),
        "wrong": [row for row in rows if row["kind"] in ("different", "raw")],
    }


def _reason(detail: str) -> str:
    """A refusal without its names and numbers, so that equal reasons are counted together."""
    return " ".join("#" if any(c.isdigit() for c in word) else word for word in detail.split())[:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=0, help="in one process")
    parser.add_argument("--between", type=int, default=0, help="between two to four processes")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--beside", type=int, default=1, help="batches between processes at the same time")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where stages lie; all share one GPU"
    )
    parser.add_argument(
        "--turns", action="store_true", help="after the first update: another schedule, a checkpoint, an evaluation"
    )
    parser.add_argument("--planted", action="store_true", help="the known mistakes alone")
    parser.add_argument("--case", type=int, help="one seed alone")
    parser.add_argument("--shape", help="of its mesh: PP,DP,TP")
    parser.add_argument("--smaller", action="store_true", help="find a smaller case that goes wrong alike")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--so-far", type=Path, help="a file of outcomes: cases that ended before are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more batches after that")
    given = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _begin()
    if given.planted:
        sys.exit(planted(given.out))
    if given.case is not None:
        shape = tuple(map(int, given.shape.split(","))) if given.shape else None
        sys.exit(one(_drawn(given.case, shape, given.device, given.turns), given.smaller))
    if given.so_far is not None and given.cases and given.between:
        parser.error("--so-far keeps cases of one kind: give --cases or --between")
    result = record() | ({"gpu": torch.cuda.get_device_name()} if given.device == "cuda" else {})
    failed = False
    until = time.monotonic() + 60 * given.minutes
    for name, num in (("in one process", given.cases), ("between processes", given.between)):
        if not num:
            continue
        seeds = range(given.first, given.first + num)
        begin = time.monotonic()
        ended = Ended(given.so_far, until)
        if name == "in one process":
            in_one_process(seeds, given.workers, ended, given.device, given.turns)
        else:
            between(seeds, ended, given.device, given.beside, given.turns)
        if len(ended.found) < num:
            print(f"{len(ended.found)} of {num} cases have ended; give the same command again")
            sys.exit(2)
        part = report([ended.found[seed] for seed in seeds])
        seconds = {} if given.so_far is not None else {"seconds": round(time.monotonic() - begin)}
        result[name] = {"seeds": [seeds.start, seeds.stop], **seconds, **part}
        valid = part["cases"] - part["invalid"]
        refused = (part["refused"] + part["late"]) / max(valid, 1)
        failed = failed or bool(part["wrong"]) or refused > MOST_REFUSED
        print(
            f"{name}: "
            + ", ".join(f"{part[k]} {k}" for k in ("same", "different", "raw", "refused", "late", "invalid"))
        )
        for reason, count in part["reasons"].items():
            print(f"    {count} times: {reason}")
    if given.out is not None:
        save_summary(given.out, result)
        print(f"wrote {given.out}")
    sys.exit(failed)


def outcome_of(case: Case) -> Outcome:
    if case.shape is None:
        return run(case, None)
    pp, dp, tp = case.shape
    return between_processes(pp * dp * tp, [case])[0]


def one(case: Case, find_smaller: bool) -> int:
    outcome = outcome_of(case)
    print(f"{outcome.kind}: {case}\n    {outcome.detail}")
    if find_smaller and outcome.kind not in ("same", "invalid"):
        small = smaller(case, lambda each: outcome_of(each).kind == outcome.kind)
        print(f"smaller: {small}\n    {outcome_of(small).detail}")
    return outcome.kind in ("different", "raw")


def planted(out: Path | None) -> int:
    """How many of the known mistakes there are."""
    found = [(name, outcome_of(case)) for name, case in PLANTED.items()]
    for name, outcome in found:
        print(f"{outcome.kind:10} {name}\n           {outcome.detail[:200]}", flush=True)
    if out is not None:
        rows = {name: {"outcome": o.kind, "detail": o.detail[:200]} for name, o in found}
        save_summary(out, {**record(), "planted": rows})
        print(f"wrote {out}")
    return sum(o.kind in ("different", "raw") for _, o in found)


if __name__ == "__main__":
    main()
