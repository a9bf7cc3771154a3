"""Whether planning has become slower: the benchmarks `plan` and `space` of two checkouts, in alternation.

    python benchmarks/plan/before.py BEFORE speed     list scheduling, and the timing of its order
    python benchmarks/plan/before.py BEFORE free      posing, bound and first schedule; plans within a second
    python benchmarks/plan/before.py BEFORE tight     gaps within ten seconds under a tight cap, 8 x 32
    python benchmarks/plan/before.py BEFORE space     the whole space of programs, of 2 to 64 ranks
    python benchmarks/plan/before.py BEFORE space 1   only the next run, of this checkout or that one
    python benchmarks/plan/before.py BEFORE same      list scheduling of both in one process, over the same arrays
    python benchmarks/plan/before.py --table          the tables of the READMEs, from the results

BEFORE is the path of a checkout of the commit to compare with, whose numba code lies in its own folders. Each call
runs this checkout and that one in the order of `ORDER`, in processes of their own; nothing is compiled meanwhile, if
each part has been run once before. Runs are added to those that are in the results.

`same` runs the compiled `list_ops` of both over the same pages of memory, and this checkout's over arrays in small
pages as well. Its times are of the thread alone, so other work on the machine adds less. It writes same.json anew.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import commit, machine

FOLDER = Path(__file__).resolve().parent
NOW = FOLDER.parent.parent
ORDER = ("before", "now", "now", "before")
PARTS = {
    "speed": ("plan", "--only", "speed", "--seed", "7"),
    "free": ("plan", "--only", "free", "--instances", "10", "--seed", "7"),
    "tight": ("plan", "--only", "tight", "--size", "8x32", "--instances", "4", "--seed", "7"),
    "space": (
        "space",
        "--repeats",
        "1",
        *(word for ranks in (2, 4, 8, 16, 32, 64) for word in ("--ranks", f"{ranks}")),
    ),
}
ORDER_OF = {"space": ("before", "now"), "tight": ("before", "now")}
"""Of parts that take longer; the other way round the next time."""


def results(part: str) -> Path:
    return (FOLDER.parent / "space" if part == "space" else FOLDER) / "before.json"


def ran(checkout: Path, part: str) -> dict[str, Any]:
    """What one run of a checkout measured."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    with tempfile.TemporaryDirectory() as folder:
        out, load = Path(folder) / "out.json", os.getloadavg()[0]
        name, *options = PARTS[part]
        program = [str(FOLDER.parent / name / "run.py")] if checkout == NOW else ["-m", "penstock", "bench", name]
        command = [sys.executable, *program, *options, "--out", str(out)]
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
        return {"part": part, "commit": commit(checkout), "load": load, "result": json.loads(out.read_text())}


def measure(before: Path, part: str, most: int | None = None) -> None:
    """Runs the order of a part, or at most so many of its runs, and goes on where it was left."""
    known = json.loads(results(part).read_text()) if results(part).exists() else []
    order = ORDER_OF.get(part, ORDER)
    rounds, done = divmod(len([row for row in known if row["part"] == part]), len(order))
    if part in ORDER_OF and rounds % 2:
        order = order[::-1]
    for which in order[done:][:most]:
        known.append({"which": which, **ran(before if which == "before" else NOW, part)})
        results(part).write_text(json.dumps(known) + "\n")
        print(which, *(f"{name} {value:.4g}" for name, value in numbers(known[-1]).items()), flush=True)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """By name, what a run says in numbers: milliseconds, seconds or a gap in percent."""
    found: dict[str, float] = {}
    result = row["result"]
    if row["part"] == "speed":
        for size in result["speeds"]:
            name = f"{size['num_ranks']} x {size['num_microbatches']}"
            found |= {f"{name}: listed ms": size["list_ms"], f"{name}: timed ms": size["time_ms"]}
    elif row["part"] == "space":
        for search in result["searches"]:
            limit = "any" if search["memory_limit"] is None else f"{search['memory_limit']:g}"
            found[f"{search['num_ranks']} x {search['num_microbatches']}, memory {limit}: s"] = search["seconds"]
        found["all searches: s"] = sum(search["seconds"] for search in result["searches"])
    else:
        for size in result["families"]:
            name, each = f"{size['num_ranks']} x {size['num_microbatches']}", size["instances"]
            if row["part"] == "free":
                found[f"{name}: first ms"] = median(one["fast_ms"] for one in each)
            found |= {
                f"{name}: mean gap %": 100 * fmean(one["gap"] for one in each),
                f"{name}: mean s": fmean(one["seconds"] for one in each),
            }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """By number, the median of the runs before and now."""
    lines = ["| | before | now | now over before | runs each |", "|---|---:|---:|---:|---:|"]
    for part in PARTS:
        by: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
        for row in rows:
            if row["part"] == part:
                by[row["which"]].append(numbers(row))
        for name in by["before"][0] if by["before"] and by["now"] else ():
            before, now = (median(run[name] for run in by[which]) for which in ("before", "now"))
            share = f"{now / before:.3f}" if before else "-"
            lines.append(f"| {part}, {name} | {before:.4g} | {now:.4g} | {share} | {len(by['now'])} |")
    return "\n".join(lines)


SAME_SIZES = ((32, 128, 40), (128, 1024, 15), (1024, 4096, 7))
"""Ranks, microbatches, and how often each is timed."""
BEFORE, AFTER, SMALL_PAGES = "before", "now", "now, small pages"


def old_listing(before: Path) -> Any:
    """`list_ops` of a checkout of 59f8f88, compiled from its source by numba (to be installed for this), beside this
    checkout's package."""
    import numba

    def loaded(name: str) -> ModuleType:
        file = before / "src/penstock/plan" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"penstock.plan.{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    package: Any = ModuleType("penstock.plan")
    sys.modules[package.__name__] = package
    package.small = small = loaded("small")
    listing: Any = loaded("listing")
    for name in ("least_of", "sift"):
        setattr(small, name, numba.njit(vars(small)[name]))
        setattr(listing, name, vars(small)[name])
    for name in ("can_finish", "list_ops"):
        setattr(listing, name, numba.njit(vars(listing)[name]))
    return listing.list_ops


def in_pages(like: Any, advice: int) -> Any:
    """An array like another, at the same place in its page of 2 MiB, in pages of the kind that is advised."""
    import numpy as np

    page = 2 << 20
    memory = mmap.mmap(-1, like.nbytes + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    whole = np.frombuffer(memory, np.uint8)
    first = (like.ctypes.data - whole.ctypes.data) % page
    made = whole[first : first + like.nbytes].view(like.dtype)
    made[:] = like
    return made


def same(before: Path) -> None:
    """Times list scheduling of both in this process, in alternation; see the module's docstring."""
    import numpy as np

    from benchmarks.plan.run import draw, posed
    from penstock.engine import list_by_values
    from penstock.engine.compiled import compiled
    from penstock.engine.list_by_values import ListSpace
    from penstock.planning.search import list_by_class

    old, new = old_listing(before), compiled(list_by_values).list_ops
    random, rows = np.random.default_rng(7), []
    for num_ranks, num_microbatches, repeats in SAME_SIZES:
        problem = posed(*draw(num_ranks, random), num_microbatches, float(num_ranks))
        network, space = problem.queues, ListSpace.of(problem.queues)
        list_by_class(problem, problem.priority_class, space)
        large = ("values", "start", "row")
        spaces = {
            advice: space._replace(**{name: in_pages(getattr(space, name), advice) for name in large})
            for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
        }

        def call(name: str, network: Any = network, spaces: Any = spaces) -> float:
            space = spaces[mmap.MADV_NOHUGEPAGE if name == SMALL_PAGES else mmap.MADV_HUGEPAGE]
            if name == BEFORE:
                given = space.values, space.wait, False, space.start, space.row, space.state, space.times
                return float(old(network, *given))
            return float(new(network, space, False, False))

        names, load = [BEFORE, AFTER, SMALL_PAGES], os.getloadavg()[0]
        if len({call(name) for name in names}) > 1:
            raise SystemExit("the makespans differ")
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(repeats):
            for name in names[:: 1 if turn % 2 else -1]:
                began = time.thread_time()
                call(name)
                found[name].append(round((time.thread_time() - began) * 1e9 / network.num_ops, 2))
        rows.append({"size": [num_ranks, num_microbatches], "load": [load, os.getloadavg()[0]], "ns_an_op": found})
        print(same_table(rows), flush=True)
    made = {
        "command": "python benchmarks/plan/before.py ../before same",
        "commits": {"before": commit(before), "now": commit(NOW)},
        "seed": 7,
        "machine": machine(),
        "rows": rows,
    }
    (FOLDER / "same.json").write_text(json.dumps(made, indent=1) + "\n")
    write_between(FOLDER / "README.md", "results", same_table(rows))


def same_table(rows: list[dict[str, Any]]) -> str:
    """The table of README.md: the least of all repeats, and medians of the ratios within each turn."""
    lines = [
        "| ranks x microbatches | before: ns an op | now | now over before | now, small pages | small over large |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        found = row["ns_an_op"]
        least = {name: min(times) for name, times in found.items()}
        ratio, pages = (
            median(a / b for a, b in zip(found[one], found[other], strict=True))
            for one, other in ((AFTER, BEFORE), (SMALL_PAGES, AFTER))
        )
        lines.append(
            f"| {row['size'][0]} x {row['size'][1]} | {least[BEFORE]:.0f} | {least[AFTER]:.0f} | {ratio:.2f} | "
            f"{least[SMALL_PAGES]:.0f} | {pages:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[2:] == ["same"]:
        same(Path(sys.argv[1]).resolve())
    elif sys.argv[1:] == ["--table"]:
        for each in (results("speed"), results("space")):
            print(each.parent.name, table(json.loads(each.read_text())) if each.exists() else "", sep="\n")
    else:
        measure(Path(sys.argv[1]).resolve(), sys.argv[2], *map(int, sys.argv[3:]))
