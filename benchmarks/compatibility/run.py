"""Pairs of the runtime's features, and triples with sharding, adapt or asynchronous ops: each trained, or refused.

    python benchmarks/compatibility/run.py --draw                            cells.json, from its seed alone
    python benchmarks/compatibility/run.py --extend                          cells for features that are new
    python benchmarks/compatibility/run.py --out benchmarks/compatibility/results.json
    python benchmarks/compatibility/run.py --device cuda     all stages on a GPU that the processes share
    python benchmarks/compatibility/run.py --array rules --out benchmarks/compatibility/rules_results.json
    python benchmarks/compatibility/run.py --readme                          the table of rules, from that file
    python benchmarks/compatibility/run.py --cell 17                         one cell, in words
    python benchmarks/compatibility/run.py --so-far ended.json --minutes 3 --out ...   in pieces

Exits with 1 where a cell is neither what the plain loop gives nor refused, where it is made, by the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compatibility_cells import FEATURES, FEATURES_OF_RULES, Cell, read_cells, run_cell
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from fuzz_cases import Outcome
from fuzz_runs import between_processes
from penstock.runtime.compatibility import refusal_of
from processes import forkserver

HERE = Path(__file__).parent
SEED = 13
IN_TRIPLES = ("sharding", "adapt", "asynchronous")
"""Of every triple with one of these all values are covered; of the others every pair."""
TRIES = 8
"""Rows made for each that is kept."""
BATCH = 20
"""Cells in one start of the processes, where nothing else is asked for."""

Tuple = tuple[tuple[int, int], ...]
"""(feature, value) by their numbers, ascending."""


@dataclass(frozen=True)
class Array:
    """A covering array.

    Attributes:
        name: of its file. features: their values. size: of the largest tuples.
        covers: whether it covers a tuple of values, by feature.
    """

    name: str
    features: Mapping[str, tuple[Any, ...]]
    size: int
    covers: Callable[[Mapping[str, Any]], bool]

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.json"


def _of_features(values: Mapping[str, Any]) -> bool:
    """Every pair, and every triple with certain features."""
    return len(values) == 2 or bool(values.keys() & {*IN_TRIPLES})


def _of_rules(values: Mapping[str, Any]) -> bool:
    """A rule and another value; with and without a tie, where replicas share out the optimizer's state."""
    if len(values) == 2:
        return "family" in values
    is_shared = values.get("mesh") == "pp 2 dp 2" and values.get("sharding") in ("zero1", "fsdp")
    return is_shared and values.keys() == {"family", "mesh", "sharding", "tied"}


WHOLE = Array("cells", FEATURES, 3, _of_features)
RULES = Array("rules", FEATURES_OF_RULES, 4, _of_rules)
"""Rules that predict weights, each with every value of the other features."""
ARRAYS = {array.name: array for array in (WHOLE, RULES)}


# The covering array.


def tuples(array: Array = WHOLE) -> list[Tuple]:
    """All that the array covers."""
    features = list(array.features.items())
    found: list[Tuple] = []
    for size in range(2, array.size + 1):
        for chosen in combinations(range(len(features)), size):
            for numbers in product(*(range(len(features[place][1])) for place in chosen)):
                one = tuple(zip(chosen, numbers, strict=True))
                if array.covers({features[place][0]: features[place][1][n] for place, n in one}):
                    found.append(one)
    return found


def draw(seed: int, array: Array = WHOLE, known: Sequence[Cell] = ()) -> list[Cell]:
    """Rows that cover all tuples: each by one that the table does not refuse, where there is such a one. Those that
    are known come first, and what they cover is covered.

    A row begins with a tuple that is not covered yet; the other features follow in a random order, each with the
    value that covers most, the drawn one among equals. Of several such rows the best is kept.
    """
    rng = random.Random(seed)
    largest = array.size
    sizes = [len(values) for values in array.features.values()]
    refused: dict[tuple[int, ...], bool] = {}

    def is_refused(row: Sequence[int]) -> bool:
        key = tuple(row)
        if key not in refused:
            refused[key] = cell_of(key, array).refusal is not None
        return refused[key]

    def completed(start: Tuple, left: set[Tuple]) -> list[int]:
        row = dict(start)
        for place in rng.sample(range(len(sizes)), len(sizes)):
            if place in row:
                continue
            values = rng.sample(range(sizes[place]), sizes[place])
            row[place] = max(values, key=lambda value: _new(row, place, value, left, largest))
        return [row[place] for place in range(len(sizes))]

    free, rows = set(missing(known, array)), []
    only_refused: set[Tuple] = set()
    while free:
        start = rng.choice(sorted(free))
        made = [completed(start, free) for _ in range(TRIES)]
        runs = [row for row in made if not is_refused(row)] or [
            row for row in (_random(start, sizes, rng) for _ in range(400)) if not is_refused(row)
        ][:1]
        if not runs:  # every row with it is refused
            free.discard(start)
            only_refused.add(start)
            continue
        best = max(runs, key=lambda row: len(_covered(row, free, largest)))
        free -= _covered(best, free, largest)
        rows.append(best)
    while only_refused:
        start = rng.choice(sorted(only_refused))
        made = [completed(start, only_refused) for _ in range(TRIES)]
        best = max(made, key=lambda row: len(_covered(row, only_refused, largest)))
        only_refused -= _covered(best, only_refused, largest)
        rows.append(best)
    return [*known, *(cell_of(row, array) for row in rows)]


def cell_of(row: Sequence[int], array: Array = WHOLE) -> Cell:
    found = zip(array.features.items(), row, strict=True)
    return Cell(**{name: values[place] for (name, values), place in found})


def _new(row: dict[int, int], place: int, value: int, left: set[Tuple], largest: int) -> int:
    """How many tuples a value adds to those that a part of a row covers."""
    others, one = sorted(row.items()), (place, value)
    more = (combinations(others, size - 1) for size in range(2, largest + 1))
    return sum(tuple(sorted((one, *some))) in left for each in more for some in each)


def _covered(row: Sequence[int], left: set[Tuple], largest: int) -> set[Tuple]:
    items = list(enumerate(row))
    return {each for size in range(2, largest + 1) for each in combinations(items, size) if each in left}


def _random(start: Tuple, sizes: Sequence[int], rng: random.Random) -> list[int]:
    fixed = dict(start)
    return [fixed.get(place, rng.randrange(size)) for place, size in enumerate(sizes)]


def missing(cells: Sequence[Cell], array: Array = WHOLE) -> list[Tuple]:
    """The tuples that no cell covers."""
    left = set(tuples(array))
    for cell in cells:
        row = [values.index(getattr(cell, name)) for name, values in array.features.items()]
        left -= _covered(row, left, array.size)
    return sorted(left)


# Running.


def run_all(
    cells: Sequence[Cell],
    so_far: Path | None = None,
    until: float = math.inf,
    batch: int = BATCH,
    numbers: Sequence[int] | None = None,
    beside: int = 1,
) -> dict[int, Outcome]:
    """What became of each, by its place here, those of one size in few starts of the processes.

    Args:
        numbers: the cells' own, to say which went wrong; their places where not given.
        beside: batches of several processes at the same time.
        so_far: a file with the outcomes of batches that ended in earlier pieces; those of this one are added.
        until: when no further batch is begun, by the monotonic clock.
        batch: cells in one start of the processes.
    """
    found: dict[int, Outcome] = {}
    if so_far is not None and so_far.exists():
        found = {int(number): Outcome(*each) for number, each in json.loads(so_far.read_text()).items()}
    lock = threading.Lock()
    forkserver()  # which only the main thread can start

    def run_batch(part: Sequence[int]) -> None:
        if time.monotonic() > until:
            return
        num, mine = cells[part[0]].num_processes, [cells[place] for place in part]
        ended = [run_cell(cell) for cell in mine] if num == 1 else between_processes(num, mine, run_cell)
        named = [place if numbers is None else numbers[place] for place in part]
        with lock:
            for place, name, outcome in zip(part, named, ended, strict=True):
                found[place] = outcome
                if outcome.kind not in ("same", "refused"):
                    print(f"cell {name}, {cells[place]}\n    {outcome.kind}: {outcome.detail[:600]}", flush=True)
            if num > 1:  # a run that is cut short is to say which were right, too
                print(f"cells {', '.join(map(str, named))} have ended, {num} processes each", flush=True)
            if so_far is not None:
                so_far.write_text(json.dumps({place: (o.kind, o.detail) for place, o in found.items()}))

    for num in sorted({cell.num_processes for cell in cells}):
        mine = [place for place, cell in enumerate(cells) if cell.num_processes == num and place not in found]
        begin = time.monotonic()
        with ThreadPoolExecutor(1 if num == 1 else beside) as pool:
            list(pool.map(run_batch, [mine[first : first + batch] for first in range(0, len(mine), batch)]))
        print(f"{num} processes: {len(mine)} cells in {time.monotonic() - begin:.0f} s", flush=True)
    return found


def report(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    kinds = Counter(o.kind for o in outcomes)
    trained = [(cell, o) for cell, o in zip(cells, outcomes, strict=True) if o.kind == "same"]
    return {
        **record(),
        "cells": len(cells),
        "trained": len(trained),
        "bitwise": sum(o.detail == "bitwise" for _, o in trained),
        "bitwise by promise": sum(cell.exact for cell, _ in trained),
        "refused": kinds["refused"],
        "reasons": dict(Counter(o.detail for o in outcomes if o.kind == "refused").most_common()),
        "wrong": [
            {"cell": number, **asdict(cells[number]), **vars(o)}
            for number, o in enumerate(outcomes)
            if o.kind not in ("same", "refused")
        ],
        "outcomes": [o.detail if o.kind == "same" else o.kind for o in outcomes],
    }


def table(cells: Sequence[Cell], outcomes: Sequence[str]) -> list[str]:
    """Of each rule how its cells ended."""
    ended: dict[str, list[str]] = {}
    for cell, outcome in zip(cells, outcomes, strict=True):
        ended.setdefault(cell.family, []).append(outcome)
    body = []
    for family in sorted(ended):
        found = Counter("within the tolerance" if each.startswith("within") else each for each in ended[family])
        same, close, refused = found["bitwise"], found["within the tolerance"], found["refused"]
        wrong = len(ended[family]) - same - close - refused
        body.append([family, *map(str, (len(ended[family]), same, close, refused, wrong))])
    return markdown(("rule", "cells", "bitwise", "within the tolerance", "refused", "wrong"), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--array", choices=ARRAYS, default=WHOLE.name, help="which one")
    parser.add_argument("--draw", action="store_true", help="write the array's cells")
    parser.add_argument("--extend", action="store_true", help="keep the array's cells, and add what they lack")
    parser.add_argument("--readme", action="store_true", help="write the table of rules that predict into README.md")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where all stages lie")
    parser.add_argument("--every", type=int, default=1, help="this one in so many cells, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--beside", type=int, default=1, help="batches of several processes at the same time")
    parser.add_argument("--cell", type=int, nargs="+", help="these alone")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--so-far", type=Path, help="a file of outcomes: cells that ended before are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more cells after that")
    parser.add_argument("--batch", type=int, default=BATCH, help="cells in one start of the processes")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    array = ARRAYS[given.array]
    if given.draw or given.extend:
        cells = draw(given.seed, array, read_cells(array.name) if given.extend else ())
        rows = ",\n".join("  " + json.dumps({name: getattr(cell, name) for name in FEATURES}) for cell in cells)
        array.path.write_text(f'{{"seed": {given.seed}, "cells": [\n{rows}\n]}}\n')
        refused, left = sum(refusal_of(cell.combination) is not None for cell in cells), len(missing(cells, array))
        print(f"wrote {array.path}: {len(cells)} cells, {refused} that the table refuses, {left} missing")
        return
    if given.readme:
        outcomes = json.loads((HERE / "rules_results.json").read_text())["outcomes"]
        write_between(HERE / "README.md", "rules", table(read_cells(RULES.name), outcomes))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cells = [replace(cell, device=given.device) for cell in read_cells(array.name)]
    if given.cell is not None:
        chosen = [cells[number] for number in given.cell]
        found = run_all(chosen, batch=given.batch, numbers=given.cell, beside=given.beside)
        for place, outcome in sorted(found.items()):
            print(f"{chosen[place]}\n    {outcome.kind}: {outcome.detail}")
        return
    numbers = range(len(cells))[given.first :: given.every]
    cells = [cells[number] for number in numbers]
    begin = time.monotonic()
    found = run_all(cells, given.so_far, begin + 60 * given.minutes, given.batch, numbers, given.beside)
    if len(found) < len(cells):
        print(f"{len(found)} of {len(cells)} cells have ended; give the same command again")
        sys.exit(2)
    result = report(cells, [found[number] for number in range(len(cells))])
    if given.so_far is None:
        result |= {"seconds": round(time.monotonic() - begin)}
    print(
        ", ".join(f"{result[k]} {k}" for k in ("cells", "trained", "bitwise", "refused")),
        len(result["wrong"]),
        "wrong",
    )
    if given.device == "cuda":
        result |= {"gpu": torch.cuda.get_device_name()}
    if given.out is not None:
        save_summary(given.out, result)
        print(f"wrote {given.out}")
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
